"""Classes of the installed launcher plugins, imported on first use: ``from stratagem.launchers import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("launcher")
