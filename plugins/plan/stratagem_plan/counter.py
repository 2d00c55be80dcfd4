"""Count what a training step allocates, computes and sends, from the operations that torch dispatches."""

from __future__ import annotations

import bisect
import contextlib
import math
import weakref
from collections import Counter as Count
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from stratagem_plan.allocator import GRAIN, LIBRARIES, Allocator, Block
from stratagem_plan.backend import current_stream

aten = torch.ops.aten
#: Operators that multiply matrices, and which of their arguments the matrices are.
_MATMULS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
_ATTENTION = "scaled_dot_product"
#: Names under which torch dispatches collectives, and what they are called elsewhere.
_COLLECTIVES = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "_allgather_base_": "all_gather",
    "allgather_": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast", "alltoall_base_": "all_to_all", "alltoall_": "all_to_all", "send": "send",
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip


@define(eq=False)
class Peak:
    """The most bytes that were allocated at once."""

    total: int = 0
    by: dict[str, int] = field(factory=dict)
    phase: str = ""
    #: The module that computes, or whose gradients are computed; "" if none of those with a name.
    module: str = ""


class Modules:
    """Which module computes: in forward the innermost one, in backward the one that made the node of the graph."""

    def __init__(self) -> None:
        #: Names by the identity of modules: those that are told.
        self.names: dict[int, str] = {}
        self._stack = [""]
        #: Numbers of nodes of the graph, and the module that makes those that follow.
        self._starts, self._made_by = [0], [""]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within, modules are noted when they are called."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # recomputation stops by an exception
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def current(self) -> str:
        """Return the name of the module."""
        node: Any = torch._C._current_autograd_node()
        if len(self._stack) > 1 or node is None:
            return self._stack[-1]
        return self._made_by[bisect.bisect_right(self._starts, node._sequence_nr()) - 1]

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        self._stack.append(self.names.get(id(module), self._stack[-1]))
        self._note()

    def _leave(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._made_by.append(self._stack[-1])


class StepCounter(TorchDispatchMode):
    """Counts bytes of storages on `device_type`, work and collectives, by phase.

    Works with real tensors and with fake ones.
    """

    def __init__(self, device_type: str, limit: float = math.inf) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.device_type, self._phase = device_type, "forward"
        #: Bytes that an allocator can reserve.
        self.limit = limit
        self.now: Count[str] = Count()
        self.total, self.peak = 0, Peak()
        self.modules = Modules()
        #: Work of one call and where it is done -> how often.
        self.work: Count[tuple[Any, ...]] = Count()
        #: Collectives: phase, name, ranks of the group, bytes of one call -> how often.
        self.sent: Count[tuple[str, str, tuple[int, ...], int]] = Count()
        #: Operators of matrices without a formula for their FLOPs.
        self.uncounted: Count[str] = Count()
        self._live: dict[int, list[Any]] = {}
        #: Without and with segments that can be extended.
        self.allocators = _allocators(self.limit)
        #: Blocks of storages that are gone: Python may drop them while an allocator is at work.
        self._gone: list[tuple[Block, ...]] = []
        #: Phases for which cuBLAS has blocks: they stay.
        self._libraries: set[str] = set()
        self._quiet = 0

    @property
    def phase(self) -> str:
        """What is computed: what autograd runs is backward, also where a pipeline calls it."""
        is_differentiating = self._phase == "forward" and torch._C._current_graph_task_id() != -1
        return "backward" if is_differentiating else self._phase

    # --- Memory --------------------------------------------------------------------------------------------------

    def add(self, tensor: torch.Tensor, category: str) -> None:
        """Count the storage of `tensor`, or move it to `category` if it is counted."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None:
            if known[1] != category:
                self.now[known[1]] -= known[0]
                self.now[category] += known[0]
                known[1] = category
            return
        size = _allocated(storage.nbytes())
        self._live[storage._cdata] = [size, category, self._take(size)]
        weakref.finalize(storage, self._drop, storage._cdata)
        self._grow(size, category)

    def _take(self, size: int) -> tuple[Block, ...]:
        while self._gone:
            for allocator, block in zip(self.allocators, self._gone.pop(), strict=False):  # none has no bytes
                allocator.give(block)
        return tuple(each.take(size, current_stream()) for each in self.allocators if size)

    def _take_for_libraries(self, phase: str) -> None:
        for size in LIBRARIES[phase]:
            self._take(size)

    def _use(self, sizes: Iterable[int]) -> None:
        """Let the allocators give out and take back what a kernel needs while it runs."""
        self._gone += [self._take(_allocated(size)) for size in sizes]

    def _grow(self, size: int, category: str) -> None:
        self.now[category] += size
        self.total += size
        if self.total > self.peak.total:
            self.peak = self._peak()

    def _peak(self) -> Peak:
        return Peak(self.total, dict(self.now), self.phase, self.modules.current)

    def _drop(self, key: int) -> None:
        size, category, blocks = self._live.pop(key, (0, "", ()))
        self._gone.append(blocks)
        self.now[category] -= size
        self.total -= size

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a storage whose size was set."""
        known = self._live.get(storage._cdata)
        if known is not None:
            before, known[0] = known[0], _allocated(storage.nbytes())
            old, known[2] = known[2], self._take(known[0])
            self._gone.append(old)
            self._grow(known[0] - before, known[1])

    def forget(self) -> None:
        """Count work and messages from zero; what is allocated stays so."""
        self.work.clear()
        self.sent.clear()
        self.peak = self._peak()

    def settle(self) -> None:
        """Let the allocators begin with what is allocated now: a run builds modules on the CPU."""
        self.allocators = _allocators(self.limit)
        self._gone.clear()
        for known in list(self._live.values()):  # Python may drop some of them meanwhile
            known[2] = self._take(known[0])
        for phase in self._libraries:
            self._take_for_libraries(phase)

    def counted(self) -> tuple[Count[Any], Count[Any]]:
        """Return a copy of the work and the messages so far."""
        return +self.work, +self.sent

    def repeat(self, since: tuple[Count[Any], Count[Any]], times: int) -> None:
        """Count what came after `since` so many times."""
        for now, before in zip((self.work, self.sent), since, strict=True):
            for key, count in (now - before).items():
                now[key] += count * (times - 1)

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count in `phase`."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Count nothing: torch asks for shapes."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # --- Operations ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        is_sent = func.namespace in ("c10d", "_c10d_functional") and name in _COLLECTIVES
        if is_sent and not self._quiet:
            self._send(name, args)
        result = func(*args, **kwargs)
        if self._quiet:
            return result
        category = "messages" if is_sent else "activations" if self.phase == "forward" else "temporary"
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        fresh = [each for each in made if each.untyped_storage()._cdata not in self._live]
        for each in fresh:
            self.add(each, category)
        if name in SCRATCH:
            self._use(SCRATCH[name](args[1]))
        if func.namespace == "aten" and not func.is_view:
            self._work(func, name, args, kwargs, result, made)
        return result

    def _work(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, made: list[torch.Tensor]) -> None:
        packet = func._overloadpacket
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if not any(each.device.type == self.device_type for each in (*tensors, *made)):
            return
        dtype = str((made or tensors)[0].dtype).removeprefix("torch.")
        if packet in _MATMULS:
            phase = "backward" if self.phase == "backward" else "forward"  # a thread that differentiates has its own
            if phase not in self._libraries:
                self._libraries.add(phase)
                self._take_for_libraries(phase)
            one, other = (args[index] for index in _MATMULS[packet])
            batch = one.shape[0] if one.dim() == 3 else 1
            self.work[self.phase, "matmul", dtype, one.shape[-2], other.shape[-1], one.shape[-1], batch] += 1
        elif name in ("convolution", "convolution_backward"):
            out, weight = (made[0], args[1]) if name == "convolution" else (args[0], args[2])
            places, channels = out.numel() // out.shape[1], weight.shape[0]
            # As products of matrices: of the weights and of what lies under them, at each place of the output.
            times = sum(args[-1][:2]) if name != "convolution" else 1
            if times:
                self.work[self.phase, "matmul", dtype, places, channels, weight.numel() // channels, 1] += times
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            self.work[self.phase, "attention", dtype, int(flops)] += 1
        else:
            if _ATTENTION in name:
                self.uncounted[str(func)] += 1
            moved = sum({id(each): each.nbytes for each in (*tensors, *made)}.values())
            if moved and not name.startswith(("empty", "_local_scalar")):
                self.work[self.phase, "vector", dtype, name, moved] += 1

    def _send(self, name: str, args: Any) -> None:
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        ranks = ranks_of(args)
        what, phase = _COLLECTIVES[name], self.phase
        if what == "send":  # to one of them; what was made in backward is sent in backward
            ranks = tuple(sorted((dist.get_rank(), ranks[args[2]])))
            phase = "backward" if any(self._category(each) == "temporary" for each in tensors) else phase
        for each in tensors:
            if not self._is_kept(each):
                self.add(each, "messages")
        sizes = [each.nbytes for each in tensors]
        # A gather's result and a scatter's input hold the parts of all ranks.
        has_all = what in ("all_gather", "reduce_scatter")
        payload = max(sizes, default=0) if has_all else sum(sizes[:1])
        if name.startswith("all_gather_into_tensor"):  # it has this rank's part alone
            payload = sizes[0] * len(ranks)
        self.sent[phase, what, ranks, payload] += 1

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has a purpose beside being sent."""
        return self._category(tensor) in ("parameters", "gradients", "optimizer")

    def _category(self, tensor: torch.Tensor) -> str:
        return str(self._live.get(tensor.untyped_storage()._cdata, (0, ""))[1])

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products, convolutions and attention so far."""
        total = 0.0
        for (_, kind, _, *sizes), count in self.work.items():
            if kind == "matmul":
                total += 2.0 * math.prod(sizes) * count
            elif kind != "vector":
                total += sizes[0] * count
        return total


def _of_flash(query: torch.Tensor) -> list[int]:
    batch, heads, length, width = query.shape
    rows = batch * heads * (-(-length // 128) * 128) * 4
    return [rows, rows * -(-width // 32) * 32]


def _of_efficient(query: torch.Tensor) -> list[int]:
    return [query.numel() * 4, query.numel() // query.shape[-1] * 4] if query.dtype is torch.float32 else []


#: Bytes that backward kernels of attention take beside their results (torch's flash_api.cpp and attention_backward.cu).
SCRATCH = {
    "_scaled_dot_product_flash_attention_backward": _of_flash,
    "_scaled_dot_product_efficient_attention_backward": _of_efficient,
}


def _allocators(limit: float) -> tuple[Allocator, Allocator]:
    return Allocator(is_expandable=False, limit=limit), Allocator(is_expandable=True)


def _allocated(num_bytes: int) -> int:
    """Return the bytes that the allocator takes for so many."""
    return -(-num_bytes // GRAIN) * GRAIN


def ranks_of(args: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks of the process group among the arguments of a collective; all if there is none."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    for each in args:
        with contextlib.suppress(Exception):  # an argument of another kind
            if isinstance(each, torch.ScriptObject):
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(each)))
            if isinstance(each, str):
                return tuple(dist.get_process_group_ranks(_resolve_process_group(each)))  # type: ignore[arg-type]
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
