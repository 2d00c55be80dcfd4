"""Refuse losses whose gradients ranks could not average: none reaches a parameter, or two reach it one by one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stratagem.api.capabilities import STEPS_IN_BACKWARD
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.api import RunContext


def check_reached(some: bool, run: RunContext) -> None:
    """Raise an error if a backward of this rank gave no parameter a gradient; `some` tells whether one got some.

    Otherwise zeros would be averaged for it. Under manual optimization, and in a loop without a Trainer, the backward
    of a step may be one of several. Gradients of parameters that are stepped in backward are gone after it.

    Raises:
        ConfigError: on this rank.
    """
    if some or run.provides(STEPS_IN_BACKWARD):
        return
    if run.world_size > 1 and run.owns_loop and not run.manual:
        raise ConfigError(
            f"the loss of rank {run.rank} reaches no trainable parameter, and the other ranks wait for its gradients",
            expected="a loss that depends on them", do="return the usual loss multiplied by zero to skip a batch",
        )  # fmt: skip


@contextlib.contextmanager
def one_gradient_each(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Refuse within a backward in which one of `parameters` gets two gradients: see `note_gradient`."""
    note = functools.partial(note_gradient, set())
    handles = [each.register_post_accumulate_grad_hook(note) for each in parameters if each.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def note_gradient(seen: set[Tensor], parameter: Tensor) -> None:
    """Note in `seen` that a backward has given `parameter` its gradient, which may be sent now.

    Raises:
        ConfigError: it has had one, such as from another backward within this one, which would not be averaged.
    """
    if parameter in seen:
        raise second_gradient(f"a parameter of shape {tuple(parameter.shape)}")
    seen.add(parameter)


def second_gradient(parameter: str) -> ConfigError:
    """Return the error for `parameter`, whose first gradient is reduced already."""
    return ConfigError(
        f"{parameter} got a second gradient in one backward, and ranks average the first as soon as it is there",
        expected="a layer in at most one checkpoint(use_reentrant=True), and one backward of a loss",
        do="pass use_reentrant=False, which keeps the gradients of a backward together",
    )
