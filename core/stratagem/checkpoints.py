"""Classes of the installed checkpoint plugins, imported on first use: ``from stratagem.checkpoints import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("checkpoint")
