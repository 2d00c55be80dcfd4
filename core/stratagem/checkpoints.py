"""Classes of the installed checkpoint plugins, imported on first use: ``from stratagem.checkpoints import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("checkpoint")


def __dir__() -> list[str]:
    return class_names("checkpoint")
