"""Classes of the installed comm_hook plugins, imported on first use: ``from stratagem.comm_hooks import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("comm_hook")


def __dir__() -> list[str]:
    return class_names("comm_hook")
