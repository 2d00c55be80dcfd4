"""A job that its scheduler has started again continues from its own newest checkpoint.

A checkpoint has the name of the job that saved it. Files of other jobs in the same folder, such as those of the other
tasks of a job array, are left alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.state_checks import on_first_rank
from stratagem.errors import StratagemError, shown
from stratagem.runtime import state_io
from stratagem_trainer import trainer_state

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState


def is_restarted(fit: FitState) -> bool:
    """Whether the scheduler has started this job again, and nothing is trained yet in this process."""
    position, run = fit.position, fit.run
    begun = position.epoch or position.batches_done or position.global_step
    return not begun and run.place.generation != "0" and run.environment.job() is not None


def read_own_checkpoint(fit: FitState, ckpt_path: str | Path | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint of this job and its path; None if there is none. Says so on rank 0. Collective.

    Args:
        ckpt_path: what the job began from; None is step 0.
    """
    run, others = fit.run, set[Path]()
    run.saver.wait()
    started = f"stratagem: the scheduler has started this job again (restart {run.place.generation})"
    while (found := _newest(fit, others)) is not None:
        state = state_io.read_checkpoint(run, found)
        if state.get("job") == run.environment.job():
            run.print(f"{started}: training continues from {found}", flush=True)
            return found, state
        others.add(found)
    left = f"; {len(others)} of other jobs are left alone" if others else ""
    begins = "at step 0" if ckpt_path is None else f"from ckpt_path {shown(ckpt_path, None)}"
    run.print(f"{started}, and it has no checkpoint yet: training begins {begins}{left}", flush=True)
    return None


def _newest(fit: FitState, others: set[Path]) -> Path | None:
    """Return the newest checkpoint that is not in `others`, the same on all ranks."""
    newest = functools.partial(trainer_state.newest_in, fit, accept=lambda path: path not in others)
    return on_first_rank(fit.run.collectives, newest, StratagemError)
