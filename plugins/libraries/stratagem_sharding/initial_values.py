"""Give the model rank 0's values on the device that it is sharded on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from stratagem.api import RunContext


def replicate_from_rank_0(module: nn.Module, device: Any, run: RunContext) -> Callable[[nn.Module], None]:
    """Give `module` rank 0's values on `device`; return a function that gives values to a part built without any.

    Collective.
    """
    run.collectives.replicate(_moved(module, {}, device))
    return _materializing(module, device, run)


def filling_from_rank_0(module: nn.Module, device: Any, run: RunContext) -> Callable[[nn.Module], None]:
    """Return a function that gives a part of `module` rank 0's values on `device`, also one built without any.

    What is sharded before the next part is filled need not fit beside it. All ranks call it for the same parts.
    """
    materialize = _materializing(module, device, run)
    given: dict[int, torch.Tensor] = {}

    def fill(part: nn.Module) -> None:
        run.collectives.replicate(_moved(part, given, device))
        materialize(part)

    return fill


def _materializing(module: nn.Module, device: Any, run: RunContext) -> Callable[[nn.Module], None]:
    materializer = run.materializer(module.get_submodule("module"))
    materializer.device = torch.device(device)
    return materializer.fill


def _moved(part: nn.Module, given: dict[int, torch.Tensor], device: Any) -> list[torch.Tensor]:
    """Move the tensors of `part` that were not `given` yet, by id, to `device`; return their values there."""
    moved = []
    for inner in part.modules():
        for tensors in (inner._parameters, inner._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.is_meta or isinstance(tensor, DTensor) or id(tensor) in given:
                    continue
                values = tensor.data.to(device).contiguous()
                if name in inner._buffers:
                    inner._buffers[name] = given[id(values)] = values
                else:
                    tensor.data, given[id(tensor)] = values, tensor
                moved.append(values)
    return moved
