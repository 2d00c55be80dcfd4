"""Keep the number of samples of an optimizer step when the number of processes changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_callbacks.accumulation import check_set_once
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class GlobalBatchSize(Callback):
    """Sets ``accumulate_grad_batches`` so that each optimizer step averages over `samples` samples of all processes.

    A run that goes on with fewer or more processes then keeps the arithmetic of its steps, and its learning rate.
    """

    #: Samples of an optimizer step: batch size x processes with their own data x accumulated batches.
    samples: int = field(validator=at_least(1))

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        self._check(trainer)
        shards = trainer.run.mesh.num_data_shards
        size = trainer.batch_size
        if not isinstance(size, int):
            raise ConfigError(
                f"global_batch_size.samples is {self.samples} and the training loader has no batch_size",
                expected="a DataLoader with a batch size", do="set accumulate_grad_batches instead",
            )  # fmt: skip
        if self.samples % (size * shards):
            raise ConfigError(
                f"global_batch_size.samples is {self.samples}, and {shards} x {size} samples are read at a time "
                "(processes x batch size)",
                expected=f"a multiple of {shards * size}",
                do="choose a number that divides by the batch size times each possible number of processes",
            )
        trainer.schedule_accumulation({0: self.samples // (size * shards)})
        trainer.configure_again()  # for schedules that are as long as training

    def _check(self, trainer: TrainerView) -> None:
        check_set_once(trainer, "global_batch_size")
        if trainer.run.manual:
            raise ConfigError(
                f"global_batch_size.samples is {self.samples} with {type(trainer.module).__name__}."
                "automatic_optimization = False",
                expected="a module that the trainer steps",
                do="accumulate in training_step, where you step the optimizers",
            )
