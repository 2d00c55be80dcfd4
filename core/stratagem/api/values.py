"""Values that hooks and plugins pass: a policy of dtypes, the evidence of an environment."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True)
class PrecisionPolicy:
    """Which dtype where. A strategy with native mixed precision absorbs this instead of calling the precision's hooks.

    ``None`` means "leave as it is".
    """

    #: Of parameters.
    param_dtype: torch.dtype | None = None
    #: Of forward and backward.
    compute_dtype: torch.dtype | None = None
    #: Of gradients while they are averaged.
    reduce_dtype: torch.dtype | None = None
    #: Of the module's buffers.
    buffer_dtype: torch.dtype | None = None
    #: Whether the loss is scaled so that small gradients do not vanish.
    loss_scaling: bool = False


class Confidence(enum.IntEnum):
    """How certain an environment is that it is the one to ask. The highest wins under ``environment="auto"``."""

    #: Nothing says that it is absent: chosen if no other environment is found.
    FALLBACK = 1
    #: This process runs in a job of it, and was not started as one of several (the script of a batch job, a shell).
    IN_JOB = 2
    #: Some of the variables that it sets are missing: if no environment is certain, it is chosen and names them.
    PARTIAL = 3
    #: It started this process as one of a set, and its variables tell the rank.
    CERTAIN = 4

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


@frozen
class Evidence:
    """Why an environment is present, with variables and their values ("SLURM_STEP_ID is '0'").

    `rank` and `world_size` are what its variables say of this process, where they do. Two certain environments of equal
    precedence that differ in them are an error: one of them was inherited from somewhere else.

    `starters` is how many processes together started those of this world, such as torchrun's agents; None if unknown.
    In an environment that started more processes than that, the others would train models of their own.
    """

    reason: str
    confidence: Confidence = Confidence.CERTAIN
    rank: int | None = None
    world_size: int | None = None
    starters: int | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.confidence})"
