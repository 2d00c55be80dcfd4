"""A kind of plugins that stratagem does not have: evaluators, and two of them."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api import Kind, Plugin, RunContext, hookimpl
from stratagem.api.validators import at_least
from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class Evaluator(Plugin):
    """Scores what `validation_step` returns, a mapping with ``logits`` and ``targets``; logs the mean over all ranks.

    A step that returns None is not scored.
    """

    kind: ClassVar[str] = "evaluator"
    _sum: Tensor | None = field(init=False, default=None)

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return a number for each sample."""
        raise NotImplementedError

    @hookimpl
    def on_validation_epoch_start(self) -> None:
        self._sum = None

    @hookimpl
    def on_validation_batch_end(self, outputs: Mapping[str, Any] | None) -> None:
        if outputs is not None:
            scores = self.score(outputs["logits"], outputs["targets"]).double()
            both = torch.stack([scores.sum(), scores.new_tensor(len(scores))])
            self._sum = both if self._sum is None else self._sum + both

    @hookimpl
    def on_validation_epoch_end(self, trainer: TrainerView, run: RunContext) -> None:
        mine = torch.zeros(2, dtype=torch.float64, device=run.device) if self._sum is None else self._sum
        total, count = run.collectives.all_reduce(mine, "sum").tolist()
        if count:
            trainer.log_metric(f"evaluators/{run.name_of(self)}", total / count)


@define(eq=False, kw_only=True)
class Accuracy(Evaluator):
    """The share of samples whose largest logit is that of the target."""

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.argmax(-1) == targets


@define(eq=False, kw_only=True)
class TopK(Evaluator):
    """The share of samples whose target is among the `k` largest logits."""

    #: More makes the number larger, and says less.
    k: int = field(default=5, validator=at_least(1))

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.topk(self.k, -1).indices == targets.unsqueeze(-1)).any(-1)


EVALUATOR = Kind("evaluator", Evaluator, needs_trainer=True)
