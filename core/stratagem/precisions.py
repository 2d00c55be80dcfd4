"""Classes of the installed precision plugins, imported on first use: ``from stratagem.precisions import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("precision")


def __dir__() -> list[str]:
    return class_names("precision")
