"""A flag that ranks tell each other without a wait: the answer is read when the next flag is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from stratagem.api.world import Collectives


class LateFlag:
    """Whether a flag is true on some rank of `collectives`, which carry CPU tensors.

    Every method is collective.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives.unchecked
        self._answer: Any = None

    def send(self, here: bool) -> None:
        """Tell the other ranks that the flag is `here` on this one."""
        self._answer = self._collectives.average_async(torch.tensor(float(here)))

    def read(self) -> bool:
        """Return whether the flag that was sent last was true on some rank; False if none was, or it was read."""
        answer, self._answer = self._answer, None
        return answer is not None and bool(answer.wait() > 0)

    def exchange(self, here: bool) -> bool:
        """Return what `read` does, and send `here`; on one rank return `here`."""
        if self._collectives.world_size == 1:
            return here
        before = self.read()
        self.send(here)
        return before
