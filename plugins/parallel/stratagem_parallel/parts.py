"""Compare what parts of a batch give with what the whole batch gives: the loss of a step, and what it logs.

[Note: the comparison]
In steps 1, 2, 4, 8 and so on a method is called twice more: on some samples or positions as a whole, and on
parts of them. Dropout passes its input on, and what the calls did to buffers, attributes and logs is undone. The mean
over parts must be the loss of the whole, as must gradients by outputs of layers or by some parameters, and what
parts log must become what the whole logs. Values
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
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stratagem.api.seeding import random_state, restore_random_state
from stratagem_parallel.target_numbers import divisor_of, options_of
from stratagem_transforms.forward_state import unchanged

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
#: Squared norm of gradients that are rounding.
_SMALLEST = 1e-16
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

    #: None if there is none.
    loss: float | None = None
    #: Of the targets in a loss that is a sum.
    count: float = 1.0
    logged: _Logged = field(factory=dict)
    divisors: list[float] = field(factory=list)
    #: Of the loss by the outputs of layers, and how large terms of the loss may be.
    gradients: list[Tensor] = field(factory=list)
    scale: float = 0.0
    #: Why it cannot be compared.
    problem: str = ""


def result_of(call: Callable[[], Any], user: nn.Module, run: RunContext, outputs: Sequence[Tensor] = ()) -> Result:
    """Return what `call` gives, without a trace of the call in `user` and in random numbers.

    Args:
        outputs: of layers, or parameters, by which the loss is differentiated.
    """
    logged: _Logged = {}
    before = random_state(run.devices)
    try:
        with torch.set_grad_enabled(bool(outputs)), undone(user, logged), _NoDropout() as mode:
            result: Any = call()
            given = result if isinstance(result, dict) else {"loss": result}
            result, count = given.get("loss"), float(given.get("count", 1))
            has_loss = isinstance(result, Tensor) and result.numel() == 1
            found = outputs if has_loss and result.requires_grad else ()
            gradients = _gradients(result, found)
        problem = "" if are_equal(before, random_state(run.devices)) else "draws random numbers"
    except Exception as error:  # noqa: BLE001 - a step that needs more of a batch; its own call raises what is wrong
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return Result(problem=f"failed with {why!r} on some of a batch")
    finally:
        restore_random_state(before, run.devices)
        torch.clear_autocast_cache()  # of weights without gradients
    known = [torch.zeros_like(o) if g is None else g for o, g in zip(found, gradients, strict=True)]
    terms = [(o.detach(), g) for o, g in zip(found, known, strict=True) if not isinstance(o, nn.Parameter)]
    scale = sum(float((output * gradient).abs().sum()) for output, gradient in terms)
    loss = float(result.detach()) if has_loss else None
    return Result(loss, count, logged, mode.divisors, known, scale, problem)


def _gradients(loss: Any, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    with contextlib.suppress(RuntimeError):  # of reentrant checkpoints
        return torch.autograd.grad(loss, outputs, allow_unused=True) if outputs else ()
    return [None] * len(outputs)


def different_losses(
    pairs: Sequence[tuple[Result, Result]], method: str, user: nn.Module, run: RunContext, option: str, named: set[str],
    *, tells: bool,
) -> tuple[float, float, str] | None:  # fmt: skip
    """Return the losses of the whole and of the parts, and words on their gradients, if they differ.

    Warns of what `method` logs if that differs.

    Args:
        pairs: for each part, what the method gives for the whole, and for the part.
        option: that made the parts.
        named: the names of what was warned of, and the methods that cannot be compared; this call adds to them.
        tells: whether this rank warns.
    """
    wholes, parts = zip(*pairs, strict=True)
    problem = next((result.problem for pair in pairs for result in pair if result.problem), "")
    if any(part.loss != part.loss for part in parts) and wholes[0].loss == wholes[0].loss:
        problem = "gives no number for some of a batch"
    if problem:
        named.add(method)
        if tells:
            print(f"{option}: {method} was not compared: it {problem}")
        return None
    is_short = any(p.dtype.itemsize == 2 for p in user.parameters()) or torch.is_autocast_enabled(run.device.type)
    tolerance = _TOLERANCE_16 if is_short else _TOLERANCE
    different = _different_metrics(wholes[0].logged, [part.logged for part in parts], tolerance)
    divisors = zip(*(part.divisors for part in parts), strict=False)
    uneven = [(min(each), max(each)) for each in divisors if len(set(each)) > 1]
    if parts[0].logged and uneven and not different:
        different = {"a quotient": "divided by {:g} to {:g}".format(*uneven[0])}
    if different.keys() - named and tells:
        _warn(different, method, option)
    named.update(different, ["a quotient"] if different else [])
    if any(result.loss is None for pair in pairs for result in pair):
        return None
    ways = [_differ_by(wholes, parts, tolerance)]
    if any(part.count != 1 for part in parts):  # that of a sum, unless the trainer was told that losses are means
        means = [evolve(each, count=1.0) for each in parts]
        ways.append(_differ_by([evolve(each, count=1.0) for each in wholes], means, tolerance))
    return None if None in ways else ways[0]


def _differ_by(wholes: Sequence[Result], parts: Sequence[Result], tolerance: float) -> tuple[float, float, str] | None:
    """Return both losses and words on their gradients, if they differ; None where no target counts."""
    counts = [sum(each.count for each in results) for results in (wholes, parts)]
    if not all(counts):
        return None
    totals = [sum(each.loss or 0.0 for each in results) for results in (wholes, parts)]
    expected, of_parts = totals[0] / counts[0], totals[1] / counts[1]
    squares = [0.0, 0.0, 0.0]
    for index, one in enumerate(wholes[0].gradients):
        of_each = [part.gradients[index] for part in parts]
        joined = torch.stack(of_each).sum(0) if one.shape == of_each[0].shape else torch.cat(of_each)
        one, other = one.double() / wholes[0].count, joined.double() / counts[1]
        squares = [old + float(new.square().sum()) for old, new in zip(squares, (one - other, one, other), strict=True)]
    by = (squares[0] / max(squares)) ** 0.5 if max(squares) > _SMALLEST else 0.0
    if by > 10 * tolerance or _differ(of_parts, expected, tolerance, wholes[0].scale / wholes[0].count):
        return expected, of_parts, f", and {by:.2g} of the gradient differs" if by else ""
    return None


def _warn(different: dict[str, str], method: str, option: str) -> None:
    shown = ", ".join(f"{name} ({values})" for name, values in different.items())
    warnings.warn(
        f"what {method} logs differs between parts of a batch and the whole, with {option}: {shown} for some of it. "
        'Log means over some positions or samples with context_mean, sums with reduce_fx="sum", all with '
        "sync_dist=True, and compute what is made of them, such as exp, afterwards",
        stacklevel=2,
    )


def _differ(one: float, other: float, tolerance: float, scale: float = 0.0) -> bool:
    if one == other or (one != one and other != other):  # infinite, or not a number
        return False
    return not abs(one - other) <= tolerance * max(abs(one), abs(other), scale, 1e-3)


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
            number = value.detach() if isinstance(value, Tensor) else value
            logged[name] = float(number), reduce_fx if isinstance(reduce_fx, str) else "mean"

    def log_dict(values: Any, *_: Any, **options: Any) -> None:
        for name, value in dict(values).items():
            log(name, value, **options)

    with unchanged([module]):
        if callable(getattr(type(module), "log", None)):
            module.__dict__["log"], module.__dict__["log_dict"] = log, log_dict
        yield


def are_equal(one: Any, other: Any) -> bool:
    """Return whether states of random numbers are equal."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(bool((a == b).all()) if hasattr(a, "shape") else a == b for a, b in pairs)
