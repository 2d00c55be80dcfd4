"""Change the number of accumulated batches during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import define

from stratagem.api import hookimpl
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback
from stratagem_trainer.api.validators import read_accumulation

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


@define(eq=False, kw_only=True)
class GradientAccumulationScheduler(Callback):
    """Set ``accumulate_grad_batches`` by epoch: ``{0: 8, 5: 4}`` is 8 batches per step from epoch 0, 4 from epoch 5."""

    positional: ClassVar[tuple[str, ...]] = ("scheduling",)

    #: Batches per step, by the first epoch (from 0) that uses the number; 1 before the first entry.
    scheduling: dict[int, int]

    def __attrs_post_init__(self) -> None:
        if not self.scheduling:
            raise ConfigError("gradient_accumulation_scheduler.scheduling is empty", expected="such as {0: 8, 5: 4}")
        read_accumulation({0: 1} | self.scheduling, "gradient_accumulation_scheduler.scheduling")

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        if stage == "fit":  # before configure_optimizers, which may ask how many steps there will be
            check_set_once(trainer, "gradient_accumulation_scheduler")
            trainer.schedule_accumulation({0: 1} | self.scheduling)


def check_set_once(trainer: TrainerView, callback: str) -> None:
    """Refuse `accumulate_grad_batches`, which the callback of this name sets, where the user sets it too."""
    if trainer.settings.accumulate_grad_batches != 1:
        raise ConfigError(
            f"accumulate_grad_batches is {trainer.settings.accumulate_grad_batches!r} and {callback} sets it too",
            expected="one of the two",
        )
