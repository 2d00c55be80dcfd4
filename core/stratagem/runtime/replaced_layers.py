"""A module whose layers a precision has replaced is trained with that precision again, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from stratagem.stack.plugins import Choice

#: Attribute of a module: the class and the name of the precision that replaced its layers.
_REPLACED_BY: Final = "_layers_replaced_by"


def note_replaced(module: nn.Module, precision: Choice) -> None:
    """Note that `precision` has prepared `module`, if it replaces layers."""
    if precision.plugin.replaces_layers:
        cls = type(precision.plugin)
        module.__dict__[_REPLACED_BY] = f"{cls.__module__}:{cls.__qualname__}", precision.name


def check_replaced(module: nn.Module, precision: Choice, stage: str) -> None:
    """Refuse to train layers that another precision replaced: they compute as that one does, or lack what it adds.

    Raises:
        ConfigError: names both precisions.
    """
    cls = type(precision.plugin)
    made_by, name = module.__dict__.get(_REPLACED_BY, ("", ""))
    if stage == "train" and made_by not in ("", f"{cls.__module__}:{cls.__qualname__}"):
        raise ConfigError(
            f"precision {name!r} replaced layers of this {type(module).__name__} in an earlier run, and precision is "
            f"{precision.name!r}",
            expected=f"precision={name!r}, or a module whose layers are plain",
            do="build a new module, and load its weights from a checkpoint",
        )
