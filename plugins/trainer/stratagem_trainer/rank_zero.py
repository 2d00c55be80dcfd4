"""What rank 0 alone does: functions with the decorator `rank_zero_only`, printing and warning."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from stratagem.errors import StratagemError

P = ParamSpec("P")
T = TypeVar("T")


def rank_zero_only(function: Callable[P, T], default: T | None = None) -> Callable[P, T | None]:
    """Return `function` for rank 0; on other ranks it does nothing and returns `default`.

    It can be used before, in and after a run. Do not call collectives in it, nor `fit` or `save_checkpoint`: rank 0
    would wait for the other ranks.
    """

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **options: P.kwargs) -> T | None:
        return function(*arguments, **options) if _rank() == 0 else default

    return wrapper


@rank_zero_only
def rank_zero_info(message: object, *values: object) -> None:
    """Print ``message % values`` on rank 0."""
    print(str(message) % values if values else message, flush=True)


@rank_zero_only
def rank_zero_warn(message: Warning | str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """`warnings.warn` on rank 0; `stacklevel` 2 names the caller's line."""
    warnings.warn(message, category, stacklevel + 1)


def _rank() -> int:
    """Return the rank in the connected group, else that of the variable RANK, else what the scheduler tells."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    if os.environ.get("RANK", "").isdecimal():
        return int(os.environ["RANK"])
    return _detected_rank()


@functools.cache
def _detected_rank() -> int:
    from stratagem.stack.detection import choose, environment_candidates

    with contextlib.suppress(StratagemError):
        evidence = choose(environment_candidates()).evidence
        return (evidence.rank if evidence is not None else None) or 0
    return 0
