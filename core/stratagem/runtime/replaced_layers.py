"""A module whose layers a plugin has replaced is trained with that plugin again, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from stratagem.stack.plugins import Choice, Stack

#: Attribute of a module: the `_Replacement` of an earlier run.
_REPLACED_BY: Final = "_layers_replaced_by"


@frozen
class _Replacement:
    """Which plugin replaced layers, and what they became: plain data, since modules are copied and pickled."""

    made_by: str
    kind: str
    name: str
    #: Names of the classes of the layers by the names of the layers.
    classes: dict[str, str]

    def is_in(self, module: nn.Module) -> bool:
        """Whether `module` still has one of the layers; a strategy that shards a layer derives its class."""
        parts = dict(module.named_modules())
        return any(
            name in parts and made in map(_name_of, type(parts[name]).__mro__) for name, made in self.classes.items()
        )


def parts_of(module: nn.Module, stack: Stack) -> dict[str, tuple[nn.Module, str]]:
    """Return the parts of `module` and the names of their classes, if a plugin of `stack` may replace some."""
    if _replacing(stack) is None:
        return {}
    return {name: (part, _name_of(type(part))) for name, part in module.named_modules()}


def note_replaced(module: nn.Module, stack: Stack, before: Mapping[str, tuple[nn.Module, str]]) -> None:
    """Note which plugin of `stack` has replaced layers of `module`, whose parts were those of `before`."""
    if (choice := _replacing(stack)) is None:
        return
    made_by, earlier = _name_of(type(choice.plugin)), module.__dict__.get(_REPLACED_BY)
    now = {name: (part, _name_of(type(part))) for name, part in module.named_modules()}
    changed = {name: value[1] for name, value in now.items() if before.get(name) != value}
    kept = earlier.classes if earlier is not None and earlier.made_by == made_by else {}
    module.__dict__[_REPLACED_BY] = _Replacement(made_by, choice.kind, choice.name, {**kept, **changed})


def check_replaced(module: nn.Module, stack: Stack, stage: str) -> None:
    """Refuse to train layers that a plugin replaced without it: they compute as it does, or lack what it adds.

    Raises:
        ConfigError: names the plugin, and the precision that was chosen instead of one.
    """
    earlier: _Replacement | None = module.__dict__.get(_REPLACED_BY)
    if stage != "train" or earlier is None:
        return
    same = any(_name_of(type(choice.plugin)) == earlier.made_by for choice in stack.active())
    if same or not earlier.is_in(module):
        return
    is_precision = earlier.kind == "precision"
    raise ConfigError(
        f"{earlier.kind} {earlier.name!r} replaced layers of this {type(module).__name__} in an earlier run, and "
        + (f"precision is {stack.precision.name!r}" if is_precision else f"this run has no such {earlier.kind}"),
        expected=f"{f'precision={earlier.name!r}' if is_precision else f'that {earlier.kind}'}, or a module whose "
        "layers are plain",
        do="build a new module, and load its weights from a checkpoint",
    )


def _replacing(stack: Stack) -> Choice | None:
    """Return the plugin of `stack` that replaces layers; there is one at most."""
    return next((choice for choice in stack.active() if getattr(choice.plugin, "replaces_layers", False)), None)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
