"""Classes of the installed checkpoint plugins, imported on first use: ``from stratagem.checkpoints import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("checkpoint")
