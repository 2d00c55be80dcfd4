"""Classes of the installed launcher plugins, imported on first use: ``from stratagem.launchers import ...``."""

from stratagem._lazy import class_finder

__getattr__ = class_finder("launcher")
