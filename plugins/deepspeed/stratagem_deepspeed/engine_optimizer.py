"""ZeRO's optimizer as a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Attributes of ZeRO's optimizers with the tensors that they keep, by what these are.
_HELD = {
    "parameters": ("bit16_groups_flat", "fp16_partitioned_groups_flat"),
    "gradients": ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer"),
    "optimizer": ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"),
    "messages": ("ipg_buckets",),
}


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

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return what ZeRO keeps beside the optimizer's state, by what it is: a plan tells it apart."""
        return {
            what: list(_tensors([getattr(self.zero, name, None) for name in names])) for what, names in _HELD.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["zero"], name)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`: one, or collections and buckets of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif value is not None:
        yield from _tensors(value.buffer)
