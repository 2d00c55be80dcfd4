"""Compare parts of sequences with whole ones, in some steps of each stage: finds what checks of operations do not know.

[Note: the comparison]
Before steps 1, 2, 4, 8 and so on of a stage its method is called twice without gradients, in turn for the first and the
last positions of a batch: on whole sequences, as without the axis, and on parts. Dropout passes its input on, and what
the calls did to buffers, attributes and logs is undone. The mean over ranks must be the loss of the whole, and what
ranks log must become what the whole logs. Values can be equal by chance: an accuracy is 0 at first, and masks count as
many positions on each rank. So it is done again, and a metric is also wrong if ranks divide by different numbers. A
`training_step` that draws random numbers in another way cannot be compared, nor one under manual optimization, which
would step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stratagem.api.seeding import random_state, restore_random_state
from stratagem.errors import ConfigError
from stratagem_parallel.buffers import unchanged
from stratagem_parallel.target_numbers import divisor_of

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: Positions of a part that are compared, at most.
POSITIONS = 64
#: Numbers that a step logs by name, with their `reduce_fx`.
_Logged = dict[str, tuple[float, str]]
#: What becomes of the numbers of several ranks.
_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values), "sum": sum, "max": max, "min": min,
}  # fmt: skip
#: Largest difference of the losses, relative to the larger one, and in 16 bits.
_TOLERANCE, _TOLERANCE_16 = 1e-4, 3e-2
_DROPOUTS = {
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_", "feature_dropout",
    "feature_alpha_dropout", "feature_dropout_", "feature_alpha_dropout_",
}  # fmt: skip


class _NoDropout(TorchFunctionMode):
    """Leaves out dropout, and keeps what means and quotients are divided by."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else options["input"]
        if name == "scaled_dot_product_attention":
            args, options = (
                args[:4] + (0.0,) * (len(args) > 4) + args[5:],
                options | ({"dropout_p": 0.0} if "dropout_p" in options else {}),
            )
        result = func(*args, **options)
        if (divisor := divisor_of(func, args, options, result)) is not None:
            self.divisors.append(float(divisor))
        return result


def difference(
    user: nn.Module, over: Collectives, whole: Callable[[], Any], parts: Callable[[], Any], run: RunContext,
    method: str, named: set[str], wanted: Callable[[], bool],
) -> ConfigError | None:  # fmt: skip
    """Compare what `whole` and `parts` return and log, two calls of `method`. Warn of metrics that differ. Collective.

    Args:
        named: the names of what was warned of, and the methods that cannot be compared; this call adds to them.
        wanted: whether the losses, once computed, are to be equal.

    Returns:
        an error if they differ, on all ranks.
    """
    before = random_state(run.devices)
    try:
        expected, of_whole, _ = _results(whole, user)
    except Exception as error:  # noqa: BLE001 - a step that needs all positions; its own call raises what is wrong
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        run.print(f"strategy.parallel.context: {method} was not compared: a short sequence failed with {reason!r}")
        named.add(method)
        return None
    finally:
        drew = not _equal(before, random_state(run.devices))
        restore_random_state(before, run.devices)
    try:
        of_parts, of_part, divisors = _results(parts, user)
    finally:
        restore_random_state(before, run.devices)
    found = over.all_gather_object((expected, of_parts, drew, divisors, of_whole, of_part))
    if any(each[2] for each in found):
        run.print(f"strategy.parallel.context: {method} draws random numbers; it was not compared")
        named.add(method)
        return None
    is_short = any(p.dtype.itemsize == 2 for p in user.parameters()) or torch.is_autocast_enabled(run.device.type)
    tolerance = _TOLERANCE_16 if is_short else _TOLERANCE
    if not wanted():
        return None
    different = _different_metrics([each[4:] for each in found], tolerance)
    uneven = [(min(each), max(each)) for each in zip(*(each[3] for each in found), strict=False) if len(set(each)) > 1]
    if of_part and uneven and not different:
        different = {"a quotient": "divided by {:g} to {:g}".format(*uneven[0])}
    if different.keys() - named:
        _warn(different, method, run)
        named.update(different, ["a quotient"])
    losses = [(each[0], each[1]) for each in found]
    if any(None in pair for pair in losses):
        return None
    expected, of_parts = (sum(each) / len(losses) for each in zip(*losses, strict=True))
    if _differ(of_parts, expected, tolerance):
        return ConfigError(
            f"the loss of some positions is {expected:.6g} on whole sequences and {of_parts:.6g} on parts, with "
            f"strategy.parallel.context {over.world_size}",
            expected="equal losses; something in training_step depends on other positions, or on how many there are",
            do="look for recurrences, shifts, norms over positions and position numbers: a part has only some "
            "positions; if the losses may differ, set strategy.parallel.context_checks to False",
        )
    return None


def _differ(one: float, other: float, tolerance: float) -> bool:
    if one == other or (one != one and other != other):  # infinite, or not a number
        return False
    return not abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3)


def _different_metrics(found: list[tuple[_Logged, _Logged]], tolerance: float) -> dict[str, str]:
    """Return, by name, what ranks log together and what the whole logs, where the two differ."""
    different = {}
    for name, (expected, fx) in found[0][0].items():
        parts = [of_part[name][0] for _, of_part in found if name in of_part]
        reduce = _REDUCTIONS.get(fx)
        if reduce is not None and len(parts) == len(found) and _differ(reduce(parts), expected, tolerance):
            different[name] = f"{reduce(parts):.4g} for {expected:.4g}"
    return different


def _warn(different: dict[str, str], method: str, run: RunContext) -> None:
    if run.is_global_zero:
        shown = ", ".join(f"{name} ({values})" for name, values in different.items())
        warnings.warn(
            f"what {method} logs differs between parts of sequences and whole ones, with strategy.parallel.context: "
            f"{shown} at some positions of a batch. A rank logs what it computes from its own positions, "
            "and sync_dist=True reduces over ranks: log means over positions with context_mean, sums with "
            'reduce_fx="sum", and compute what is made of them afterwards',
            stacklevel=2,
        )


def _results(call: Callable[[], Any], user: nn.Module) -> tuple[float | None, _Logged, list[float]]:
    """Return the loss that `call` computes, None if it returns no number; the numbers that it logs; and divisors."""
    logged: _Logged = {}
    try:
        with torch.no_grad(), undone(user, logged), _NoDropout() as mode:
            result = call()
    finally:
        torch.clear_autocast_cache()  # of weights without gradients
    loss = result.get("loss") if isinstance(result, dict) else result
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None, logged, mode.divisors


@contextlib.contextmanager
def undone(module: nn.Module, logged: _Logged) -> Iterator[None]:
    """Undo, at the end, what was done to buffers and attributes of all parts of `module`, and to its logs.

    Numbers that it logs are put into `logged`, with their `reduce_fx`.
    """

    def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            logged[name] = float(value), str(reduce_fx)

    def log_dict(values: Any, *_: Any, **options: Any) -> None:
        for name, value in dict(values).items():
            log(name, value, **options)

    with unchanged([module]):
        if callable(getattr(type(module), "log", None)):
            module.__dict__["log"], module.__dict__["log_dict"] = log, log_dict
        yield


def _equal(one: Any, other: Any) -> bool:
    """Return whether states of random numbers are equal."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(bool((a == b).all()) if hasattr(a, "shape") else a == b for a, b in pairs)
