"""Compare parts of sequences with whole ones, in some steps of each stage: finds what checks of operations do not know.

See [Note: the comparison] in `parts`. Positions are in turn the first and the last of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn

from stratagem.errors import ConfigError
from stratagem_parallel.parts import different_losses, result_of

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: Stands for a method that fails on parts alone.
FAILS = "fails on parts"
#: Positions of a part that are compared, at most.
POSITIONS = 64
#: Parameters whose gradients are compared, and how many numbers one may have: they are sent.
_PARAMETERS, _NUMBERS = 8, 4096


def difference(
    user: nn.Module, over: Collectives, whole: Callable[[], Any], parts: Callable[[], Any], run: RunContext,
    method: str, named: set[str], wanted: Callable[[], bool], away: AbstractContextManager[None],
) -> ConfigError | None:  # fmt: skip
    """Compare what `whole` and `parts` return and log, two calls of `method`. Warn of metrics that differ. Collective.

    Args:
        named: the names of what was warned of, and the methods that cannot be compared; this call adds to them.
        wanted: whether the losses, once computed, are to be equal.
        away: within, sequences are whole: also where backward computes layers again.

    Returns:
        an error if they differ, on all ranks.
    """
    some = [each for each in user.parameters() if type(each) is nn.Parameter and each.requires_grad]
    some = [each for each in some if each.numel() <= _NUMBERS][:_PARAMETERS]
    # A step by hand would step, if it had gradients.
    some = some if method == "training_step" and not (run.manual or run.shards_parameters) else []
    with away:
        of_whole = result_of(whole, user, run, some)
    of_part = of_whole if of_whole.problem else result_of(parts, user, run, some)
    found = over.all_gather_object((of_whole, of_part))
    if of_part.problem and not of_whole.problem:
        named.add(FAILS)
    if not wanted():
        return None
    losses = different_losses(found, method, user, run, "strategy.parallel.context", named, tells=run.is_global_zero)
    if losses is None:
        return None
    return ConfigError(
        f"the loss of some positions is {losses[0]:.6g} on whole sequences and {losses[1]:.6g} on parts, with "
        f"strategy.parallel.context {over.world_size}{losses[2]}",
        expected="equal losses; something in training_step depends on other positions, or on how many there are",
        do="look for recurrences, shifts, norms over positions and position numbers: a part has only some "
        "positions; if the losses may differ, set strategy.parallel.check_parts to False",
    )
