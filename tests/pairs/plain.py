"""The user's model and data, and a training loop of torch alone, parts of which features replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

EPOCHS, SAMPLES, LENGTH, CLASSES = 2, (8, 8, 8, 8, 8, 8, 4), 4, 5
#: Tokens whose features overflow, in all precisions or in fp16 alone, on their way to one of the layers.
INFINITE, LARGE = 10, 11
#: The batch of each epoch that has such a token, and the one for which `training_step` may return None.
POISONED, SKIPPED = 1, 2

Batch = dict[str, Tensor]


class Net(nn.Module):
    """Scores tokens: by attention within a document, which reads features 0 to 3, and directly by 4 and 5."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        table = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        table[INFINITE, 0], table[LARGE, 5] = torch.inf, 3e4
        self.register_buffer("table", table.to(dtype))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            first, last, direct = nn.Linear(4, 8), nn.Linear(8, CLASSES), nn.Linear(2, CLASSES, bias=False)
        self.first, self.last, self.direct = first.to(dtype), last.to(dtype), direct.to(dtype)

    def forward(self, batch: Batch, attend: Callable[..., Tensor] | None = None) -> Tensor:
        x = self.table[batch["input_ids"]]
        hidden = torch.tanh(self.first(x[..., :4]))[:, None]  # (documents, one head, tokens, 8)
        if attend is None:
            mixed = F.scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        else:
            mixed = attend(hidden, hidden, hidden)
        scores: Tensor = self.last(mixed[:, 0]) + self.direct(x[..., 4:])
        return scores


def loss_of(scores: Tensor, batch: Batch, reduction: str = "mean") -> Tensor:
    """Return a loss whose gradients have norms above 1."""
    return 6 * F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction=reduction)


def batches(seed: int = 1, sizes: tuple[int, ...] = SAMPLES) -> list[Batch]:
    """Return the batches of an epoch, the last one smaller."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(10, (size, LENGTH), generator=generator) for size in sizes]
    return [{"input_ids": ids, "labels": 3 * ids % CLASSES} for ids in drawn]


def part(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the samples of one of `ranks`."""
    return {key: tensor.chunk(ranks)[rank] for key, tensor in batch.items()}


def targets(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


class Loop:
    """Trains `model` on `batches`, with torch alone. Features set its attributes, or wrap its methods."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.dtype = torch.float64
        self.batches: list[Batch] = []
        self.lr = 0.0
        self.make_optimizers: Callable[[nn.Module, float], list[Any]]
        #: Makes a scheduler of an optimizer, which steps after a "step" or an "epoch".
        self.make_scheduler: Callable[[Any], Any] | None = None
        self.interval = "step"
        self.accumulate: Callable[[int], int] = lambda epoch: 1
        #: Divide by the batches of a full window in a short one, too.
        self.divides_as_full = False
        #: The number of targets by which losses count; None where each batch counts alike.
        self.counts: Callable[[Batch], int] | None = None
        #: Batches that are left out; their targets count nevertheless, if counted in the loader.
        self.leaves_out: set[int] = set()
        self.counts_left_out = False
        #: Batches of an epoch after which the module ends it.
        self.ends_early: dict[int, int] = {}
        self.compute: Callable[[], Any] = contextlib.nullcontext
        self.loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: loss_of(model(batch), batch)
        #: Averages the gradients of ranks: lists of tensors, or None.
        self.reduce: Callable[[list[list[Tensor | None]]], list[Tensor | None]] = mean
        #: Gradients are multiplied before they are clipped; by the name of the parameter.
        self.factors: dict[str, float] = {}
        self.clip: Callable[[list[nn.Parameter]], Any] | None = None
        #: Clips the parameters of each optimizer, not all together.
        self.clips_each = False
        #: Loss scale, which an overflow halves.
        self.scale: float | None = None
        #: A step with a gradient that is not finite changes nothing.
        self.skips = False
        #: Each optimizer is a step of its own.
        self.steps_alone = False
        self.steps, self.skipped = 0, 0
        self.begin: list[Callable[[], None]] = []
        self.before_epoch: list[Callable[[int], None]] = []
        self.after_optimizers: list[Callable[[], None]] = []
        self.after_skip: list[Callable[[], None]] = []
        self.after_step: list[Callable[[], None]] = []
        self.after_epoch: list[Callable[[int], None]] = []
        self.end: list[Callable[[], None]] = []

    def train(self) -> Loop:
        self.optimizers = self.make_optimizers(self.model, self.lr)
        self.schedulers = [self.make_scheduler(each) for each in self.optimizers] if self.make_scheduler else []
        self._call(self.begin)
        for epoch in range(EPOCHS):
            self._call(self.before_epoch, epoch)
            size = self.accumulate(epoch)
            numbered = list(enumerate(self.batches))
            if epoch in self.ends_early:
                numbered = numbered[: self.ends_early[epoch] // size * size]
            for start in range(0, len(numbered), size):
                self._window(numbered[start : start + size], size)
            if self.interval == "epoch":
                self._step_schedulers()
            self._call(self.after_epoch, epoch)
        self._call(self.end)
        return self

    def _window(self, window: list[tuple[int, Batch]], size: int) -> None:
        if any(
            "closure" in getattr(each, "defaults", {}) or isinstance(each, torch.optim.LBFGS)
            for each in self.optimizers
        ):
            (optimizer,) = self.optimizers
            optimizer.step(lambda: self._evaluate(window, size, clips=True))
            self.steps += 1
            self._after(True)
            return
        if self.steps_alone and all(number in self.leaves_out for number, _ in window):
            return  # the module does not reach its step
        self._evaluate(window, size)
        bad = [self._is_bad(each) for each in self.optimizers]
        if not self.steps_alone:
            bad = [any(bad)] * len(bad)
        self._clip()
        for optimizer, is_bad in zip(self.optimizers, bad, strict=True):
            if not is_bad:
                optimizer.step()
        if any(bad):
            self.scale = self.scale and self.scale / 2
            self._call(self.after_skip)
        self.steps += len(bad) if self.steps_alone else 1
        self.skipped += sum(bad) if self.steps_alone else any(bad)
        self._after(not all(bad))

    def _after(self, stepped: bool) -> None:
        self._call(self.after_optimizers)
        if stepped and self.interval == "step":
            self._step_schedulers()
        self._call(self.after_step)

    def _step_schedulers(self) -> None:
        for scheduler in self.schedulers:
            by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(1.0) if by_metric else scheduler.step()

    def _is_bad(self, optimizer: Any) -> bool:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        watches = self.skips or self.scale is not None
        return watches and not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _evaluate(self, window: list[tuple[int, Batch]], size: int, clips: bool = False) -> Tensor:
        """Compute the gradients of a window, averaged over ranks and unscaled; return its loss."""
        of_ranks, total = [], torch.zeros((), dtype=torch.float64)
        for rank in range(self.ranks):
            self.model.zero_grad()
            for number, batch in window:
                if number in self.leaves_out:
                    continue
                mine = part(batch, rank, self.ranks)
                with self.compute():
                    loss = self.loss(self.model, mine) * self._weight(window, size, mine)
                total += loss.detach() / self.ranks
                (loss * (self.scale or 1.0)).backward()
            found = [p.grad for p in self.model.parameters()]
            of_ranks.append([None if each is None else each / (self.scale or 1.0) for each in found])
        for (name, parameter), gradient in zip(self.model.named_parameters(), self.reduce(of_ranks), strict=True):
            parameter.grad = gradient
            if gradient is not None:
                gradient.mul_(self.factors.get(name, 1.0))
        if clips:
            self._clip()
        return total

    def _clip(self) -> None:
        if self.clip is not None:
            of_optimizers = [[p for group in each.param_groups for p in group["params"]] for each in self.optimizers]
            for parameters in of_optimizers if self.clips_each else [list(self.model.parameters())]:
                self.clip([parameter for parameter in parameters if parameter.grad is not None])

    def _weight(self, window: list[tuple[int, Batch]], size: int, mine: Batch) -> float:
        if self.counts is None:
            return 1 / (size if self.divides_as_full else len(window))
        counted = [batch for number, batch in window if self.counts_left_out or number not in self.leaves_out]
        return self.counts(mine) * self.ranks / sum(map(self.counts, counted))

    @staticmethod
    def _call(functions: list[Callable[..., None]], *arguments: Any) -> None:
        for function in functions:
            function(*arguments)

    # --- What is compared ------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Tensor:
        return flat(self.model)

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


def mean(of_ranks: list[list[Tensor | None]]) -> list[Tensor | None]:
    averages: list[Tensor | None] = []
    for gradients in zip(*of_ranks, strict=True):
        found = [each for each in gradients if each is not None]
        averages.append(torch.stack(found).sum(0) / len(gradients) if found else None)
    return averages
