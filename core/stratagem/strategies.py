"""Classes of the installed strategy plugins, imported on first use: ``from stratagem.strategies import ...``."""

from stratagem.stack.class_lookup import classes_of

__getattr__, __dir__ = classes_of("strategy")
