"""Classes of the installed launcher plugins, imported on first use: ``from stratagem.launchers import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("launcher")


def __dir__() -> list[str]:
    return class_names("launcher")
