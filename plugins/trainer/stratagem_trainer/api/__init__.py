"""What the author of a callback or a logger imports, beside `stratagem.api`; `events` has the hooks."""

from stratagem_trainer.api.kinds import Callback, Logger, has_role
from stratagem_trainer.api.outputs import mean_loss
from stratagem_trainer.api.trainer_parts import FitOutcome, SavedCheckpoint, TrainerState
from stratagem_trainer.api.trainer_view import TrainerView

__all__ = [
    "Callback", "FitOutcome", "Logger", "SavedCheckpoint", "TrainerState", "TrainerView", "has_role", "mean_loss",
]  # fmt: skip
