"""A replacement for a run where checkpoint files are read or written without a trainer."""

from __future__ import annotations

from stratagem.api.world import Collectives, World
from stratagem.checkpoint.background_save import Saver


class SingleProcessRun:
    """The attributes of a `RunContext` that a checkpoint format uses, for one process without plugins."""

    rank, world_size, is_global_zero = 0, 1, True

    def __init__(self) -> None:
        self.world, self.collectives = World(), Collectives()
        self.saver = Saver(self.collectives)
