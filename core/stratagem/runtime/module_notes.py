"""What a module remembers between runs: which plugin replaced its layers, and that its weights are sharded.

One whose layers were replaced is trained with that plugin again, or refused. One whose weights are sharded says so when
a program takes its ``state_dict()``, which lacks most of them.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen
from torch import nn

from stratagem.errors import ConfigError
from stratagem.runtime.hook_caller import HookCaller

if TYPE_CHECKING:
    from collections.abc import Mapping

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


class Parted:
    """Warns once when the ``state_dict()`` of a module that `strategy` shards, or that of a part, is taken.

    A plugin may take it, since it knows what it reads.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy, self._has_warned = strategy, False

    def watch(self, module: nn.Module) -> None:
        """Watch `module`, unless it is watched since an earlier fit."""
        if module.__dict__.setdefault("_stratagem_parted", self) is self:
            for part in module.modules():
                part.register_state_dict_post_hook(self)

    def __call__(self, module: nn.Module, *state: Any) -> None:
        if self._has_warned:
            return
        codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())]
        if HookCaller.ask.__code__ in codes:
            return
        self._has_warned = True
        inside = (__file__, nn.modules.module.__file__)
        level = next(number for number, code in enumerate(codes, 1) if code.co_filename not in inside)
        warnings.warn(
            f"state_dict() has this rank's part of the weights alone, because {self._strategy} shards them: what "
            "torch.save writes of it lacks the others; for a file with whole weights, call "
            "trainer.save_checkpoint(path, weights_only=True), or run.save, on all ranks",
            stacklevel=level,
        )


def _replacing(stack: Stack) -> Choice | None:
    """Return the plugin of `stack` that replaces layers; there is one at most."""
    return next((choice for choice in stack.active() if getattr(choice.plugin, "replaces_layers", False)), None)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
