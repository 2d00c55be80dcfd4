"""Log how long a training batch takes on the slowest rank."""

import time

import torch
from attrs import define, field

from stratagem.api import RunContext
from stratagem.api.validators import between
from stratagem_trainer.api import Callback, TrainerView


@define(eq=False, kw_only=True)
class StepTime(Callback):
    """Logs the median and a high quantile over the batches of an epoch, in milliseconds."""

    #: A higher quantile shows rarer delays, and needs more batches to be steady.
    quantile: float = field(default=0.95, validator=between(0, 1))
    _began: float = field(init=False, default=0.0)
    _times_ms: list[float] = field(init=False, factory=list)

    def on_train_batch_start(self) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self) -> None:
        self._times_ms.append(1000 * (time.perf_counter() - self._began))

    def on_train_epoch_end(self, trainer: TrainerView, run: RunContext) -> None:
        times, self._times_ms = torch.tensor(self._times_ms or [0.0], device=run.device), []
        quantiles = times.quantile(times.new_tensor([0.5, self.quantile]))
        median, high = run.collectives.all_reduce(quantiles, "max")
        trainer.log_metric("step_time/median_ms", median)
        trainer.log_metric("step_time/high_ms", high)
