"""Classes of the installed accelerator plugins, imported on first use: ``from stratagem.accelerators import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("accelerator")
