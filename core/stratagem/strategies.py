"""Classes of the installed strategy plugins, imported on first use: ``from stratagem.strategies import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("strategy")


def __dir__() -> list[str]:
    return class_names("strategy")
