"""Classes of the installed logger plugins, imported on first use: ``from stratagem.loggers import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("logger")
