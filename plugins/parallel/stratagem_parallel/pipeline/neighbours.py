"""Compare two micro-batches with both as one, in some steps, on the rank of the last stage.

See [Note: the comparison] in `parts`. From the output of the last stage on, or from its input if it computes a loss:
`training_step` is called with the last samples of one micro-batch and the first of the next, which are as many as one
micro-batch has, and need no more memory.
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
from stratagem_parallel.pipeline.targets import TargetCounts

if TYPE_CHECKING:
    from stratagem.api import RunContext


class Neighbours:
    """Samples of micro-batches `first` and ``first + 1`` of a batch.

    Args:
        size: the number of samples in a micro-batch.
        microbatches: how many there are.
        compute: the last stage.
    """

    def __init__(self, batch: Any, size: int, microbatches: int, first: int, compute: Callable[[Any], Any]) -> None:
        self.size, self.first, self.half, self.compute = size, first, -(-size // 2), compute
        start = (first + 1) * size - self.half
        self.whole = split(batch, [start, 2 * self.half, microbatches * size - start - 2 * self.half])[1]
        self.parts = split(self.whole, [self.half, self.half])
        self._kept: list[Any] = []
        self._has_outputs = True

    def keep(self, microbatch: int, value: Any, output: Any) -> None:
        """Keep what the last stage made of `value` for these samples, or `value` if the output has a loss.

        That is on the host, since the step needs the memory of its device.
        """
        if microbatch in (self.first, self.first + 1):
            self._has_outputs = not any(
                isinstance(leaf, Tensor) and not leaf.dim() for leaf in pytree.tree_leaves(output)
            )
            kept = output if self._has_outputs else value
            self._kept.append(pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), kept))

    def compare(
        self, step: Callable[[Any, Any], Any], counts: TargetCounts, user: nn.Module, run: RunContext, named: set[str]
    ) -> None:
        """Compare what `step` returns and logs for a batch and its output. Warn of metrics that differ.

        Args:
            counts: of the targets of two micro-batches; of no step so far.
            named: the names of what was warned of; this call adds to them.

        Raises:
            ConfigError: the losses differ.
        """
        spec = pytree.tree_structure(self._kept[0])
        leaves = zip(*map(pytree.tree_leaves, self._kept), strict=True)
        joined = zip(*(self._joined(one, other, run.device) for one, other in leaves), strict=True)
        whole, *parts = (pytree.tree_unflatten(each, spec) for each in joined)
        output_of = _same if self._has_outputs else self.compute

        def zeros(index: int) -> Any:
            return step(self.parts[index], pytree.tree_map_only(Tensor, torch.zeros_like, output_of(parts[index])))

        def weighed(index: int) -> Any:
            output = output_of(parts[index])
            with counts.weighing(index):
                return step(self.parts[index], output)

        counts.begin(zeros, len(parts))
        expected = result_of(lambda: step(self.whole, output_of(whole)), user, run)
        pairs = [(expected, result_of(functools.partial(weighed, index), user, run)) for index in (0, 1)]
        option = "strategy.parallel.pipeline"
        losses = different_losses(pairs, "training_step", user, run, option, named, tells=True)
        if losses is not None:
            raise ConfigError(
                f"the loss of some samples is {losses[0]:.6g} at once and {losses[1]:.6g} as the mean over two "
                "micro-batches of strategy.parallel.pipeline",
                expected="equal losses: a mean over samples, or one that counts targets",
                do="pass a sum and its count to stratagem_parallel.context_mean(total, count), which counts those of "
                "the whole batch; divide other sums by the number of samples; compute the loss in training_step if the "
                "layers do; if the losses may differ, set strategy.parallel.check_parts to False",
            )

    def _joined(self, one: Any, other: Any, device: torch.device) -> tuple[Any, ...]:
        """Return what the last stage gave for these samples, and the parts of each micro-batch.

        A tensor of another size, such as a loss of balance, does not have samples: the whole gets the mean.
        """
        if not isinstance(one, Tensor):
            return one, one, other
        one, other = one.to(device), other.to(device)
        size = len(one) if one.dim() else 0
        if size == self.size or (size and size % self.size == 0 and not torch.equal(one, other)):
            count = size // self.size * self.half
            one, other = one[-count:], other[:count]
            return torch.cat([one, other]), one, other
        return (one + other) / 2 if one.is_floating_point() else one, one, other


def _same(output: Any) -> Any:
    return output
