"""Means over the targets of whole batches, of which micro-batches may have different numbers.

[Note: numbers of targets]
The loss of a step is the mean over micro-batches. With targets that are ignored that is the mean over all targets only
if each micro-batch has as many; so the sum over a micro-batch is divided by the mean number of targets of one. Numbers
are known before the first micro-batch: the rank of the last stage, which waits then, calls `training_step` for each of
them without gradients and with zeros for the output of the layers. What is counted are the calls of
``torch.nn.functional.cross_entropy`` and ``nll_loss``, under whatever name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError
from stratagem_parallel.target_numbers import changed, number_of

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: Positional arguments, and those by name.
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_LOSSES = (F.cross_entropy, F.nll_loss)


@define
class TargetCounts:
    """How many targets each call of a loss in `training_step` has, for each micro-batch of a step.

    In a plan all micro-batches have as many.
    """

    among: Collectives
    #: Whether a step had such calls, or none was seen yet: else nothing is counted.
    _is_needed: bool = True
    #: For each micro-batch, the number for each call; None if counting failed.
    _numbers: list[list[float]] | None = field(factory=list)
    #: Where counting failed, what the first micro-batch has for each call.
    _first: dict[int, float] = field(factory=dict)

    def count(self, step: Callable[[int], Any], microbatches: int) -> None:
        """Call `step` for each of `microbatches`, and count its targets."""
        self._numbers = []
        self._first.clear()
        counted: list[list[Tensor]] = []
        if not self._is_needed:
            return
        self._is_needed = False
        try:
            for index in range(microbatches):
                with torch.no_grad(), _Counting() as counting, changed(counting.divisor):
                    step(index)
                counted.append(counting.numbers)
        except Exception:  # noqa: BLE001 - a loss that zeros do not suit; the step itself raises its own errors
            self._numbers = None
            return
        if any(counted):
            stacked = torch.stack([number for numbers in counted for number in numbers])
            flat = self.among.values(stacked, [1.0] * len(stacked))
            self._numbers = [[flat.pop(0) for _ in numbers] for numbers in counted]

    @contextmanager
    def weighing(self, microbatch: int) -> Iterator[None]:
        """Within: losses of `microbatch` are weighed."""
        with _Weighing(self, microbatch) as mode, changed(mode.divisor):
            yield

    def mean_of_call(self, microbatch: int, call: int, number: Tensor) -> float | None:
        """Return the mean number of targets of a micro-batch in `call`; None if all have as many.

        Raises:
            ConfigError: `microbatch` has another number than others, and these were not counted.
        """
        self._is_needed = True
        if self._numbers is None:
            self._compare(call, number)
            return None
        numbers = [each[call] for each in self._numbers if len(each) > call]
        if len(numbers) < len(self._numbers) or len(set(numbers)) <= 1:
            return None
        return sum(numbers) / len(numbers)

    def _compare(self, call: int, number: Tensor) -> None:
        found = self.among.values(number, 1.0)
        if found != self._first.setdefault(call, found):
            raise ConfigError(
                f"micro-batches have {self._first[call]:g} and {found:g} targets that are not ignored, and "
                "training_step failed with zeros for the output of the layers, with which they are counted",
                expected="a training_step that takes any output", do="compute the loss in another way",
            )  # fmt: skip


class _Losses(TorchFunctionMode):
    """Changes means over classes of targets.

    Under `context` the loss is computed by another function, which asks for the `divisor`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            found = _mean_over_targets(*args, **kwargs)
            if found is not None:
                return self.mean(func, *found, args, kwargs)
        return func(*args, **kwargs)

    def mean(self, func: Any, number: Tensor, as_sum: _Call, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def divisor(self, number: Tensor) -> Tensor:
        """Return what a sum over `number` targets is divided by."""
        raise NotImplementedError


class _Counting(_Losses):
    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Tensor] = []

    def mean(self, func: Any, number: Tensor, as_sum: _Call, args: Any, kwargs: Any) -> Any:
        self.numbers.append(number.double())
        return torch.zeros((), dtype=as_sum[0][0].dtype, device=as_sum[0][0].device)

    def divisor(self, number: Tensor) -> Tensor:
        self.numbers.append(number.double())
        return number


class _Weighing(_Losses):
    def __init__(self, counts: TargetCounts, microbatch: int) -> None:
        super().__init__()
        self.counts, self.microbatch, self.calls = counts, microbatch, 0

    def mean(self, func: Any, number: Tensor, as_sum: _Call, args: Any, kwargs: Any) -> Any:
        mean = self._mean(number)
        return func(*args, **kwargs) if mean is None else func(*as_sum[0], **as_sum[1]) / mean

    def divisor(self, number: Tensor) -> Tensor:
        mean = self._mean(number)
        return number if mean is None else torch.full_like(number, mean, dtype=torch.double)

    def _mean(self, number: Tensor) -> float | None:
        mean = self.counts.mean_of_call(self.microbatch, self.calls, number)
        self.calls += 1
        return mean


def _mean_over_targets(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,  # noqa: A002
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", **options: Any,
) -> tuple[Tensor, _Call] | None:  # fmt: skip
    """Return the number of targets, and the arguments for their sum, if this is a mean over targets that count."""
    if reduction != "mean" or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    number = number_of(target, weight, ignore_index)
    return number, ((input, target, weight), {"ignore_index": ignore_index, "reduction": "sum", **options})
