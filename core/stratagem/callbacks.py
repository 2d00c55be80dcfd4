"""Classes of the installed callback plugins, imported on first use: ``from stratagem.callbacks import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("callback")


def __dir__() -> list[str]:
    return class_names("callback")
