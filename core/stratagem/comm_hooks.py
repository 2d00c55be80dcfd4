"""Classes of the installed comm_hook plugins, imported on first use: ``from stratagem.comm_hooks import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("comm_hook")
