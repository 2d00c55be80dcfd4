"""Gradients of the mean loss of all targets of an accumulation window, on all ranks.

[Note: loss per token]
The mean of the losses of batches is the mean over targets only if each batch has as many. Otherwise, with n targets in
a batch and N of them in the window on all ranks, the mean of a batch counts n / N; the sum of a batch counts 1 / N.
Strategies average gradients over ranks, so N is divided by the number of ranks: the *share* below. Ranks of `tensor`
and `pipeline` have the same batches, and those of `context` parts of one: the mean over all ranks is the same.

Losses that are means are multiplied by n and divided by the share before their backward (`TargetCounts`): targets are
counted in the batches as the loader yields them, a window ahead, and the share of a window arrives while the last
batch of the window before trains.

Losses that are sums, which `training_step` returns with their count, are known when the last batch of a window has been
computed (`SummedLosses`). They are divided by a fixed number, near the usual share so that 16-bit gradients neither
vanish nor overflow, and gradients are corrected before the step. Comm hooks may keep a part of the gradients for the
next step, whose share is another one: they are told the scale, share / divisor, before the last backward of a window.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api import STEPPED_COPIES
from stratagem.errors import ConfigError
from stratagem_trainer.targets import Targets, read

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.runtime.context import Context
    from stratagem_trainer.progress import Position


class TargetCounts:
    """The targets of accumulation windows, on this rank and on average; see [Note: loss per token]. Collective."""

    def __init__(self, targets: Targets, run: Context) -> None:
        self._targets = targets
        self._among = run.peers.duplicate("targets").unchecked
        self._counts: deque[int] = deque()
        self._next: list[int] = []
        self._answer: Any = None
        self._share = 0.0

    def send(self, window: Iterable[Any]) -> None:
        """Count the targets in the batches of the next `window`, and tell the other ranks."""
        self._next = [self._targets.count(batch) for batch in window]
        self._answer = self._among.average_async(torch.tensor(float(sum(self._next)), dtype=torch.float64))

    def begin(self, window: Iterable[Any]) -> None:
        """Begin a window: that which was sent, or if none was (training begins), `window`."""
        if self._answer is None:
            self.send(window)
        self._share, self._answer = float(self._answer.wait()), None
        self._counts = deque(self._next)

    def forget(self) -> None:
        """Forget a window that was sent: its epoch ended early."""
        self._answer = None

    def divisor(self) -> float:
        """Return what to divide the mean loss of the window's next batch by."""
        count = self._counts.popleft()
        return self._share / count if count else math.inf

    def check_mean(self, loss: torch.Tensor, batch_idx: int) -> None:
        """Refuse the `loss` of a batch without targets if it is not finite; in such batches alone the host waits.

        Raises:
            ConfigError: the mean over no targets was returned.
        """
        if math.isnan(self._among.values(loss.detach().sum(), 0.0)):
            raise ConfigError(
                f"training_step returned a mean that is not finite for batch {batch_idx}, in which loss_normalization "
                "counts no target",
                expected="0 there: no targets have no mean",
                do='return SUM / max(NUMBER, 1), or {"loss": SUM, "count": NUMBER} without loss_normalization',
            )


def target_counts(normalization: str | Mapping[str, Any], run: Context) -> TargetCounts | None:
    """Return what counts targets for ``Trainer(loss_normalization=normalization)``; None for "batches". Collective."""
    targets = read(normalization)
    return None if targets is None else TargetCounts(targets, run)


class SummedLosses:
    """Losses that are sums, returned with their count; see [Note: loss per token]. Collective."""

    def __init__(self, run: Context, position: Position, limit_s: float) -> None:
        self.run, self.position, self._limit_s = run, position, limit_s
        self._total: Any = 0.0
        #: The targets of the window on average over ranks, if they are known before its last backward.
        self._share: torch.Tensor | None = None
        #: `training_step` has returned a count.
        self.are_known = False

    def add(self, count: Any) -> None:
        """Add the `count` of a batch to those of its window.

        Raises:
            ConfigError: it is not a number of targets, or an engine steps.
        """
        check_count(count, self.run)
        if not self.are_known:
            self._check()
            self.are_known = True
        self._total = self._total + self._of(count)

    def _of(self, count: Any) -> torch.Tensor:
        # `dp` and `pipeline` average losses over parts of a batch, so their counts are averaged as well
        counts = torch.as_tensor(count, device=self.run.device).detach()
        return counts.to(_exact(self.run.device)).mean()

    def forget(self) -> None:
        """Drop the counts of a window whose gradients are dropped."""
        self._total, self._share = 0.0, None

    def scale(self, count: Any, divisor: float, before: float) -> float:
        """Return what the gradients of a window are multiplied by, whose last batch has `count`; waits for all ranks.

        Args:
            before: the answer for a window without targets.
        """
        check_count(count, self.run)
        self._share = self._average(self._total + self._of(count))
        return float(self._share) / divisor or before

    def correct(self, optimizers: Sequence[Optimizer], divisor: float) -> None:
        """Divide the gradients of a window, whose losses were divided by `divisor`, by its targets instead."""
        if self._share is None and (hooks := self.run.plugins_of("comm_hook")):
            raise ConfigError(
                f"training_step returned a 'count', and {self.run.title_of(hooks[0])} averages gradients before the "
                "counts of all parts of a batch are known",
                expected="a mean loss, whose targets are counted before it is computed",
                do='return the mean, and set loss_normalization="tokens"',
            )
        share = self._average(self._total) if self._share is None else self._share
        self._total, self._share = 0.0, None
        factor = torch.where(share == 0, 0.0, divisor / share)
        for optimizer in optimizers:
            _scale_gradients(optimizer, factor)
        if not self.position.loss_divisor and (known := self.run.peers.values(share, 1.0)):
            if not 0 < known < math.inf:
                raise ConfigError(
                    f"training_step returned a 'count' that is {known:g} on average over ranks", expected=_A_COUNT
                )
            self.position.loss_divisor = 2.0 ** round(math.log2(known))  # a power of two changes no digit

    def _average(self, total: Any) -> Any:
        return self.run.peers.unchecked.average_async(torch.as_tensor(total, device=self.run.device)).wait()

    def refuse_uncounted(self) -> None:
        """Refuse a loss without a count after some with one."""
        raise ConfigError(
            f"training_step returned a 'count' before, and none on rank {self.run.rank} now",
            expected="the count of targets with each sum", do="return 0 where a batch has none",
        )  # fmt: skip

    def _check(self) -> None:
        run = self.run
        strategy = run.stack.strategy
        if STEPPED_COPIES in strategy.capabilities.provides:
            raise ConfigError(
                f"training_step returned a 'count', and {run.title_of(strategy)} keeps gradients to itself",
                expected="a mean loss, whose targets are counted before it is computed",
                do='return the mean, and set loss_normalization="tokens"',
            )
        if run.peers.world_size > 1:
            run.peers.barrier_with_timeout("training_step with a 'count'", self._limit_s)
        run.print('the loss is divided by the counts of its step (loss_normalization="batches" leaves it as it is)')


_A_COUNT = "the number of targets: one number without a gradient, at least 0"


def check_count(count: Any, run: Context) -> None:
    """Refuse what is not a count; the sign of a number on a GPU is not read.

    Raises:
        ConfigError: a boolean, a negative number, or a tensor with a graph or several elements. Under `dp` and
            `pipeline` there may be an element for each part of a batch.
    """
    value = count
    if isinstance(count, torch.Tensor):
        parts = math.inf if run.mesh.size("pipeline") > 1 else len(run.devices)
        fits = count.numel() == 1 or (count.dim() == 1 and 0 < count.numel() <= parts)
        if fits and not (count.requires_grad or count.is_complex() or count.dtype == torch.bool):
            value = run.peers.values(count.min(), 1.0) if count.is_cpu else 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        several = isinstance(count, torch.Tensor) and count.numel() != 1
        found = f"a tensor of shape {tuple(count.shape)} and {count.dtype}" if several else repr(count)
        raise ConfigError(
            f"training_step returned {found} as 'count'", expected=_A_COUNT, do="return (labels != -100).sum()"
        )


def _exact(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _scale_gradients(optimizer: Optimizer, factor: torch.Tensor) -> None:
    """Multiply the gradients of `optimizer` by `factor`, in place; of sharded ones this rank's shards."""
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (gradient := parameter.grad) is not None:
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                groups.setdefault(local.device, []).append(local)
    for device, gradients in groups.items():
        torch._foreach_mul_(gradients, factor.to(device))


class UnevenTargets:
    """Tells once that batches have different numbers of targets, where the loss is the mean over batches."""

    def __init__(self) -> None:
        self._left = 8
        self._counts: set[int] = set()
        self._some_ignored = False

    def see(self, batch: Any) -> UnevenTargets | None:
        """Look at one of the first batches; return what looks at the next one."""
        self._left -= 1
        found = [(each, labels) for each in _USUAL if (labels := each.find(batch)) is not None]
        if not found:
            return None
        targets, labels = found[0]
        self._counts.add(targets.count(batch))
        self._some_ignored = self._some_ignored or bool((labels == targets.ignore_index).any())
        if self._some_ignored and len(self._counts) > 1:
            warnings.warn(
                f"batches have {min(self._counts)} and {max(self._counts)} targets that are not {targets.ignore_index}"
                ", and the loss of a step is the mean of their means: a target counts more in a batch with few. To "
                'count all alike, set loss_normalization="tokens" or return {"loss": SUM, "count": NUMBER}; '
                '"batches" says that this is meant',
                stacklevel=2,
            )
            return None
        return self if self._left else None


#: The labels of batches of transformers, and those of pairs.
_USUAL = (Targets(), Targets(labels=1))
