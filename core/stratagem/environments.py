"""Classes of the installed environment plugins, imported on first use: ``from stratagem.environments import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("environment")


def __dir__() -> list[str]:
    return class_names("environment")
