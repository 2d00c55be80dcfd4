"""Optimizers with `train()` and `eval()`, such as schedule-free ones: the weights that train are not those to use.

[Note: two sets of weights]
A schedule-free optimizer (Defazio et al., 2024, "The Road Less Scheduled") computes gradients at *training weights*;
users validate and save *evaluation weights*, the average. Its `eval()` replaces the first by the second, its `train()`
computes the first again, with other rounding. Here `eval()` keeps a copy of the training weights in the state of the
optimizer, and `train()` puts it back: validations and checkpoints do not change what is trained. Checkpoints hold the
evaluation weights under ``"state_dict"``, and the copy with the rest of the optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch

from stratagem.api import STEPPED_COPIES, TEAMS
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.runtime.context import Context
    from stratagem_trainer.fit_state import FitState

#: The key of the training weights in the state of a parameter, while the parameter has its evaluation weights.
_KEPT: Final = "training_weight"


#: Capabilities with which these optimizers are refused, and what their providers do.
_REFUSED: Final = {STEPPED_COPIES: "steps copies of them", TEAMS: "lets them differ between ranks"}


def has_modes(optimizer: Any) -> bool:
    """Whether `optimizer` has the methods `train` and `eval`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def keep_training_weights(optimizer: Any, run: Context) -> None:
    """Have `optimizer.train()` restore the bits that `optimizer.eval()` replaced; see [Note: two sets of weights].

    Raises:
        ConfigError: what is stepped is not the model's weights, or they differ between ranks.
    """
    for word, what in _REFUSED.items():
        for choice in run.stack.strategies:
            if word not in choice.plugin.capabilities.provides:
                continue
            raise ConfigError(
                f"{type(optimizer).__name__} has train() and eval(), which replace the weights, and {choice} {what}",
                expected="a strategy that steps the weights of the model, equal on all ranks",
                do='use "ddp", "ddp_sharded", "fsdp" or "parallel"',
            )
    kept = _Kept(optimizer)
    optimizer.train, optimizer.eval, optimizer.add_param_group = kept.train, kept.eval, kept.add_param_group


class _Kept:
    """The methods `train` and `eval` of an optimizer, which begins in eval mode."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._train, self._eval = optimizer, optimizer.train, optimizer.eval
        self._add_group = optimizer.add_param_group
        self._trains = False
        #: Versions of the evaluation weights: a parameter that was changed since then is not restored.
        self._versions: dict[Any, int] = {}

    @torch.no_grad()
    def eval(self) -> None:
        state = self._optimizer.state
        for parameter in list(state) if self._trains else ():
            if state[parameter]:
                state[parameter][_KEPT] = parameter.detach().clone()
        self._eval()
        for parameter in [each for each, entry in state.items() if not entry]:
            del state[parameter]  # looking for its state has made an empty one
        if self._trains:
            self._versions = {parameter: _version(parameter) for parameter in state}
        self._trains = False
        self._forget_changed()

    @torch.no_grad()
    def train(self) -> None:
        self._forget_changed()
        self._train()
        for parameter, entry in self._optimizer.state.items():
            if (kept := entry.pop(_KEPT, None)) is not None:
                parameter.copy_(kept)
        self._trains = True

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add `group` in the mode of the others; its default may be another one."""
        self._add_group(group)
        if self._trains:
            self._train()

    def _forget_changed(self) -> None:
        for parameter, version in self._versions.items():
            if _version(parameter) != version:
                self._optimizer.state[parameter].pop(_KEPT, None)


def _version(parameter: Any) -> int:
    version: int = getattr(parameter, "_local_tensor", parameter)._version
    return version


def check_modes(run: Context) -> None:
    """Refuse optimizers with modes that the strategy replaced by some without.

    Raises:
        ConfigError: on all ranks.
    """
    for made, used in zip(run.made_optimizers, run.optimizers, strict=False):
        if has_modes(made) and not has_modes(used):
            raise ConfigError(
                f"{type(made).__name__} has train() and eval(), and {run.stack.strategies[-1]} steps "
                f"{type(used).__name__} in its place, which lacks them",
                expected="a strategy that steps the optimizer itself",
                do='use "ddp", "ddp_sharded", "fsdp" or "parallel"',
            )  # fmt: skip


def forget_training_weights(run: Context) -> None:
    """Train with what the model has: the process that launched this one may have changed it since the last fit."""
    for optimizer in filter(has_modes, run.optimizers):
        for entry in optimizer.state.values():
            entry.pop(_KEPT, None)


def set_mode(state: FitState, mode: str) -> None:
    """Call `train()` or `eval()` of each optimizer that has both. Collective."""
    for optimizer in state.run.optimizers:
        if has_modes(optimizer):
            getattr(optimizer, mode)()
    state.optimizer_mode = mode


@contextlib.contextmanager
def in_mode(state: FitState, mode: str) -> Iterator[None]:
    """Within: optimizers are in `mode`, "train" or "eval". Collective.

    After an exception, of which other ranks may not know, they stay in it.
    """
    before = state.optimizer_mode
    set_mode(state, mode)
    yield
    set_mode(state, before)
