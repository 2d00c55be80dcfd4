"""Classes of the installed comm_hook plugins, imported on first use: ``from stratagem.comm_hooks import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("comm_hook")
