"""Strategies that train with FairScale."""

from stratagem_fairscale.pipe import FairScalePipeStrategy
from stratagem_fairscale.sharded import FairScaleShardedStrategy

__all__ = ["FairScalePipeStrategy", "FairScaleShardedStrategy"]
