"""Classes of the installed environment plugins, imported on first use: ``from stratagem.environments import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("environment")
