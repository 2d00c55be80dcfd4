"""Classes of the installed callback plugins, imported on first use: ``from stratagem.callbacks import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("callback")
