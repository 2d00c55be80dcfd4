"""Gradients as they are: sent whole, or not at all. Both are there to compare the others with."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from attrs import define

from stratagem.api import GRADIENT_BUCKETS, LOCAL_STEPS, Capabilities, CommHook, hookimpl

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from stratagem.api import Bucket, RunContext


@define(eq=False, kw_only=True)
class AllReduce(CommHook):
    """Gradients travel uncompressed, as they would without a hook."""

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Generator[Any, Any, Tensor]:
        average: Tensor = yield bucket.buffer
        return average


@define(eq=False, kw_only=True)
class Noop(CommHook):
    """Sends nothing: each rank steps with its own gradients, and the replicas drift apart.

    For measuring what communication costs, never for a model that is to be kept.
    """

    innermost = True
    capabilities = Capabilities(requires={GRADIENT_BUCKETS, LOCAL_STEPS})

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Tensor:
        return bucket.buffer

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        if run.stage == "train" and run.world_size > 1 and run.is_global_zero:
            warnings.warn("comm_hook 'noop' sends no gradients: the ranks train apart", stacklevel=2)
