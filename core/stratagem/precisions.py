"""Classes of the installed precision plugins, imported on first use: ``from stratagem.precisions import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("precision")
