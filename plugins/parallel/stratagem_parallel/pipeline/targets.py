"""Means over the targets of whole batches, of which micro-batches may have different numbers.

[Note: numbers of targets]
The sum over a micro-batch is divided by the mean number of targets of one: see [Note: divisors] in `target_numbers`.
Numbers are known before the first micro-batch: the rank of the last stage, which waits then, calls `training_step` for
each of them without gradients and with zeros for the output of the layers. What is counted are the calls of losses that
count targets, under whatever name, and of `context_mean`. Where other means are over different numbers, the losses of
micro-batches are compared in the next step, as in some others: see `neighbours`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError
from stratagem_parallel.same_batches import is_due
from stratagem_parallel.target_numbers import LOSSES, changed, elements_of_mean, mean_over_targets, options_of
from stratagem_transforms.forward_state import unchanged

if TYPE_CHECKING:
    from stratagem.api import Collectives


@define
class TargetCounts:
    """How many targets each call of a loss in `training_step` has, for each micro-batch of a step.

    In a plan all micro-batches have as many.
    """

    among: Collectives
    #: Whether a step had such calls: then they are counted before the first micro-batch.
    is_needed: bool = False
    #: Counts those of a step; None once it was called.
    _count: Callable[[], None] | None = None
    is_counting: bool = False
    #: For each micro-batch, the number for each call; None if counting failed.
    numbers: list[list[float]] | None = field(factory=list)
    #: The numbers that were weighed, and what they were when they were counted.
    _weighed: list[tuple[Tensor, float]] = field(factory=list)
    #: For each micro-batch, over how many numbers each mean with a gradient is.
    _divisors: list[list[float]] = field(factory=list)
    #: Whether they differed in the last step, which may be of a loss: not told again in each step.
    is_uneven: bool = False
    _uneven_steps: int = 0
    _steps: int = 0

    def begin(self, step: Callable[[int], Any], microbatches: int, *modules: nn.Module) -> None:
        """Begin a step of `modules`, whose targets are counted by `step` of each of `microbatches`, if need be."""
        self.numbers, self._count = [], lambda: self._counted(step, microbatches, modules)
        self._divisors.clear()
        self._weighed.clear()
        self._steps += 1
        if self.is_needed:
            self._count()

    def _counted(self, step: Callable[[int], Any], microbatches: int, modules: tuple[nn.Module, ...]) -> None:
        self._count, self.is_counting = None, True
        counted: list[list[Tensor]] = []
        try:
            with torch.no_grad(), unchanged(modules):
                for index in range(microbatches):
                    with Losses(self, None) as counting, changed(counting.divisor):
                        step(index)
                    counted.append(counting.numbers)
        except Exception:  # noqa: BLE001 - a loss that zeros do not suit; the step itself raises its own errors
            self.numbers = None
            return
        finally:
            self.is_counting = False
        if any(counted):
            stacked = torch.stack([number for numbers in counted for number in numbers])
            flat = self.among.values(stacked, [1.0] * len(stacked))
            self.numbers = [[flat.pop(0) for _ in numbers] for numbers in counted]

    @contextmanager
    def weighing(self, microbatch: int) -> Iterator[None]:
        """Within: losses of `microbatch` are weighed."""
        with Losses(self, microbatch) as mode, changed(mode.divisor):
            yield
        self._divisors.append(mode.divisors)

    def mean_of_call(self, microbatch: int, call: int, number: Tensor) -> float | None:
        """Return the mean number of targets of a micro-batch in `call`; None if all have as many.

        Raises:
            ConfigError: it is not known which calls belong together.
        """
        self.is_needed = True
        if self._count is not None:  # the first step with such a call
            self._count()
        if self.numbers is None:
            return None
        calls = {len(each) for each in self.numbers}
        if len(calls) > 1 and max(calls) > 1:
            raise ConfigError(
                f"training_step computes {min(calls)} losses over targets in one micro-batch, {max(calls)} in another",
                expected="the same losses for each", do="compute all of them, also where all targets are ignored",
            )  # fmt: skip
        numbers = [each[call] if each else 0.0 for each in self.numbers]
        if numbers:
            self._weighed.append((number, numbers[microbatch]))
        return sum(numbers) / len(numbers) if len(set(numbers)) > 1 else None

    def check(self) -> None:
        """Compare numbers with those that were counted, and over how many numbers means of micro-batches are.

        Raises:
            ConfigError: a number depends on the output of the layers.
        """
        if self._weighed and (is_due(self._steps) or self.numbers is None):
            numbers, counted = zip(*self._weighed, strict=True)
            for found, known in zip(self.among.values(torch.stack(numbers), counted), counted, strict=True):
                if abs(found - known) > 1e-6 * abs(found):
                    raise ConfigError(
                        f"a micro-batch has {found:g} targets that are not ignored, and {known:g} with zeros for the "
                        "output of the layers, with which strategy.parallel.pipeline counts them",
                        expected="a number that depends on the batch alone", do="divide the loss by a constant",
                    )  # fmt: skip
        uneven = any(len(set(each)) > 1 for each in zip(*self._divisors, strict=False))
        self._uneven_steps += uneven
        self.is_uneven = uneven and is_due(self._uneven_steps)


class Losses(TorchFunctionMode):
    """Divides means over targets by the mean number of a micro-batch; counts the targets where `microbatch` is None.

    Under `context` losses are computed by other functions, which ask for the `divisor`.
    """

    def __init__(self, counts: TargetCounts, microbatch: int | None) -> None:
        super().__init__()
        self.counts, self.microbatch = counts, microbatch
        self.numbers: list[Tensor] = []
        self.divisors: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = options_of(func, kwargs)
        if func in LOSSES and (found := mean_over_targets(func, args, kwargs)) is not None:
            number, total = found
            mean = self._mean(number)
            if self.microbatch is None:
                return torch.zeros((), device=number.device)
            return func(*args, **kwargs) if mean is None else total() / mean
        result = func(*args, **kwargs)
        elements = None if self.counts.is_counting else elements_of_mean(func, args, kwargs, result)
        if elements is not None and result.requires_grad:
            self.divisors.append(elements)
        return result

    def divisor(self, number: Tensor) -> Tensor:
        """Return what a sum over `number` targets is divided by."""
        mean = self._mean(number)
        return number if mean is None else torch.full_like(number, mean, dtype=torch.double)

    def _mean(self, number: Tensor) -> float | None:
        if self.counts.is_counting and self.microbatch is not None:  # counting began within this micro-batch
            return None
        self.numbers.append(number.double())
        if self.microbatch is None:
            return None
        return self.counts.mean_of_call(self.microbatch, len(self.numbers) - 1, self.numbers[-1])
