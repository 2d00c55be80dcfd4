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
    with torch.no_grad():
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not tensor.is_meta and not isinstance(tensor, DTensor):
                        moved = tensor.data.to(device).contiguous()
                        run.collectives.broadcast(moved)
                        if name in part._buffers:
                            part._buffers[name] = moved
                        else:
                            tensor.data = moved
    materializer = run.materializer(module.get_submodule("module"))
    materializer.device = torch.device(device)
    return materializer.fill
