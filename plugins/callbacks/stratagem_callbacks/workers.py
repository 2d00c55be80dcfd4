"""Keep the workers of a DataLoader alive while training finishes a step after a signal to all processes."""

from __future__ import annotations

import functools
import signal
from typing import Any

#: Seconds that a DataLoader worker continues after SIGTERM: enough for a batch or two.
_WORKER_GRACE_S = 5.0


def let_workers_continue(loader: Any, numbers: list[int]) -> None:
    """Keep DataLoader workers alive for the last batches if the whole process group gets the signal."""
    for part in getattr(loader, "flattened", []):  # a CombinedLoader
        let_workers_continue(part, numbers)
    if getattr(loader, "num_workers", 0):
        then = loader.worker_init_fn
        if isinstance(then, functools.partial) and then.func is _ignoring and then.args[0] == numbers:
            return  # an earlier fit has done it
        loader.worker_init_fn = functools.partial(_ignoring, numbers, then)


def _ignoring(numbers: list[int], then: Any, worker_id: int) -> None:
    for number in numbers:
        # DataLoader also stops its workers with SIGTERM: they exit after a grace period, rather than ignore it.
        signal.signal(number, _exit_later if number == signal.SIGTERM else signal.SIG_IGN)
    if then is not None:
        then(worker_id)


def _exit_later(*_: Any) -> None:
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
        signal.setitimer(signal.ITIMER_REAL, _WORKER_GRACE_S)
