"""Classes of the installed strategy plugins, imported on first use: ``from stratagem.strategies import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("strategy")
