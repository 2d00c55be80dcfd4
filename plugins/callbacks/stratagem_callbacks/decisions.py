"""When callbacks that save or stop by a metric decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView


def acts_after_epoch(trainer: TrainerView, chosen: bool | None) -> bool:
    """Return whether to decide at the end of the training epoch, rather than after validation.

    If it is not `chosen`: where each epoch ends with its only validation, or with none.
    """
    if chosen is not None or not any(trainer.num_val_batches):
        return chosen is not False
    settings = trainer.settings
    return bool(settings.val_check_interval == 1.0 and settings.check_val_every_n_epoch == 1)
