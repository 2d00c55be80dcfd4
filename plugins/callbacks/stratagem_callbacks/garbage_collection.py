"""Collect garbage in the same step on all ranks."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class GarbageCollection(Callback):
    """Collect Python's garbage every `every_n_steps` steps of training, on all ranks in the same one, and after epochs.

    Python decides by counts of objects, which differ between ranks: one of many pauses in most steps, and the others
    wait for it, up to 0.4 s where a process has 400,000 objects. torchtitan does the same.
    """

    #: Optimizer steps between collections of young objects.
    every_n_steps: int = field(default=50, validator=at_least(1))

    _was_enabled: bool = field(init=False, default=False)
    _last_step: int = field(init=False, default=0)

    @hookimpl
    def on_train_start(self, trainer: TrainerView) -> None:
        self._was_enabled, self._last_step = gc.isenabled(), trainer.global_step
        gc.disable()
        gc.collect()

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        step = trainer.global_step
        if step != self._last_step and step % self.every_n_steps == 0:
            gc.collect(1)
        self._last_step = step

    @hookimpl
    def on_train_epoch_end(self) -> None:
        gc.collect()

    @hookimpl
    def on_train_end(self) -> None:
        if self._was_enabled:
            gc.enable()

    on_exception = on_train_end
