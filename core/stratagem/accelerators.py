"""Classes of the installed accelerator plugins, imported on first use: ``from stratagem.accelerators import ...``."""

from stratagem.stack.class_lookup import class_finder, class_names

__getattr__ = class_finder("accelerator")


def __dir__() -> list[str]:
    return class_names("accelerator")
