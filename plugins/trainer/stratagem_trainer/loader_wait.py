"""How long training waits for its loader, and a warning where that is a large part of the time."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any, Final

from torch.utils.data import DataLoader

from stratagem_trainer.combined_loader import parts_of

#: Seconds of training, and batches, before a share is computed.
_AFTER_S: Final = 10.0
_AFTER_BATCHES: Final = 20
#: The share of the time from which on a warning is given.
_TOO_MUCH: Final = 0.3


class LoaderWait:
    """The seconds that `next` on the training loader took, in this process.

    On a GPU they overlap with kernels that are still queued, so their share is the part of the time in which this
    process queued nothing.
    """

    def __init__(self, warns: bool) -> None:
        self.seconds, self.batches = 0.0, 0
        self._first: float | None = None
        self._warns = warns

    def add(self, began: float, loader: Any) -> None:
        """Count a batch that `loader` was asked for at `began`, by `time.perf_counter`."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now  # from here on: the first batch waits until workers have started
            return
        self.seconds += now - began
        self.batches += 1
        if self._warns and now - self._first > _AFTER_S and self.batches >= _AFTER_BATCHES:
            self._warns = False
            self._check(now - self._first, loader)

    def _check(self, total: float, loader: Any) -> None:
        share = self.seconds / total
        if share >= _TOO_MUCH:
            warnings.warn(
                f"waiting for the training loader took {share:.0%} of the first {total:.0f} s "
                f"({1000 * self.seconds / self.batches:.1f} ms for each batch). {_advice(loader)}",
                stacklevel=2,
            )


def _advice(loader: Any) -> str:
    loader = min(parts_of(loader), key=lambda part: getattr(part, "num_workers", 0))
    workers = getattr(loader, "num_workers", None)
    if not isinstance(loader, DataLoader) or workers is None:
        return f"Batches of a {type(loader).__name__} are made while training waits: read ahead in a thread or process"
    if workers == 0:
        return "num_workers is 0: set it to 1 or more, with persistent_workers=True, to read while the model computes"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"num_workers is {workers}, and this process may use {cores} cores: use more, or a cheaper data set"
