"""Classes of the installed accelerator plugins, imported on first use: ``from stratagem.accelerators import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("accelerator")
