"""Baselines to compare other hooks with: the plain all-reduce, and no communication."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from attrs import define

from stratagem.api import GRADIENT_BUCKETS, LOCAL_STEPS, Capabilities, hookimpl
from stratagem_buckets import CommHook

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from stratagem.api import RunContext
    from stratagem_buckets import Bucket


@define(eq=False, kw_only=True)
class AllReduce(CommHook):
    """Average gradients uncompressed, as without a hook."""

    single_message = True

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Generator[Any, Any, Tensor]:
        average: Tensor = yield bucket.buffer
        return average


@define(eq=False, kw_only=True)
class Noop(CommHook):
    """Send nothing: each rank steps with its own gradients, and the replicas diverge.

    Use it to measure the cost of communication, never to train a model that you keep.
    """

    innermost = True
    capabilities = Capabilities(requires={GRADIENT_BUCKETS, LOCAL_STEPS})

    @hookimpl
    def reduce_bucket(self, bucket: Bucket) -> Tensor:
        return bucket.buffer

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        if run.stage == "train" and run.world_size > 1 and run.is_global_zero:
            warnings.warn("comm_hook 'noop' sends no gradients: the replicas diverge", stacklevel=2)
