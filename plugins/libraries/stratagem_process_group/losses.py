"""Refuse a loss that no parameter of its rank gets a gradient from, where ranks average gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.api.capabilities import STEPS_IN_BACKWARD
from stratagem.errors import ConfigError

if TYPE_CHECKING:
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
            expected="a loss that depends on them",
            do="return the usual loss multiplied by zero to skip a batch",
        )
