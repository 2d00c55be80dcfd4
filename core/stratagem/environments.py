"""Classes of the installed environment plugins, imported on first use: ``from stratagem.environments import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("environment")
