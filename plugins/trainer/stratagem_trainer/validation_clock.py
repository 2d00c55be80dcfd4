"""When to validate next, for a `val_check_interval` in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stratagem.api.readback import LateFlag
from stratagem_trainer.api.validators import read_duration

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState


class ValidationClock:
    """Tells all ranks at the same batch that the interval has passed on some rank. No batch waits for a message."""

    def __init__(self, state: FitState) -> None:
        interval = read_duration(state.settings.val_check_interval, "val_check_interval")
        assert interval is not None, "it is a time"
        several, self._interval_s = state.run.world_size > 1, interval.total_seconds()
        self._passed = LateFlag(state.run.collectives.duplicate("validation")) if several else None
        self._every_n_epoch = state.settings.check_val_every_n_epoch or 1
        self.restart()

    def restart(self) -> None:
        """Count the interval from now on."""
        self._due_at = time.monotonic() + self._interval_s

    def exchange(self, epoch: int) -> bool:
        """Tell the others whether the interval has passed here, and return whether to validate after this batch.

        With several ranks: if it had passed on some of them at the last batch. An epoch that is not to be validated
        leaves it to the next one. Collective.
        """
        if (epoch + 1) % self._every_n_epoch:
            return False
        passed = time.monotonic() >= self._due_at
        if self._passed is None:
            return passed
        is_due = self._passed.read()
        self._passed.send(passed and not is_due)  # the next batch must not validate again
        return is_due
