"""How far training has come.

[Note: position]
``global_step`` counts optimizer steps (including those that a loss scale skipped). ``batches_done`` counts
the batches of the current epoch that are finished. A checkpoint holds both, and what `stratagem_trainer.batches`
needs to continue with the same batches.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from attrs import define, field

#: The key by which a checkpoint of Lightning is recognised.
LIGHTNING_VERSION = "pytorch-lightning_version"

#: What checkpoints of this format version may lack, since it was added later, with values that mean "as before". What
#: has no such value raises the format version.
ADDED: Final = {"skipped_steps": 0, "loss_divisor": 0.0, "continued_at": 0, "evaluated_batches": {}}


@define(eq=False, repr=False)
class Position:
    """How far training has come; see [Note: position]."""

    epoch: int = 0
    global_step: int = 0
    batches_done: int = 0
    batches_of_earlier_epochs: int = 0
    #: The current epoch ran all its batches.
    epoch_done: bool = False
    #: Callbacks have seen its end, and schedulers stepped; resuming begins the next one.
    epoch_ended: bool = False
    #: Validation is not due after the last batch, or has begun.
    validated: bool = True
    #: Optimizer steps that a loss scale skipped.
    skipped_steps: int = 0
    #: Divides losses that are sums, once their counts are known; 0 before: see `stratagem_trainer.token_loss`.
    loss_divisor: float = 0.0
    #: Samples of the epoch that each share of the data had used where a run with other batches continued within it.
    continued_at: int = 0
    #: Batches that were validated and tested, by stage and loader: the step axis of what their steps log.
    evaluated_batches: dict[str, int] = field(factory=dict, repr=False)
    #: This process's random state at the start of the epoch.
    epoch_random_state: dict[str, Any] | None = field(default=None, repr=False)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "global_step": self.global_step, "batches_done": self.batches_done,
            "epoch_done": self.epoch_done, "epoch_ended": self.epoch_ended, "validated": self.validated,
            "batches_of_earlier_epochs": self.batches_of_earlier_epochs,
            "skipped_steps": self.skipped_steps, "loss_divisor": self.loss_divisor,
            "continued_at": self.continued_at, "evaluated_batches": dict(self.evaluated_batches),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = copy.deepcopy(ADDED | state)
        for name in self.state_dict():
            setattr(self, name, saved[name])
