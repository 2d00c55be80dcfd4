"""Record the collectives of this process, whoever calls them, and its stack when it ends by a signal.

[Note: recording]
All functions of torch.distributed that Python code calls end in a method of the class ``ProcessGroup``, however they
were imported. These methods are replaced once, by ones that first write a record. What C++ code sends is not seen: the
buckets of DistributedDataParallel, functional collectives of a compiled graph. Messages between two ranks are left out:
there is no order that all ranks share. Each rank counts the collectives of each group, so those with equal numbers
belong together.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.distributed.call_site import where
from stratagem_evidence.folder import delete_evidence
from stratagem_evidence.ring import Ring, Site

if TYPE_CHECKING:
    from io import TextIOWrapper
    from pathlib import Path
    from types import CodeType, FrameType

#: Makes a process write its stack to the file of its evidence. Schedulers and programs use the first two of 30.
ASK_FOR_STACK: int | None = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


class Recorder:
    """Records for one run, while it is the `active` one."""

    active: ClassVar[Recorder | None] = None

    def __init__(self, folder: Path, rank: int, phases: tuple[str, ...]) -> None:
        self.folder, self.rank = folder, rank
        self._ring, self._lock = Ring(folder, rank, phases), threading.Lock()
        #: By torch's name of a group that was used.
        self._names: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._codes: list[CodeType] = []
        self._stack: TextIOWrapper | None = None
        self.enter, self.mark = self._ring.enter, self._ring.mark

    @classmethod
    def start(cls, folder: Path, rank: int, phases: tuple[str, ...]) -> Recorder | None:
        """Record into `folder` from now on; return None if that has no place for it.

        Args:
            folder: where the files go.
            rank: this process's, of all ranks.
            phases: the names of what `enter` is called with.
        """
        try:
            recorder = cls(folder, rank, phases)
        except OSError:  # a full disk: training needs no evidence
            return None
        recorder._write_stacks()
        _replace_methods()
        cls.active = recorder
        return recorder

    def _write_stacks(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stack = (self.folder / f"{self.rank}.stack").open("w")
            if not faulthandler.is_enabled():  # someone wants to see the stack elsewhere
                faulthandler.enable(self._stack)
            if ASK_FOR_STACK is not None:
                faulthandler.register(ASK_FOR_STACK, self._stack)

    def stop(self, keep: bool) -> None:
        """Stop recording, and delete the files unless somebody will read them."""
        if Recorder.active is self:
            Recorder.active = None
        if self._stack is not None:
            if ASK_FOR_STACK is not None:
                faulthandler.unregister(ASK_FOR_STACK)
            faulthandler.disable()
            self._stack.close()
        self._ring.close()
        if not keep:
            delete_evidence(self.folder, self.rank)

    def begin(self, op: str, group: Any, tensor: Any, sizes: Callable[[], int | None]) -> None:
        """Record that this process begins a collective. Takes about a microsecond."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _TORCH:
            frame = frame.f_back
        if frame is None:
            return
        name, code = group.group_name, frame.f_code
        size, dtype = (None, None) if tensor is None else (tensor.numel(), tensor.dtype)
        key = (id(code), frame.f_lasti, op, name, size, dtype)  # the hash of code takes longer than all the rest
        with self._lock:
            if not self._ring.begin(key):
                label, ranks = self._names.get(name) or self._name(name, group)
                self._codes.append(code)  # while it lives no other code has its id
                site = Site(op, label, ranks, sizes(), str(dtype or "").removeprefix("torch."), _place(frame))
                self._ring.add_site(key, site)
                self._ring.begin(key)

    def _name(self, name: str, group: Any) -> tuple[str, tuple[int, ...]]:
        """Return the same name for a group on all of its ranks, and these; torch's name may differ on them.

        Its ranks make their groups in the same order, though they may use them in another one.
        """
        from torch.distributed.distributed_c10d import _world, get_process_group_ranks

        ranks = tuple(get_process_group_ranks(group))
        groups: Any = _world.pg_group_ranks
        alike = [other.group_name for other, places in groups.items() if tuple(places) == ranks]
        self._names[name] = f"{','.join(map(str, ranks))}#{alike.index(name) + 1}", ranks
        return self._names[name]


_TORCH = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


def _place(frame: FrameType) -> str:
    call, _, line = where(frame).rpartition(" (")
    line = line.removesuffix(")")
    return line if call.startswith("torch.distributed.") else f"{call}, {line}" if call else line


def _equal_parts(parts: Any, tensor: Any) -> int | None:
    """Return the size of a part if all have the same: torch allows ranks to gather tensors of different sizes."""
    return tensor.numel() if all(part.numel() == tensor.numel() for each in parts for part in each) else None


#: By method of ProcessGroup: the name of the function that people call, and which argument has the tensor that is as
#: large on all ranks; None where none is.
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce_coalesced", 0), "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0), "allgather": ("all_gather", 1), "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1), "allgather_coalesced": ("all_gather_coalesced", None),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", None),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", None), "gather": ("gather", 1),
    "scatter": ("scatter", 0), "reduce_scatter": ("reduce_scatter", None),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0), "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", None),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", None), "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all_single", None), "all_to_all_single": ("all_to_all_single", None),
    "barrier": ("barrier", None),
}  # fmt: skip


@functools.cache
def _replace_methods() -> None:
    from torch._C._distributed_c10d import ProcessGroup

    for name, (op, index) in _METHODS.items():
        method = getattr(ProcessGroup, name, None)  # versions of torch have some of them
        if method is not None:
            setattr(ProcessGroup, name, _recorded(method, op, index))


def _recorded(method: Any, op: str, index: int | None) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder = Recorder.active
        if recorder is not None:
            tensor = arguments[index] if index is not None and index < len(arguments) else None
            if isinstance(tensor, list):
                tensor = tensor[0]
            if op == "all_gather" and tensor is not None:
                recorder.begin(op, self, tensor, functools.partial(_equal_parts, arguments[0], tensor))
            else:
                recorder.begin(op, self, tensor, (lambda: None) if tensor is None else tensor.numel)
        return method(self, *arguments, **options)

    return call
