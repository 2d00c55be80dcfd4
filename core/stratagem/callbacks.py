"""Classes of the installed callback plugins, imported on first use: ``from stratagem.callbacks import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("callback")
