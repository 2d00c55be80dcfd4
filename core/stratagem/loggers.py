"""Classes of the installed logger plugins, imported on first use: ``from stratagem.loggers import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("logger")


def __dir__() -> list[str]:
    return class_names("logger")
