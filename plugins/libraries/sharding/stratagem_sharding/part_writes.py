"""Let hooks write into a part of a sharded tensor, such as ``weight.grad[0] = 0``, as they do into a whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode


class PartWrites(TorchFunctionMode):
    """Within, what is written into ``tensor[index]`` gets into the shards of `tensor`.

    Torch gathers ``tensor[index]`` into a new tensor: what is written into that would be lost. Each rank writes its
    part of the value, which all of them have, so nothing is sent.
    """

    def __init__(self) -> None:
        super().__init__()
        #: What ``tensor[index]`` returned, with both: parts of shards that may still be written into.
        self._parts: list[tuple[DTensor, DTensor, Any]] = []

    def __exit__(self, *error: object) -> None:
        self._parts.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; read a part of a sharded tensor, or write what it changes into the shards."""
        first = args[0] if args else None
        if not isinstance(first, DTensor):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.__setitem__:
            return self._write(first, _whole(args[1]), _whole(args[2]))
        if func is torch.Tensor.__getitem__:
            return self._read(first, _whole(args[1]))
        result = func(*args, **(kwargs or {}))
        if result is first:  # a method that changes it, such as mul_
            self._write_back(first)
        return result

    def _read(self, whole: DTensor, index: Any) -> DTensor:
        mesh = whole.device_mesh
        part = DTensor.from_local(whole.full_tensor()[index], mesh, [Replicate()] * mesh.ndim, run_check=False)
        self._parts.append((part, whole, index))
        return part

    def _write(self, whole: DTensor, index: Any, value: Any) -> None:
        with torch.no_grad():
            chosen = torch.zeros(whole.shape, dtype=torch.bool, device=whole.device)
            values = torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device)
            chosen[index], values[index] = True, value
            mesh, placements = whole.device_mesh, whole.placements
            mine, new = (distribute_tensor(each, mesh, placements, src_data_rank=None) for each in (chosen, values))
            whole.to_local().copy_(torch.where(mine.to_local(), new.to_local(), whole.to_local()))
        self._write_back(whole)

    def _write_back(self, part: DTensor) -> None:
        for known, whole, index in self._parts:
            if known is part:
                self._write(whole, index, part.full_tensor())


def _whole(value: Any) -> Any:
    """Return an index or a value without shards."""
    if isinstance(value, tuple | list):
        return type(value)(_whole(each) for each in value)
    return value.full_tensor() if isinstance(value, DTensor) else value
