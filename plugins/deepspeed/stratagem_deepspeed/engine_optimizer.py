"""ZeRO's optimizer as a torch optimizer."""

from __future__ import annotations

from typing import Any

import torch


class EngineOptimizer(torch.optim.Optimizer):
    """ZeRO's optimizer as a torch optimizer, as schedulers require; delegates everything to ZeRO's."""

    def __init__(self, zero: Any) -> None:  # not the base class's: groups and state are ZeRO's
        # Schedulers warn if they see no step of this optimizer; the run steps ZeRO's directly.
        self.__dict__["zero"], self.__dict__["_opt_called"] = zero, True

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.zero.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.zero.state

    def step(self, closure: Any = None) -> Any:
        return self.zero.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.zero.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.zero.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["zero"], name)
