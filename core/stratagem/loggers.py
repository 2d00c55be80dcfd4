"""Classes of the installed logger plugins, imported on first use: ``from stratagem.loggers import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("logger")
