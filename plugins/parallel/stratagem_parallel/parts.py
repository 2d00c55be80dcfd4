"""Compare what parts of a batch give with what the whole batch gives: the loss of a step, and what it logs.

[Note: the comparison]
In steps 1, 2, 4, 8 and so on a method is called twice more without gradients: on some samples or positions
as a whole, and on parts of them. Dropout passes its input on, and what the calls did to buffers, attributes and logs is
undone. The mean over parts must be the loss of the whole, and what parts log must become what the whole logs. Values
can be equal by chance: an accuracy is 0 at first, and masks count as many in each part. So it is done again, and a
metric is also wrong if parts divide by different numbers. A method that draws random numbers in another way cannot be
compared, nor one under manual optimization, which would step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stratagem.api.seeding import random_state, restore_random_state
from stratagem_parallel.buffers import unchanged
from stratagem_parallel.target_numbers import divisor_of, options_of

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Numbers that a step logs by name, with their `reduce_fx`.
_Logged = dict[str, tuple[float, str]]
#: What becomes of the numbers of several parts.
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
        options = options_of(func, kwargs)
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


@frozen
class Result:
    """What a call gave."""

    #: None if there is none, or a sum with a count.
    loss: float | None = None
    logged: _Logged = field(factory=dict)
    divisors: list[float] = field(factory=list)
    #: Why it cannot be compared.
    problem: str = ""


def result_of(call: Callable[[], Any], user: nn.Module, run: RunContext) -> Result:
    """Return what `call` gives, without a trace of the call in `user` and in random numbers."""
    logged: _Logged = {}
    before = random_state(run.devices)
    try:
        with torch.no_grad(), undone(user, logged), _NoDropout() as mode:
            result = call()
        problem = "" if _equal(before, random_state(run.devices)) else "draws random numbers"
    except Exception as error:  # noqa: BLE001 - a step that needs more of a batch; its own call raises what is wrong
        return Result(
            problem=f"failed with {(str(error).splitlines() or [type(error).__name__])[0]!r} on some of a batch"
        )
    finally:
        restore_random_state(before, run.devices)
        torch.clear_autocast_cache()  # of weights without gradients
    if isinstance(result, dict):
        result = None if "count" in result else result.get("loss")
    loss = float(result) if isinstance(result, Tensor) and result.numel() == 1 else None
    return Result(loss, logged, mode.divisors, problem)


def different_losses(
    pairs: Sequence[tuple[Result, Result]], method: str, user: nn.Module, run: RunContext, option: str, named: set[str],
    *, tells: bool,
) -> tuple[float, float] | None:  # fmt: skip
    """Return the losses of the whole and of the parts if they differ. Warn of what `method` logs if that differs.

    Args:
        pairs: for each part, what the method gives for the whole, and for the part.
        option: that made the parts.
        named: the names of what was warned of, and the methods that cannot be compared; this call adds to them.
        tells: whether this rank warns.
    """
    if problem := next((result.problem for pair in pairs for result in pair if result.problem), ""):
        named.add(method)
        if tells:
            print(f"{option}: {method} was not compared: it {problem}")
        return None
    is_short = any(p.dtype.itemsize == 2 for p in user.parameters()) or torch.is_autocast_enabled(run.device.type)
    tolerance = _TOLERANCE_16 if is_short else _TOLERANCE
    wholes, parts = zip(*pairs, strict=True)
    different = _different_metrics(wholes[0].logged, [part.logged for part in parts], tolerance)
    divisors = zip(*(part.divisors for part in parts), strict=False)
    uneven = [(min(each), max(each)) for each in divisors if len(set(each)) > 1]
    if parts[0].logged and uneven and not different:
        different = {"a quotient": "divided by {:g} to {:g}".format(*uneven[0])}
    if different.keys() - named and tells:
        _warn(different, method, option)
    named.update(different, ["a quotient"] if different else [])
    losses = [(whole.loss, part.loss) for whole, part in pairs]
    if any(None in pair for pair in losses):
        return None
    expected, of_parts = (sum(each) / len(losses) for each in zip(*losses, strict=True))
    return (expected, of_parts) if _differ(of_parts, expected, tolerance) else None


def _warn(different: dict[str, str], method: str, option: str) -> None:
    shown = ", ".join(f"{name} ({values})" for name, values in different.items())
    warnings.warn(
        f"what {method} logs differs between parts of a batch and the whole, with {option}: {shown} for some of it. "
        'Log means over some positions or samples with context_mean, sums with reduce_fx="sum", all with '
        "sync_dist=True, and compute what is made of them, such as exp, afterwards",
        stacklevel=2,
    )


def _differ(one: float, other: float, tolerance: float) -> bool:
    if one == other or (one != one and other != other):  # infinite, or not a number
        return False
    return not abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3)


def _different_metrics(expected: _Logged, logged: list[_Logged], tolerance: float) -> dict[str, str]:
    """Return, by name, what parts log together and what the whole logs, where the two differ."""
    different = {}
    for name, (whole, fx) in expected.items():
        parts = [part[name][0] for part in logged if name in part]
        reduce = _REDUCTIONS.get(fx)
        if reduce is not None and len(parts) == len(logged) and _differ(reduce(parts), whole, tolerance):
            different[name] = f"{reduce(parts):.4g} for {whole:.4g}"
    return different


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
