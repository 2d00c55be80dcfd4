"""Who the processes are (`World`), how they are arranged (`Mesh`) and how they talk (`Collectives`).

[Note: two backends]
A process group has a backend for each type of device: on CUDA devices it is connected as ``cpu:gloo,cuda:nccl``. A
tensor is sent from where it is. Objects and decisions (``any``, ``barrier``, the comparison of calls) are CPU tensors:
they go over gloo, and neither wait for what is queued on a GPU nor take memory there. A group that the user made may
have NCCL alone; then they go by way of the GPU.

[Note: comparing calls]
Two ranks that make different calls would mix their values, wait until the timeout, or abort (gloo, for different
sizes). So all ranks first sum a fingerprint of what they are about to call, over a gloo group of its own: parts h of a
hash, and their squares. All ranks brought the same text exactly if n * sum(h^2) == sum(h)^2 for each part. The parts
have 20 bits, so that the sums are exact in 64-bit integers, and in float64 up to thousands of ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import gc
import hashlib
import io
import os
import pickle
import re
import socket
import struct
import sys
import time
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, frozen

from stratagem.api.traffic import Traffic
from stratagem.errors import ConfigError, LaunchError, StratagemError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    import torch

ReduceOp = Literal["mean", "sum", "max", "min"]

#: torch's own defaults for collectives on gloo, and on NCCL: GPUs that wait cost more.
DEFAULT_TIMEOUT = timedelta(minutes=30)
NCCL_TIMEOUT = timedelta(minutes=10)


@frozen(kw_only=True)
class World:
    """One process's place among all processes of a run; what an environment plugin answers.

    rank and world_size count processes over all nodes; local_rank and local_world_size those on this node.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    main_address: str = "127.0.0.1"
    #: Port of the rendezvous store; None while there is one process and nothing to meet.
    main_port: int | None = None
    #: The store is hosted by whoever launched the processes, so rank 0 joins it as a client like the rest.
    store_hosted: bool = False
    #: Distinguishes successive attempts that share a store: a restarted process must not read a dead one's address.
    generation: str = "0"

    @property
    def is_global_zero(self) -> bool:
        return self.rank == 0


@frozen(kw_only=True)
class Mesh:
    """The processes as named axes, outermost first; samplers, clipping and metrics ask it for sizes and positions.

    Known names: ``team``, ``data``, ``shard``, ``tensor``, ``pipeline``, ``context``. Ranks are laid out row by row.
    """

    axes: dict[str, int]
    rank: int = 0

    def size(self, axis: str) -> int:
        return self.axes.get(axis, 1)

    def position(self, axis: str) -> int:
        stride = 1
        for name, size in reversed(self.axes.items()):
            if name == axis:
                return self.rank // stride % size
            stride *= size
        return 0

    @property
    def num_data_shards(self) -> int:
        """How many parts a data set is cut into: ``team``, ``data`` and ``shard`` axes read different samples."""
        return self.size("team") * self.size("data") * self.size("shard")

    @property
    def data_shard(self) -> int:
        """Which of those parts this process reads."""
        group = self.position("team") * self.size("data") + self.position("data")
        return group * self.size("shard") + self.position("shard")


class Board:
    """Notes that ranks leave for each other, by key. No call waits for another rank."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        """Leave `text` under `key`, in place of what is there."""
        self._notes[key] = text

    def get(self, key: str) -> str | None:
        """Return what is under `key`."""
        return self._notes.get(key)


class _StoreBoard(Board):
    """Notes in the store that the ranks met at."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        self._store.set(f"stratagem/board/{key}", text)

    def get(self, key: str) -> str | None:
        name = f"stratagem/board/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None


class Collectives:
    """What processes say to each other. This base is the conversation of a single process with itself.

    Every method is collective: all ranks call it, in the same order. Tensors keep their device and shape, and are on
    the same type of device on all ranks; objects arrive with their tensors on the CPU. Ranks are numbered within the
    conversation, from 0.
    """

    world_size = 1
    rank = 0
    #: Where tensors of messages are.
    device: Any = "cpu"
    #: A collective on tensors of `device` raises when another rank dies, rather than wait until the timeout.
    reports_lost_ranks = True
    #: torch's process group of these ranks, for engines that want one; None is its default group.
    group: Any = None

    @property
    def unchecked(self) -> Collectives:
        """The same ranks, without a comparison of what each of them calls.

        For calls of a training step that are the same on all ranks by construction. Otherwise a call that only some
        ranks make, or another one than theirs, is an error on all of them.
        """
        return self

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Counts the bytes of tensors that were sent; a conversation that was split off counts in the same place."""
        return Traffic()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        """Return the reduction of `tensor` over all ranks as a new tensor."""
        return tensor.clone()

    def average_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average `tensor` over all ranks in place; the future holds it. The floor under every stack of comm hooks."""
        import torch

        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor` (equal shapes), in rank order."""
        return [tensor.clone()]

    def all_gather_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a future of every rank's 1-D `tensor` (equal sizes), in rank order, joined: (ranks * n,)."""
        return self.average_async(tensor.clone())

    def exchange_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Cut the 1-D `tensor` into a piece for each rank; the future holds the pieces that this rank was sent."""
        return self.average_async(tensor.clone())

    def pass_on(self, tensor: torch.Tensor, to: int, source: int) -> torch.Tensor:
        """Send `tensor` to rank `to`, and return what rank `source` sent (of the same shape)."""
        return tensor.clone()

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return the conversation among the ranks of that group, of disjoint `groups`, which this rank is in.

        All ranks call it, with the same groups.
        """
        return self

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with rank `src`'s and return it."""
        return tensor

    def replicate(self, tensors: Iterable[torch.Tensor], src: int = 0) -> None:
        """Give all ranks rank `src`'s values of `tensors`, in place; whether they are trained or not."""
        for tensor in tensors:
            self.broadcast(tensor.data, src)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable `value` on every rank."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order."""
        return [value]

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank."""
        return any(self.all_gather_object(bool(flag)))

    def fail_together(self, error: BaseException | None) -> None:
        """Raise on all ranks if any rank brings an error, naming the first such rank; else return on all.

        A check that only some ranks fail would leave the others waiting in the next collective.
        """
        reports = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                raise StratagemError(f"rank {rank} failed with {report.rstrip('.')}", do="this rank stops with it")

    def meet(self, what: str, limit_s: float) -> None:
        """Return once every rank has called this for the same `what`.

        For calls that a user may make on one rank alone: unlike a collective it ends, with an error that says so.

        Raises:
            ConfigError: some ranks did not come within `limit_s` seconds.
        """

    def leave_note(self, text: str) -> None:
        """Tell the other ranks why this one is about to end; the first note stands. Not collective.

        It outlives this process wherever a launcher hosts the store: ours do, and torchrun.
        """

    def read_note(self, limit_s: float = 2.0) -> str | None:
        """Return the note of a rank that ended, if one leaves it within `limit_s` seconds. Not collective."""
        return None

    def board(self) -> Board:
        """Return a place where ranks leave notes for each other, whenever they like; for a thread of its own."""
        if self.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} has no board()", expected="one, for ranks to agree on when to stop",
                do="tell the strategy's author",
            )  # fmt: skip
        return Board()

    def with_own_connection(self) -> Collectives:
        """Return these collectives for the notes of another thread, which do not wait for calls of this one."""
        return self

    def duplicate(self, purpose: str) -> Collectives:
        """Return collectives of the same ranks over a group of their own, for CPU tensors: the same ones for one
        `purpose`.

        Messages of the two never match each other, so one rank may be in either. All ranks call it.
        """
        return self

    def apart(self) -> Collectives:
        """Return a second conversation of the same ranks, on the CPU, for a thread that must not disturb this one."""
        if self.world_size > 1:
            raise ConfigError(
                f"{type(self).__name__} cannot be had twice", expected="an apart(), for saving in the background",
                do="save without async_save, or tell the strategy's author",
            )  # fmt: skip
        return Collectives()

    def close(self) -> None:
        """Leave the conversation; idempotent."""


class TorchCollectives(Collectives):
    """Collectives over one of torch.distributed's process groups of all ranks, the default one unless given."""

    def __init__(
        self, world: World, device: torch.device, *, owns_group: bool, group: Any = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        self.world_size, self.device, self._owns_group = world.world_size, device, owns_group
        self.rank, self._store, self._meetings = world.rank, _default_store(), 0
        self._world, self.group = world, group
        #: How long a message may take.
        self.timeout = timeout
        #: The group over which ranks compare what they call; None: they do not. See [Note: comparing calls].
        self._comparing: Any = None
        #: The interface of gloo was chosen for this run in a group of the user's, which stays.
        self._chose_interface = False
        self._duplicates: dict[str, Collectives] = {}
        #: The backend for each type of device; see [Note: two backends].
        self._backends = backends_of(group)

    @classmethod
    def connect(
        cls, world: World, device: torch.device, *, backend: str, timeout: timedelta = DEFAULT_TIMEOUT
    ) -> TorchCollectives:
        """Join the process group, or adopt the one that an earlier run of this process made.

        Raises:
            ConfigError: a group exists with another backend or size.
            LaunchError: the other ranks did not appear within `timeout`, or `backend` could not connect them.
        """
        import torch.distributed as dist

        if dist.is_initialized():
            _check_adoptable(device, backend, world.world_size)
            chose = _choose_interface(world)  # for the groups that the run adds
            adopted = cls(world, device, owns_group=False, timeout=timeout)._compare()
            adopted._chose_interface = chose
            return adopted
        whole = with_gloo(backend, device)
        _allow_connections(world.world_size)
        _choose_interface(world)
        if "nccl" in whole:
            _trace_calls()
        try:
            dist.init_process_group(
                whole, store=_store(world, timeout), rank=world.rank, world_size=world.world_size, timeout=timeout,
                # NCCL connects at once, and its groups of fewer ranks share what it connected.
                device_id=device if backends_in(whole).get(device.type) == "nccl" else None,
            )  # fmt: skip
            joined = cls(world, device, owns_group=True, timeout=timeout)._compare()
        except RuntimeError as error:
            _leave_group()
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                raise _not_joined(world, error) from error
            raise
        # A group may outlive its run: a script that drops its trainer must leave in order all the same.
        atexit.register(_leave_group)
        return joined

    def _compare(self) -> TorchCollectives:
        """From now on compare calls, where gloo sends CPU tensors. Collective."""
        import torch.distributed as dist

        global _comparing
        if self._backends.get("cpu") == "gloo":
            default, group = dist.group.WORLD, None
            if _comparing is not None and _comparing[0]() is default:
                group = _comparing[1]()
            if group is None:
                group = dist.new_group(backend="gloo", timeout=self.timeout)
                _comparing = weakref.ref(default), weakref.ref(group)
            self._comparing = group
        return self

    @property
    def reports_lost_ranks(self) -> bool:  # type: ignore[override]
        return self._backends.get(self.device.type, "gloo") in ("gloo", "mpi", "ucc")

    def _sent_from(self, tensor: torch.Tensor) -> torch.device:
        """Return the device from which `tensor` is sent: its own, if a backend serves it."""
        import torch

        if tensor.device.type in self._backends:
            return tensor.device
        return self.device if self.device.type in self._backends else torch.device("cpu")

    def _same_call(self, call: str, *facts: Any) -> None:
        """Return once all ranks are about to make this call; see [Note: comparing calls].

        Raises:
            ConfigError: on all ranks, if some make another one.
        """
        if self._comparing is None:
            return
        import torch
        import torch.distributed as dist

        header = torch.tensor(fingerprint(f"{call} {facts}"))
        dist.all_reduce(header, group=self._comparing)
        if is_common(header.tolist(), self.world_size):
            return
        calls: list[str] = [""] * self.world_size
        dist.all_gather_object(calls, f"{where(sys._getframe())} with {facts}", group=self._comparing)
        rank = next((rank for rank, other in enumerate(calls) if other != calls[0]), 0)
        first, other = calls[0], calls[rank]
        if first.partition(" (")[0] != other.partition(" (")[0]:  # the arguments do not matter
            first, other = first.rpartition(" with ")[0], other.rpartition(" with ")[0]
        raise ConfigError(
            f"rank 0 is in {first} and rank {rank} in {other}", expected="all ranks to make the same call",
            do="call it on every rank: drop the condition that only some of them meet",
        )  # fmt: skip

    @functools.cached_property
    def unchecked(self) -> Collectives:  # type: ignore[override]
        if self._comparing is None:
            return self
        same = copy.copy(self)
        same._comparing, same._owns_group, same.traffic = None, False, self.traffic
        return same

    def duplicate(self, purpose: str) -> Collectives:
        if purpose not in self._duplicates:
            self._same_call("duplicate")
            self._duplicates[purpose] = self._on_cpu()
            self._duplicates[purpose].traffic = self.traffic
        return self._duplicates[purpose]

    def _on_cpu(self) -> TorchCollectives:
        """Return collectives of these ranks on CPU tensors, over a gloo group of their own. Collective."""
        import torch
        import torch.distributed as dist

        group = dist.new_group(dist.get_process_group_ranks(self.group), backend="gloo", timeout=self.timeout)
        return TorchCollectives(
            self._world, torch.device("cpu"), owns_group=False, group=group, timeout=self.timeout
        )  # fmt: skip

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        import torch.distributed as dist

        place = self._sent_from(tensor)
        self._same_call("all_reduce", *_facts(tensor, place), op)
        reduced = tensor.to(place, copy=True)
        self._count("all_reduce", reduced)
        ops = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        dist.all_reduce(reduced, ops[op], group=self.group)
        return (reduced / self.world_size if op == "mean" else reduced).to(tensor.device)

    def average_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        import torch.distributed as dist

        self._count("all_reduce", tensor)
        # Divide first: a sum of large fp16 gradients would overflow before the division.
        work = dist.all_reduce(tensor.div_(self.world_size), async_op=True, group=self.group)
        return work.get_future().then(lambda future: self._settled(future, tensor))  # gloo's holds complex ones as real

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        import torch
        import torch.distributed as dist

        place = self._sent_from(tensor)
        self._same_call("all_gather", *_facts(tensor, place))
        local = tensor.to(place).contiguous()
        self._count("all_gather", local)
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local, group=self.group)
        return [part.to(tensor.device) for part in parts]

    def all_gather_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        import torch
        import torch.distributed as dist

        self._count("all_gather", tensor)
        whole = torch.empty(self.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        # torch 2.13 renamed it, and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(whole, tensor.contiguous(), async_op=True, group=self.group)
        return work.get_future().then(lambda future: self._settled(future, whole))

    def exchange_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        import torch
        import torch.distributed as dist

        self._count("exchange", tensor)
        pieces = torch.empty_like(tensor)
        work = dist.all_to_all_single(pieces, tensor.contiguous(), async_op=True, group=self.group)
        return work.get_future().then(lambda future: self._settled(future, pieces))

    def _settled(self, future: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, which a message was received in, once any stream may read it."""
        import torch

        future.value()  # raises what went wrong on the way
        if tensor.device.type == "cuda" and self._backends.get("cuda") == "gloo":
            # gloo sends from the CPU; its future is done when the copy back is queued, on a stream of its own.
            torch.cuda.synchronize(tensor.device)
        return tensor

    def pass_on(self, tensor: torch.Tensor, to: int, source: int) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        place = self._sent_from(tensor)
        self._same_call("pass_on", *_facts(tensor, place))
        local = tensor.to(place).contiguous()
        self._count("send", local)
        received = torch.empty_like(local)
        messages = [
            dist.P2POp(dist.isend, local, group=self.group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received.to(tensor.device)

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        import torch.distributed as dist

        self._same_call("split", *map(tuple, groups))
        whole = dist.get_process_group_ranks(self.group)
        mine: TorchCollectives | None = None
        for ranks in groups:  # every rank takes part in making every group
            group = dist.new_group([whole[rank] for rank in ranks], timeout=self.timeout)
            if self.rank in ranks:
                place = evolve(self._world, rank=list(ranks).index(self.rank), world_size=len(ranks))
                mine = TorchCollectives(place, self.device, owns_group=False, group=group, timeout=self.timeout)
        assert mine is not None, "every rank is in a group"
        mine.traffic = self.traffic
        return mine

    def _count(self, collective: str, tensor: torch.Tensor) -> None:
        self.traffic.add(collective, tensor.nbytes, self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        import torch.distributed as dist

        place = self._sent_from(tensor)
        self._same_call("broadcast", *_facts(tensor, place), src)
        moved = tensor.to(place).contiguous()  # backends write into memory, whatever the strides
        self._count("broadcast", moved)
        dist.broadcast(moved, group=self.group, group_src=src)
        return tensor if moved is tensor else tensor.copy_(moved)

    def replicate(self, tensors: Iterable[torch.Tensor], src: int = 0) -> None:
        if self._comparing is None:
            return super().replicate(tensors, src)
        tensors = list(tensors)
        self._same_call("replicate", [_facts(tensor, self._sent_from(tensor)) for tensor in tensors], src)
        return self.unchecked.replicate(tensors, src)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        import torch.distributed as dist

        self._same_call("broadcast_object", src)
        box = [_packed(value) if self.rank == src else b""]
        dist.broadcast_object_list(box, group=self.group, group_src=src)
        if self.rank == src and not box[0].startswith(_REFUSAL):
            return value
        return _unpacked(box[0], src)

    def all_gather_object(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        self._same_call("all_gather_object")
        values: list[Any] = [b""] * self.world_size
        dist.all_gather_object(values, _packed(value), group=self.group)
        return [_unpacked(each, rank) for rank, each in enumerate(values)]

    def any(self, flag: bool) -> bool:
        import torch

        return bool(self.all_reduce(torch.tensor(int(flag)), "max"))

    def barrier(self) -> None:
        import torch
        import torch.distributed as dist

        self._same_call("barrier")
        if "cpu" in self._backends:  # torch's own would wait for the device
            dist.all_reduce(torch.zeros(()), group=self.group)
        else:
            dist.barrier(group=self.group)

    def meet(self, what: str, limit_s: float) -> None:
        import torch.distributed as dist

        self._meetings += 1
        key = f"stratagem/meeting/{self._meetings}"
        self._store.set(f"{key}/{self.rank}", "")
        arrived = self._store.add(key, 1)
        if arrived == self.world_size:
            self._store.set(f"{key}/all", "")
        try:
            self._store.wait([f"{key}/all"], min(self.timeout, timedelta(seconds=limit_s)))
        except dist.DistError:
            late = [rank for rank in range(self.world_size) if not self._store.check([f"{key}/{rank}"])]
            came = self.world_size - len(late)
            message = f"{what} was called on rank {self.rank} and on {came} of {self.world_size} ranks"
            if late:
                message += f", not on rank {late[0]}" + (f" and {len(late) - 1} more" if len(late) > 1 else "")
            raise ConfigError(message, expected="all ranks to call it", do="drop the guard for rank 0") from None

    def leave_note(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone with the rank that hosted it
            self._store.compare_set("stratagem/note", "", text)

    def read_note(self, limit_s: float = 2.0) -> str | None:
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(Exception):
            while not self._store.check(["stratagem/note"]):  # to wait in the store is to complain on stderr
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            return str(self._store.get("stratagem/note").decode())
        return None

    def board(self) -> Board:
        return _StoreBoard(self._store.clone())  # a connection of its own: a wait on the other one would block it

    def with_own_connection(self) -> Collectives:
        same = copy.copy(self)
        same._store, same._owns_group = self._store.clone(), False
        return same

    def apart(self) -> Collectives:
        self._same_call("apart")
        return self._on_cpu()

    def close(self) -> None:
        self._comparing, self._duplicates = None, {}
        self.__dict__.pop("unchecked", None)
        if self._chose_interface:
            self._chose_interface = False
            _listen_anywhere()
        if self._owns_group:
            self._owns_group = False
            atexit.unregister(_leave_group)
            _leave_group()


# --- What each rank calls ----------------------------------------------------------------------------------------


def fingerprint(text: str) -> list[int]:
    """Return numbers that stand for `text`, to be summed over ranks; see [Note: comparing calls]."""
    code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    parts = [code >> shift & 0xFFFFF for shift in (0, 20, 40)]
    return [*parts, *(part * part for part in parts)]


def is_common(sums: Sequence[float], world_size: int) -> bool:
    """Whether all ranks brought the same text, given the sums of their fingerprints."""
    parts, squares = [int(each) for each in sums[:3]], [int(each) for each in sums[3:6]]
    return all(world_size * square == part * part for part, square in zip(parts, squares, strict=True))


#: Packages whose frames are not the user's.
_OURS = re.compile(r"(stratagem\w*|torch|pluggy|deepspeed|contextlib|functools|threading|multiprocessing)(\.|$)")
#: Methods of torch in which other ranks are waited for, when they were not called through `Collectives`.
_TORCH_CALLS = {
    "torch._tensor": {"backward": "loss.backward()"},
    "torch.autograd": {"backward": "torch.autograd.backward()"},
    "torch.nn.parallel.distributed": {"forward": "the forward pass of DistributedDataParallel"},
}


def where(frame: FrameType | None) -> str:
    """Return where the code of `frame` is: the call in which it may wait for other ranks, and the user's line.

    A function may say it better than its name: in a local variable `waiting_in`.
    """
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    line = next((each for each in frames if not _OURS.match(each.f_globals.get("__name__", ""))), None)
    place = "" if line is None else f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno}"
    call = next(filter(None, map(_call, reversed(frames[: frames.index(line)] if line in frames else frames))), "")
    if not call:
        return f"{place} ({line.f_code.co_name})" if line is not None else "Python's own code"
    return f"{call} ({place})" if place else call


def _call(frame: FrameType) -> str:
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if "waiting_in" in frame.f_code.co_varnames:
        return str(frame.f_locals.get("waiting_in", ""))
    if module == __name__ and not name.startswith("_") and hasattr(Collectives, name):
        return f"{name}()"
    if module == "torch.distributed.distributed_c10d" and not name.startswith("_") and name != "wrapper":
        return f"torch.distributed.{name}()"
    return _TORCH_CALLS.get(module, {}).get(name, "")


#: How often this process has met others. All ranks meet equally often.
_meetings = 0
#: The default group, and the group over which the runs of this process compare calls. Both are torch's: references that
#: outlived them would be freed in a forked process, which hangs, as their threads are not there.
_comparing: tuple[weakref.ref[Any], weakref.ref[Any]] | None = None


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _leave_group() -> None:
    import torch.distributed as dist

    _listen_anywhere()
    if dist.is_initialized():
        # A DDP reducer that outlives its group takes the interpreter down at exit (std::terminate, seen with torch 2.13
        # and gloo, in plain PyTorch too): wrapped models in reference cycles have to go first.
        gc.collect()
        dist.destroy_process_group()


def _store(world: World, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if world.main_port is None:
        assert world.world_size == 1, "an environment that reports several processes must report a port to meet at"
        return dist.HashStore()
    global _meetings
    _meetings += 1
    hosts = world.is_global_zero and not world.store_hosted
    store = _hosted_store(world) if hosts else dist.TCPStore(*_store_place(world), is_master=False, timeout=timeout)
    store.set_timeout(timeout)
    if hosts:  # launchers of other nodes wait for what rank 0's launcher would have said: see `agree_before_connecting`
        store.set(f"stratagem/agreement/{world.generation}/{_meetings}/facts", "null")
    # A store that outlives the run still holds the addresses of the last group that met there.
    return dist.PrefixStore(f"stratagem/{world.generation}/{_meetings}", store)


#: The stores that this process hosts, by place.
_hosted: dict[tuple[str, int], Any] = {}


def _store_place(world: World) -> tuple[str, int]:
    """Return where the store is; on one machine at the loopback address, unless whoever launched it hosts it."""
    from stratagem.distributed.launch import LOOPBACK

    assert world.main_port is not None, "several processes have a port to meet at"
    alone = world.num_nodes == 1 and not world.store_hosted
    return (LOOPBACK if alone else world.main_address), world.main_port


def _hosted_store(world: World) -> Any:
    """Return the store that rank 0 hosts.

    It lives as long as this process: after a run the other ranks may ask it for the next one before this rank could
    host another on the same port.
    """
    from stratagem.distributed.launch import RendezvousStore

    place = _store_place(world)
    if not _hosted:
        atexit.register(_hosted.clear)  # registered before the group is: it ends after the group was left
    if place not in _hosted:
        _hosted[place] = RendezvousStore(*place, for_others=world.num_nodes > 1).serve()
    return _hosted[place].clone()


# --- Backends: see [Note: two backends] --------------------------------------------------------------------------


def with_gloo(backend: str, device: torch.device) -> str:
    """Return `backend`, a name or a list such as "cuda:nccl", with gloo for CPU tensors if it is a name for `device`
    alone.
    """
    import torch.distributed as dist

    if ":" in backend or device.type == "cpu" or "cpu" in dist.Backend.backend_capability.get(backend.lower(), ["cpu"]):
        return backend
    return f"cpu:gloo,{device.type}:{backend.lower()}"  # torch takes any case, what looks for "nccl" does not


def backends_in(backend: str) -> dict[str, str]:
    """Return which backend serves each type of device, given a name, or a list such as "cpu:gloo,cuda:nccl"."""
    import torch.distributed as dist

    if ":" in backend:
        pairs = (pair.partition(":") for pair in backend.lower().split(","))
        return {device: name for device, _, name in pairs}
    return dict.fromkeys(dist.Backend.backend_capability.get(backend.lower(), ["cpu", "cuda"]), backend.lower())


def backends_of(group: Any) -> dict[str, str]:
    """Return which backend of the process group `group` serves each type of device."""
    import torch.distributed as dist

    return backends_in(dist.get_backend_config(group))


def _facts(tensor: torch.Tensor, place: torch.device) -> tuple[Any, ...]:
    """Return what all ranks must have in common when they send `tensor` from `place`."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return (shape, dtype) if place.type == "cpu" else (shape, dtype, place.type)


class _Packer(pickle.Pickler):
    """Packs tensors of a device as tensors of the CPU: another rank would put them on the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(self.proto)
        return NotImplemented

    proto = pickle.DEFAULT_PROTOCOL


#: Begins what is sent in place of an object that cannot be pickled: all ranks raise, and none waits. No pickle does.
_REFUSAL = b"stratagem: "


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    try:
        _Packer(file).dump(value)
    except Exception as error:  # noqa: BLE001 - objects of the user raise what they like
        return _REFUSAL + f"{type(value).__name__}, {type(error).__name__}: {error}".encode()
    return file.getvalue()


def _unpacked(message: bytes, rank: int) -> Any:
    if message.startswith(_REFUSAL):
        reason = message.removeprefix(_REFUSAL).decode().rstrip(".")
        raise ConfigError(
            f"rank {rank} sends an object that cannot be pickled ({reason})",
            do="send what pickle takes: no functions or classes from within a function, and no open files",
        )
    return pickle.loads(message)  # noqa: S301 - what a rank of this run sent


def _not_joined(world: World, error: Exception) -> LaunchError:
    """Return the error for a rank whose process group could not be made."""
    text = str(error)
    last = text.partition("Last error:")[2].strip().splitlines()
    if "NCCL" not in text:
        do = "check that all ranks were started and can reach that address"
    elif "duplicate gpu" in text.lower():
        do = "give each rank a GPU of its own (devices, CUDA_VISIBLE_DEVICES)"
    else:
        do = "set NCCL_DEBUG=INFO to see where NCCL stopped; strategy option nccl.socket_ifname chooses an interface"
    return LaunchError(
        f"rank {world.rank} of {world.world_size} could not join the process group at "
        f"{world.main_address}:{world.main_port} ({last[0] if last else text})",
        do=do,
    )


def _trace_calls() -> None:
    """Let each rank write its last calls to a file when a collective of NCCL times out, unless the user decided."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name, which every process warns of where it is set
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


#: Files that a process may need beside the connections of its groups.
_OTHER_FILES = 512


def _allow_connections(world_size: int) -> None:
    """Raise the limit of open files, if the system permits, to what gloo needs: a connection to each rank and group."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 5 * world_size + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- The interface that gloo listens at --------------------------------------------------------------------------

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def _choose_interface(world: World) -> bool:
    """Let gloo listen where the other ranks of the run can reach this one; return whether that was left to choose.

    On one machine that is the loopback address; else the interface that packets to the main address leave by. Also for
    the groups that an engine makes later, so the variable stays until the group is left.
    """
    global _listens_here
    if _GLOO_INTERFACE in os.environ or not hasattr(socket, "if_nameindex"):
        return False
    found = _loopback() if world.num_nodes == 1 else _interface_towards(world)
    if found is not None:
        os.environ[_GLOO_INTERFACE] = found
        _listens_here = True
    return found is not None


def _listen_anywhere() -> None:
    global _listens_here
    if _listens_here:
        _listens_here = False
        os.environ.pop(_GLOO_INTERFACE, None)


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


#: An address on no machine (RFC 5737): packets to it would leave by the default route.
_ELSEWHERE = "192.0.2.1"


def _interface_towards(world: World) -> str | None:
    """Return the interface by which this node of several reaches the others; None if that cannot be told."""
    for host in (world.main_address, _ELSEWHERE):
        try:
            address = address_towards(host, world.main_port or 1)[1]
        except OSError:  # no route to it
            continue
        # On node 0 its own name often leads to the loopback address: the default route has to do.
        if not (address.startswith("127.") or address == "::1"):
            return interface_of(address)
    return None


def address_towards(host: str, port: int) -> tuple[int, str]:
    """Return the address family and the address of this machine that packets to `host` come from; none is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(place)
        return family, towards.getsockname()[0]


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has `address`; None if the system does not tell."""
    if ":" in address:
        with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
            wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            return next((line.split()[5] for line in file if line.startswith(wanted)), None)
        return None
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


#: This process set the interface of gloo.
_listens_here = False


def _check_adoptable(device: torch.device, backend: str, size: int) -> None:
    """Refuse the process group that exists if it has another size, or another backend for `device`."""
    import torch.distributed as dist

    found, wanted = backends_of(None), backends_in(with_gloo(backend, device))
    if dist.get_world_size() != size or found.get(device.type) != wanted.get(device.type):
        raise ConfigError(
            f"this process already belongs to a {dist.get_backend()} process group of {dist.get_world_size()}",
            expected=f"a {backend} group of {size} or none",
            do="close the earlier run (trainer.close()) or give both the same devices and strategy",
        )
