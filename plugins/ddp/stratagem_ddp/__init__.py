"""Data parallelism with torch's DDP: a replica of the model in every process, gradients averaged in buckets."""

from stratagem_ddp.presets import (
    find_unused,
    fork,
    fork_find_unused,
    fork_no_unused,
    no_unused,
    spawn,
    spawn_find_unused,
    spawn_no_unused,
)
from stratagem_ddp.strategy import DDPStrategy

__all__ = [
    "DDPStrategy", "find_unused", "fork", "fork_find_unused", "fork_no_unused", "no_unused", "spawn",
    "spawn_find_unused", "spawn_no_unused",
]  # fmt: skip
