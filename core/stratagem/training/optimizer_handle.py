"""The optimizers of a module that optimizes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


class OptimizerHandle:
    """An optimizer to be stepped by hand: `step` goes through the hooks, everything else is the optimizer's."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Optimizer, Any], bool]) -> None:
        self.optimizer, self._step = optimizer, step

    def step(self, closure: Any = None) -> bool:
        """Step, counting one optimizer step; return False if an overflow skipped it."""
        return self._step(self.optimizer, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
