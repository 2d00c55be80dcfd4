"""What a checkpoint format needs of a run, for a program that has none."""

from __future__ import annotations

from collections.abc import Callable

from stratagem.api.world import Collectives, World
from stratagem.checkpoint.background_save import Saver


class Alone:
    """What a checkpoint format needs of a run, where there is none: one process, no plugins."""

    rank, world_size, is_global_zero = 0, 1, True

    def __init__(self) -> None:
        self.world, self.collectives = World(), Collectives()
        self._saver = Saver(self.collectives)

    def save_in_background(self, write: Callable[[Collectives], None], *, background: bool) -> None:
        self._saver.submit(write, background)

    def wait_for_saves(self) -> None:
        self._saver.wait()
