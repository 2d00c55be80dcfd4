"""Classes of the installed precision plugins, imported on first use: ``from stratagem.precisions import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("precision")
