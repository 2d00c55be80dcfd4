"""Count the memory of a device: what a model in training holds of it, and what is left."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch.nn.parameter import is_lazy

from stratagem_evidence.control_groups import memory_groups
from stratagem_microbatches import tensors_of

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

UNKNOWN = -1
_ON_DEVICE = "activations, temporary tensors and messages"
#: The resident memory of a process cannot be told apart further.
_ON_CPU = "activations, temporary tensors, data, Python and its libraries"


@frozen(kw_only=True)
class Memory:
    """The memory of a device, in bytes."""

    total: int
    free: int
    #: What tensors of this process take; of a CPU its resident size.
    allocated: int
    #: What torch's allocator has reserved, and no tensor takes.
    unused: int = 0
    #: What other processes hold, and libraries of this one.
    others: int = 0
    #: What this process may use, by torch or by ``ulimit -v``; None if that is all.
    limit: int | None = None
    #: What was asked for in vain; `UNKNOWN` if the error does not tell.
    asked: int = UNKNOWN

    @property
    def is_in_pieces(self) -> bool:
        """Whether what was asked for is there, but not in one piece."""
        left = self.free if self.limit is None else min(self.free, self.limit - self.allocated - self.unused)
        return left < self.asked <= self.unused + left


def read_memory(device: torch.device, told: dict[str, int]) -> Memory:
    """Return the memory of a GPU of CUDA, or of the CPU; numbers that an error has `told` are taken as they are.

    By the time at which an error is explained, what backward and unfinished operations held is free again.
    """
    memory = host_memory() if device.type == "cpu" else cuda_memory(device)
    return evolve(memory, **told)


def cuda_memory(device: torch.device) -> Memory:
    """Return the memory of `device` as CUDA and torch's allocator have it now."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    others = total - free - reserved
    return Memory(
        total=total, free=free, allocated=allocated, unused=reserved - allocated, others=others
    )  # fmt: skip


def host_memory() -> Memory:
    """Return the memory of the machine, or of the control group in which this process is."""
    import resource

    import psutil

    machine, resident = psutil.virtual_memory(), psutil.Process().memory_info().rss
    total = min([machine.total, *_limits_of_control_groups()])
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = None if addresses == resource.RLIM_INFINITY else addresses
    return Memory(total=total, free=min(machine.available, total - resident), limit=limit, allocated=resident)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that tensors of this process took on `device`; of a CPU its largest resident size."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    import resource

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def _limits_of_control_groups() -> Iterator[int]:
    """Yield the limits of the control groups of this process, of both versions; those without a limit have a word."""
    for version, own, root in memory_groups():
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(root)):
            yield from (int(text) for text in _lines(folder / name) if text.isdigit())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


# --- What holds it -----------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Held:
    """What this process holds of a device, in bytes: of sharded tensors its own parts."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    averages: int
    rest: int
    on_cpu: bool

    @property
    def states(self) -> int:
        """Return what is there between steps, and can be divided over ranks."""
        return self.parameters + self.gradients + self.optimizer

    def amounts(self) -> dict[str, int]:
        """Return the bytes of each kind, by the words for it."""
        return {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer,
            "buffers": self.buffers, "averaged parameters": self.averages,
            _ON_CPU if self.on_cpu else _ON_DEVICE: self.rest,
        }  # fmt: skip


def held_by(trainer: TrainerView, device: torch.device, allocated: int) -> Held:
    """Return what makes up the `allocated` bytes of `device`; memory that two kinds share counts for the first one."""
    run, seen = trainer.run, set[int]()
    # A sharded strategy has the whole parameters of some units in the module, and all shards in the optimizers.
    of_optimizers = [p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]
    parameters = [*trainer.module.parameters(), *of_optimizers]
    kinds = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "optimizer": tensors_of([getattr(optimizer, "state", {}) for optimizer in run.optimizers]),
        "buffers": trainer.module.buffers(),
        "averages": tensors_of([getattr(callback, "average", {}) for callback in trainer.callbacks]),
    }
    sizes = {kind: sum(_new_bytes(tensors, device, seen)) for kind, tensors in kinds.items()}
    return Held(**sizes, rest=max(0, allocated - sum(sizes.values())), on_cpu=device.type == "cpu")


def _new_bytes(tensors: Iterable[Any], device: torch.device, seen: set[int]) -> Iterator[int]:
    """Yield the sizes of the storages of `tensors` on `device` that are not in `seen`, and add those."""
    for tensor in tensors:
        part = getattr(tensor, "_local_tensor", tensor)
        if not is_lazy(part) and part.device == device and part.layout is torch.strided:
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage.nbytes()
