"""Record the collectives of this process, whoever calls them, and its stack when it ends by a signal.

[Note: recording]
All functions of torch.distributed that Python code calls end in a method of the class ``ProcessGroup``, however they
were imported. These methods are replaced once, by ones that first write a record. What C++ code sends is not seen: the
buckets of DistributedDataParallel, functional collectives of a compiled graph. Messages between two ranks are left out:
there is no order that all ranks share. So are groups that torch does not list: a library made them, and their ranks may
be in several runs. Each rank counts the collectives of each group, so those with equal numbers belong together.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

from stratagem.distributed.call_site import where
from stratagem.distributed.launched import libc
from stratagem_evidence.folder import delete_evidence
from stratagem_evidence.ring import Ring, Site
from stratagem_evidence.torch_calls import dump_into, no_dump_into, write_calls

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
        #: By torch's name of a group that was used, which may differ on its ranks: the same name on all of them.
        self._names: dict[str, str] = {}
        self._codes: list[CodeType] = []
        self._stack: TextIOWrapper | None = None
        #: Whether fatal signals write to this file.
        self._enabled = False
        self.enter, self.mark, self.activity = self._ring.enter, self._ring.mark, self._ring.activity
        self._process = os.getpid()
        atexit.register(self._at_exit)

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
        dump_into(folder)
        cls.active = recorder
        return recorder

    def _write_stacks(self) -> None:
        if ASK_FOR_STACK is not None and signal.getsignal(ASK_FOR_STACK) == signal.SIG_DFL:
            libc().signal(ASK_FOR_STACK, signal.SIG_IGN)  # a request that comes too late would end the process
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stack = (self.folder / f"{self.rank}.stack").open("w")
            self._enabled = not faulthandler.is_enabled()  # otherwise someone wants to see the stack elsewhere
            if self._enabled:
                faulthandler.enable(self._stack)
            if ASK_FOR_STACK is not None:
                faulthandler.register(ASK_FOR_STACK, self._stack)

    def _at_exit(self) -> None:
        """Stop for a run that was dropped before it was closed; do nothing in a forked child."""
        if os.getpid() == self._process:
            self.stop(keep=False)

    def stop(self, keep: bool) -> None:
        """Stop recording, and delete the files unless somebody will read them."""
        atexit.unregister(self._at_exit)
        if Recorder.active is self:
            Recorder.active = None
        if self._stack is not None:
            if ASK_FOR_STACK is not None:
                faulthandler.unregister(ASK_FOR_STACK)
            if self._enabled:
                faulthandler.disable()
            self._stack.close()
        if not keep and not self._ring.ends:
            self.mark("over")
        self._ring.close()
        no_dump_into(self.folder)
        if not keep:
            delete_evidence(self.folder, self.rank)

    def write_calls(self) -> None:
        """Write what torch recorded, before this process ends with an error that another rank caused."""
        write_calls(self.folder, self.rank)

    def note(self, sentence: str) -> None:
        """Write `sentence` about this rank for `stratagem postmortem`, in place of an earlier one."""
        with contextlib.suppress(OSError):
            (self.folder / f"{self.rank}.note").write_text(sentence)

    def begin(self, op: str, group: Any, tensor: Any, parts: Any = None, root: int | None = None) -> None:
        """Record that this process begins a collective. Takes about a microsecond.

        Args:
            op: the name of torch's function.
            group: its process group.
            tensor: whose size all ranks must agree on; None if there is none.
            parts: the tensors for what each rank sends, where torch lets ranks send different sizes.
            root: the one that sends or receives, by its place in the group.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__") in _TORCH:
            frame = frame.f_back
        if frame is None:
            return
        # The id of its code: the hash of code takes longer than all the rest.
        size = None if tensor is None else tensor.numel()
        dtype = None if size is None else tensor.dtype
        key = (id(frame.f_code), frame.f_lasti, group.group_name, op, root, size, dtype)
        if not self._ring.begin(key):
            self._add_site(key, frame, op, group, tensor, parts, root)
            self._ring.begin(key)

    def _add_site(
        self, key: Any, frame: FrameType, op: str, group: Any, tensor: Any, parts: Any, root: int | None
    ) -> None:
        from torch.distributed.distributed_c10d import _world

        groups: Any = _world.pg_group_ranks
        if group not in groups:
            return
        ranks = tuple(groups[group])
        with self._lock:
            # Ranks make their groups in the same order, though they may use them in another one.
            alike = [other for other, places in groups.items() if tuple(places) == ranks]
            name = f"{','.join(map(str, ranks))}#{alike.index(group) + 1}"
            label = self._names.setdefault(group.group_name, name)
            self._codes.append(frame.f_code)  # while it lives no other code has its id
            size = None if tensor is None or not _are_equal(parts, tensor) else tensor.numel()
            dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
            if root is not None:  # torch refuses one that is not in the group, below
                op += f"({_ROOTS[op]}={ranks[root] if 0 <= root < len(ranks) else root})"
            try:
                self._ring.add_site(key, Site(op, label, ranks, size, dtype, _place(frame)))
            except OSError:  # a full disk: training goes on without evidence
                Recorder.active = None


_TORCH = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger")


def _place(frame: FrameType) -> str:
    call, _, line = where(frame).rpartition(" (")
    line = line.removesuffix(")")
    return line if call.startswith("torch.distributed.") else f"{call}, {line}" if call else line


def _are_equal(parts: Any, tensor: Any) -> bool:
    """Whether all ranks send as much as this one."""
    return parts is None or all(part.numel() == tensor.numel() for each in parts for part in each)


#: By method of ProcessGroup: the name of the function that people call; which argument holds the tensor that is as
#: large on all ranks, None where none does; and whether that argument is a list.
_METHODS: dict[str, tuple[str, int | None, bool]] = {
    "allreduce": ("all_reduce", 0, True), "allreduce_coalesced": ("all_reduce_coalesced", 0, True),
    "broadcast": ("broadcast", 0, True), "reduce": ("reduce", 0, True), "allgather": ("all_gather", 1, True),
    "_allgather_base": ("all_gather_into_tensor", 1, False),
    "all_gather_single": ("all_gather_into_tensor", 1, False),
    "allgather_coalesced": ("all_gather_coalesced", None, False),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", None, False),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", None, False),
    "gather": ("gather", 1, True), "scatter": ("scatter", 0, True), "reduce_scatter": ("reduce_scatter", None, False),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0, False),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", None, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", None, False),
    "alltoall": ("all_to_all", None, False), "alltoall_base": ("all_to_all_single", None, False),
    "all_to_all_single": ("all_to_all_single", None, False), "barrier": ("barrier", None, False),
}  # fmt: skip


#: What torch calls the rank that sends or receives.
_ROOTS = {"broadcast": "src", "scatter": "src", "reduce": "dst", "gather": "dst"}


@functools.cache
def _replace_methods() -> None:
    from torch._C._distributed_c10d import ProcessGroup

    for name, (op, index, is_list) in _METHODS.items():
        method = getattr(ProcessGroup, name, None)  # versions of torch have some of them
        if method is not None:
            setattr(ProcessGroup, name, _recorded(method, op, index, is_list))


def _recorded(method: Any, op: str, index: int | None, is_list: bool) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        recorder = Recorder.active
        if recorder is not None:
            if index is None or index >= len(arguments):
                recorder.begin(op, self, None)
            elif is_list and isinstance(arguments[index], list):
                parts = arguments[0] if op == "all_gather" else None
                root = getattr(arguments[-1], "rootRank", None) if op in _ROOTS else None
                recorder.begin(op, self, arguments[index][0], parts, root)
            else:  # the same method also takes a tensor in place of a list
                recorder.begin(op, self, arguments[index])
        return method(self, *arguments, **options)

    return call
