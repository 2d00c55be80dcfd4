"""Compare two micro-batches with both as one, in some steps, on the rank of the last stage.

See [Note: the comparison] in `parts`. It begins with the output of the last stage, or with its input where the output
has something else than samples, such as a loss. `training_step` is called with two micro-batches, or where these are
large with the last samples of one and the first of the next, which need no more memory than one micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from stratagem.errors import ConfigError
from stratagem_microbatches import split
from stratagem_parallel.parts import different_losses, result_of
from stratagem_parallel.pipeline.boundaries import tensors_within
from stratagem_parallel.pipeline.ghosts import Cut, Given
from stratagem_parallel.pipeline.targets import TargetCounts

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Bytes of two outputs that are compared whole.
_SMALL = 1 << 26


class Neighbours:
    """Samples of micro-batches `first` and ``first + 1`` of a batch.

    Args:
        size: the number of samples in a micro-batch.
        microbatches: how many there are.
        cut: the stages.
    """

    def __init__(self, batch: Any, size: int, microbatches: int, first: int, cut: Cut) -> None:
        self.size, self.first, self.cut = size, first, cut
        self.pair = split(batch, [first * size, 2 * size, (microbatches - first - 2) * size])[1]
        self._kept: list[Any] = []
        self._has_outputs = True

    def keep(self, microbatch: int, value: Any, output: Any) -> None:
        """Keep what the last stage made of `value` if it is one of these; `value` if there is more than samples in it.

        That is on the host, since the step needs the memory of its device.
        """
        if microbatch in (self.first, self.first + 1):
            self._has_outputs = all(
                _rows(leaf, self.size) for leaf in tensors_within(output) if leaf.is_floating_point()
            )
            kept = output if self._has_outputs else value
            self._kept.append(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), kept))

    def compare(
        self, step: Callable[[Any, Callable[..., Any]], Any], counts: TargetCounts, user: nn.Module, run: RunContext,
        named: set[str], *, differentiates: bool,
    ) -> None:  # fmt: skip
        """Compare what `step` returns and logs for a batch and an answer of the model. Warn of metrics that differ.

        Args:
            counts: of the targets of two micro-batches; of no step so far.
            named: the names of what was warned of; this call adds to them.
            differentiates: whether gradients are compared, too.

        Raises:
            ConfigError: the losses differ, or their gradients.
        """
        is_small = sum(leaf.nbytes for leaf in tensors_within(self._kept)) <= _SMALL
        half = self.size if is_small or self.size == 1 else -(-self.size // 4) * 2  # even: samples may come in pairs
        _, batch, _ = split(self.pair, [self.size - half, 2 * half, self.size - half])
        batches = split(batch, [half, half])
        spec = pytree.tree_structure(self._kept[0])
        leaves = zip(*map(pytree.tree_leaves, self._kept), strict=True)
        joined = zip(*(self._joined(one, other, half, run.device) for one, other in leaves), strict=True)
        whole, *parts = (pytree.tree_unflatten(each, spec) for each in joined)

        def answer_of(kept: Any) -> Callable[..., Any]:
            last = self.cut.count - 1
            return lambda *a, **o: kept if self._has_outputs else self.cut.compute(last, Given(a, o, kept))

        def zeros(index: int) -> None:
            answer = answer_of(parts[index])
            blank: Any = lambda *a, **o: pytree.tree_map_only(Tensor, torch.zeros_like, answer(*a, **o))  # noqa: E731
            if problem := result_of(lambda: step(batches[index], blank), user, run).problem:
                raise ValueError(problem)

        def weighed(index: int) -> Any:
            answer = answer_of(parts[index])
            with counts.weighing(index):
                return step(batches[index], answer)

        counts.begin(zeros, 2)
        roots = [
            [each for each in tensors_within(given) if differentiates and each.is_floating_point()]
            for given in (whole, *parts)
        ]
        for each in (each for given in roots for each in given):
            each.requires_grad_()
        expected = result_of(lambda: step(batch, answer_of(whole)), user, run, roots[0])
        pairs = [
            (expected, result_of(functools.partial(weighed, index), user, run, roots[1 + index])) for index in (0, 1)
        ]
        option = "strategy.parallel.pipeline"
        found = different_losses(pairs, "training_step", user, run, option, named, tells=True)
        if found is not None:
            one, other, gradients = found
            raise ConfigError(
                f"the loss of some samples is {one:.6g} at once and {other:.6g} as the mean over two micro-batches of "
                f"strategy.parallel.pipeline{gradients}",
                expected="equal losses: a mean over samples, or one that counts targets",
                do="pass a sum and its count to stratagem_parallel.context_mean(total, count), which counts those of "
                "the whole batch, or multiply by 1 / count for a mean in each sample; divide other sums by the number "
                "of samples; compute the loss in training_step if the layers do; if the losses may differ, set "
                "strategy.parallel.check_parts to False",
            )

    def _joined(self, one: Any, other: Any, half: int, device: torch.device) -> tuple[Any, ...]:
        """Return what the last stage has of the samples of both micro-batches, and of each.

        What does not have samples, such as a loss of balance, is that of each; the whole gets the mean.
        """
        if not isinstance(one, Tensor):
            return one, one, other
        one, other = one.to(device), other.to(device)
        if (rows := _rows(one, self.size)) and (len(one) == self.size or not torch.equal(one, other)):
            one, other = one[-rows * half :], other[: rows * half]
            return torch.cat([one, other]), one, other
        return (one + other) / 2 if one.is_floating_point() else one.clone(), one, other


def _rows(tensor: Tensor, size: int) -> int:
    """Return how many rows of `tensor` each of `size` samples has; 0 if it has none, or that cannot be told."""
    length = len(tensor) if tensor.dim() else 0
    is_flat = tensor.dim() > 1 and tensor.shape[1] != size
    return length // size if length == size or (is_flat and length % size == 0) else 0
