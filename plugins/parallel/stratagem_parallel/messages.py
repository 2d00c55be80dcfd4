"""Count what one training step sends along each axis of the mesh.

torch itself sends for DTensors, pipelines and FSDP, so the operations are counted where all of them pass: in torch's
dispatcher, during one step. Other steps are not slowed down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from stratagem.api import Mesh
from stratagem.api.traffic import wire_bytes
from stratagem_microbatches import tensors_of

#: What `wire_bytes` calls the operations of torch, by the beginning of their names.
_KINDS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "broadcast": "broadcast",
    "allgather": "all_gather", "_allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter": "reduce_scatter",
    "alltoall": "exchange", "all_to_all": "exchange", "send": "send",
}  # fmt: skip
#: The outputs of these come before their inputs.
_OUTPUT_FIRST = ("allgather_", "_allgather_base_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_base_")


class StepMessages:
    """Counts the bytes that this rank sends in the second optimizer step, by the axes whose ranks take part.

    In the first one ranks also tell each other shapes.
    """

    def __init__(self, mesh: Mesh, ranks: list[int]) -> None:
        self._mesh = mesh
        #: Where each rank of the run is on the mesh.
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._bytes: dict[tuple[int, ...], float] = {}
        #: The optimizer step that is now computed, from 0.
        self._step = 0

    def by_axis(self) -> dict[str, float]:
        """Return the bytes by names of axes; "shard and tensor" is one group over both."""
        found: dict[str, float] = {}
        for ranks, count in self._bytes.items():
            name = " and ".join(self._axes(ranks))
            found[name] = found.get(name, 0.0) + count
        return found

    def counted(self, last: bool) -> AbstractContextManager[None] | None:
        """Return a context that counts within forward and backward of a batch; None once a step was counted.

        Args:
            last: whether it is the last batch before the optimizer steps.
        """
        if self._step > 1:
            return None
        context = self._count() if self._step else None
        self._step += last
        return context

    @contextlib.contextmanager
    def _count(self) -> Iterator[None]:
        # torch never compiles again what it was to compile under such a mode.
        with torch.compiler.set_stance("force_eager"), _Counting(self._add):
            yield

    def _add(self, kind: str, num_bytes: int, ranks: tuple[int, ...]) -> None:
        self._bytes[ranks] = self._bytes.get(ranks, 0.0) + wire_bytes(kind, num_bytes, len(ranks))

    def _axes(self, ranks: tuple[int, ...]) -> list[str]:
        """Return the axes on which `ranks` differ."""
        places = [Mesh(axes=self._mesh.axes, rank=self._place.get(rank, 0)) for rank in ranks]
        return [axis for axis in self._mesh.axes if len({each.position(axis) for each in places}) > 1]


class _Counting(TorchDispatchMode):
    def __init__(self, add: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # they call the operations on parts, which come here
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: Any) -> None:
        name = func._schema.name.partition("::")[2]
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        group = next((found for each in args if (found := _group_of(each)) is not None), None)
        if kind is None or group is None:
            return
        given = args[1] if name in _OUTPUT_FIRST else args[0]
        ranks = dist.get_process_group_ranks(group)
        if kind == "send":
            ranks = [dist.get_rank(), ranks[args[2]]]
        self._add(kind, sum(tensor.nbytes for tensor in tensors_of(given)), tuple(ranks))


def _group_of(value: Any) -> Any:
    if isinstance(value, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            return dist.ProcessGroup.unbox(value)
    if isinstance(value, str):
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            return torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]  # a str
    return None
