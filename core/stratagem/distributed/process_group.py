"""Collectives over torch.distributed's process groups.

[Note: two backends]
A process group has a backend for each type of device: on CUDA devices it is connected as ``cpu:gloo,cuda:nccl``. A
tensor is sent from its own device. Objects and flags (``any``, ``barrier``, the comparison of calls) are CPU tensors:
gloo sends them, without waiting for the GPU's stream or taking its memory. A group that the user made may have only
NCCL; then they are copied to the GPU and sent from there.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import io
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from attrs import evolve

from stratagem.api.run_parts import DEFAULT_TIMEOUT, Timeouts
from stratagem.api.world import Collectives
from stratagem.distributed import rounds
from stratagem.distributed.comparison import check_same_call, comparing_group
from stratagem.distributed.default_group import (
    backends_in,
    backends_of,
    check_adoptable,
    default_store,
    forget_meshes,
    have_equal_names,
    leave_group,
    not_joined,
    not_splitting,
    trace_calls,
    with_gloo,
)
from stratagem.distributed.interfaces import allow_connections, choose_interface, connect_when_needed, unset_variables
from stratagem.distributed.store import TCPKeyValueStore, connect_store, meet
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stratagem.api.context import RunContext
    from stratagem.api.group_services import KeyValueStore
    from stratagem.api.world import ReduceOp, World

#: Tag of messages between two ranks. Those of users, whose tag is 0 unless they choose one, may go over the same group
#: meanwhile; gloo matches by tag, NCCL has none.
MESSAGE_TAG = 0x7367


def join(world: World, backend: str, run: RunContext) -> Collectives:
    """Return the collectives of the ranks of `world`, for an answer to `connect`. Collective.

    Args:
        backend: of torch.distributed, unless the environment connects the ranks itself.

    Raises:
        ConfigError: a process group exists with another backend or size.
        LaunchError: the others did not come in time, or `backend` could not connect them.
    """
    joined = run.environment.join(world, run.device, run.stack.timeouts().start)
    return joined or TorchCollectives.connect(world, run.device, backend=backend, timeouts=run.stack.timeouts())


class TorchCollectives(Collectives):
    """Collectives over a process group of torch.distributed; by default over its default group."""

    def __init__(
        self, world: World, device: torch.device, *, owns_group: bool, group: Any = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:  # fmt: skip
        self.world_size, self.device, self._owns_group = world.world_size, device, owns_group
        self.rank, self._store, self._num_barriers = world.rank, default_store(), 0
        self._world, self.group = world, group
        #: Timeout of a collective.
        self.timeout = timeout
        #: The group over which ranks compare their calls; None if they do not. See `comparison`.
        self._comparing: Any = None
        #: This run set gloo's network interface, but the user made the default group, which outlives the run.
        self._chose_interface = False
        self._duplicates: dict[str, Self] = {}
        #: The backend for each type of device; see [Note: two backends].
        self._backends = backends_of(group)

    @classmethod
    def connect(
        cls, world: World, device: torch.device, *, backend: str, timeouts: Timeouts | None = None
    ) -> TorchCollectives:
        """Join the process group, or adopt the one that an earlier run of this process made.

        Raises:
            ConfigError: a group exists with another backend or size.
            LaunchError: the other ranks did not connect within `timeouts.start`, or `backend` could not connect them.
        """
        start, timeout = timeouts or Timeouts()
        if dist.is_initialized():
            check_adoptable(device, backend, world.world_size)
            adopted = cls(world, device, owns_group=False, timeout=timeout)
            adopted._chose_interface = choose_interface(world)  # for the groups that the run adds
            return adopted._compare()
        whole = with_gloo(backend, device)
        allow_connections(world.world_size)
        choose_interface(world)
        trace_calls()
        if "nccl" in whole:
            connect_when_needed()
        try:
            # gloo's messages between two ranks keep the timeout with which the group is made: ranks meet before.
            store = meet(connect_store(world, start), "start", world.world_size, start)
            dist.init_process_group(
                whole, store=store, timeout=timeout,
                rank=world.rank, world_size=world.world_size,
                # NCCL connects at once, and its groups of fewer ranks share what it connected.
                device_id=device if backends_in(whole).get(device.type) == "nccl" else None,
            )  # fmt: skip
            joined = cls(world, device, owns_group=True, timeout=timeout)._compare()
        except RuntimeError as error:
            leave_group()
            if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
                raise not_joined(world, error) from error
            raise
        # A script may end without closing its trainer: the group must be destroyed before the interpreter exits.
        atexit.register(leave_group)
        return joined

    def _compare(self) -> TorchCollectives:
        """Start to compare calls, if gloo sends CPU tensors; return self. Collective."""
        if self._backends.get("cpu") == "gloo":
            self._comparing = comparing_group(self.timeout)
        return self

    @property
    def reports_lost_ranks(self) -> bool:  # type: ignore[override]
        return self._backends.get(self.device.type, "gloo") in ("gloo", "mpi", "ucc")

    def _sent_from(self, tensor: torch.Tensor) -> torch.device:
        """Return the device from which `tensor` is sent: its own, if a backend serves it."""
        if tensor.device.type in self._backends:
            return tensor.device
        return self.device if self.device.type in self._backends else torch.device("cpu")

    @property
    def message_device(self) -> torch.device:
        return self._messages_from(self.device)

    def _messages_from(self, device: torch.device) -> torch.device:
        return device if device.type == "cpu" or self._backends.get(device.type) != "gloo" else torch.device("cpu")

    def _same_call(self, call: str, *facts: Any) -> None:
        """Wait for all ranks, and check that all make this call; see `comparison`.

        Raises:
            ConfigError: some ranks make another call; raised on all ranks.
        """
        if self._comparing is not None:
            check_same_call(call, facts, self._comparing)

    @functools.cached_property
    def unchecked(self) -> Collectives:
        if self._comparing is None:
            return self
        same = copy.copy(self)
        same._comparing, same._owns_group, same.traffic = None, False, self.traffic
        return same

    def duplicate(self, purpose: str) -> Self:
        if purpose not in self._duplicates:
            self._same_call("duplicate")
            self._duplicates[purpose] = self._on_cpu()
            self._duplicates[purpose].traffic = self.traffic
        return self._duplicates[purpose]

    def _on_cpu(self) -> Self:
        """Return collectives of the same ranks for CPU tensors, over a new gloo group. Collective."""
        group = dist.new_group(
            dist.get_process_group_ranks(self.group), backend="gloo", timeout=self.timeout,
            # Of a smaller group only its own ranks call this.
            use_local_synchronization=self.group is not None,
        )  # fmt: skip
        return type(self)(self._world, torch.device("cpu"), owns_group=False, group=group, timeout=self.timeout)

    def _in_rounds(self, tensor: torch.Tensor, ranks: int = 1) -> bool:
        """Whether gloo sends the CPU tensor `tensor`, of that many ranks at once, and takes longer than `rounds`."""
        is_small = ranks * tensor.nbytes <= rounds.LARGEST
        return is_small and tensor.device.type == "cpu" and self._backends.get("cpu") == "gloo"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        place = self._sent_from(tensor)
        self._same_call("all_reduce", *_facts(tensor, place), op)
        reduced = tensor.to(place, copy=True)
        self._count("all_reduce", reduced)
        reduced = self._reduced(reduced, "sum" if op == "mean" else op)
        return (reduced / self.world_size if op == "mean" else reduced).to(tensor.device)

    def _reduced(self, tensor: torch.Tensor, op: Literal["sum", "max", "min"]) -> torch.Tensor:
        """Return the reduction of `tensor`, which may change."""
        if op != "sum" and self._in_rounds(tensor):
            return rounds.all_reduce(tensor.contiguous(), torch.maximum if op == "max" else torch.minimum, self.group)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group)
        return tensor

    def average_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self._count("all_reduce", tensor)
        # Divide first: a sum of large fp16 gradients would overflow before the division.
        work = dist.all_reduce(tensor.div_(self.world_size), async_op=True, group=self.group)
        return self._future(work, tensor)  # gloo's holds complex tensors as real ones

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        place = self._sent_from(tensor)
        self._same_call("all_gather", *_facts(tensor, place))
        local = tensor.to(place).contiguous()
        self._count("all_gather", local)
        if self._in_rounds(local, self.world_size):
            return [part.to(tensor.device) for part in rounds.all_gather(local, self.group)]
        parts = [torch.empty_like(local) for _ in range(self.world_size)]
        dist.all_gather(parts, local, group=self.group)
        return [part.to(tensor.device) for part in parts]

    def all_gather_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self._count("all_gather", tensor)
        whole = torch.empty(self.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        # torch 2.13 renamed it, and warns about the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(whole, tensor.contiguous(), async_op=True, group=self.group)
        return self._future(work, whole)

    def all_to_all_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self._count("exchange", tensor)
        pieces = torch.empty_like(tensor)
        work = dist.all_to_all_single(pieces, tensor.contiguous(), async_op=True, group=self.group)
        return self._future(work, pieces)

    def _future(self, work: Any, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return the future of `tensor`, the output of the collective `work`."""
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: self._settled(done, tensor))
        return future

    def _settled(self, future: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, the output of a collective, once it can be read on any stream."""
        future.value()  # raises the error of the collective
        if tensor.device.type == "cuda" and self._backends.get("cuda") == "gloo":
            # gloo sends from the CPU; its future is done when the copy to the GPU is queued, on a separate stream.
            torch.cuda.synchronize(tensor.device)
        return tensor

    def send_recv(self, tensor: torch.Tensor, to: int, source: int) -> torch.Tensor:
        place = self._messages_from(self._sent_from(tensor))
        self._same_call("send_recv", *_facts(tensor, place))
        local = tensor.to(place).contiguous()
        self._count("send", local)
        received = torch.empty_like(local)
        messages = [
            dist.P2POp(dist.isend, local, group=self.group, group_peer=to, tag=MESSAGE_TAG),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=source, tag=MESSAGE_TAG),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received.to(tensor.device)

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        self._same_call("split", *map(tuple, groups))
        whole = dist.get_process_group_ranks(self.group)
        mine: TorchCollectives | None = None
        # Without local synchronization all ranks of the run make each group, which NCCL splits off one after the other.
        # Of a part of them the others do not call this, or for their own groups.
        each_in_one = sorted(rank for ranks in groups for rank in ranks) == list(range(self.world_size))
        is_local = self.group is not None or (each_in_one and have_equal_names(self.unchecked))
        for ranks in groups:
            if is_local and self.rank not in ranks:
                continue
            with not_splitting() if self.group is not None else contextlib.nullcontext():
                group = dist.new_group(
                    [whole[rank] for rank in ranks], timeout=self.timeout, use_local_synchronization=is_local
                )
            if self.rank in ranks:
                place = evolve(self._world, rank=list(ranks).index(self.rank), world_size=len(ranks))
                mine = TorchCollectives(place, self.device, owns_group=False, group=group, timeout=self.timeout)
        assert mine is not None, "every rank is in a group"
        mine.traffic = self.traffic
        return mine

    def _count(self, collective: str, tensor: torch.Tensor) -> None:
        self.traffic.add(collective, tensor.nbytes, self.world_size)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        place = self._sent_from(tensor)
        self._same_call("broadcast", *_facts(tensor, place), src)
        moved = tensor.to(place).contiguous()  # backends ignore strides
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
        self._same_call("broadcast_object", src)
        box = [_pack(value) if self.rank == src else b""]
        dist.broadcast_object_list(box, group=self.group, group_src=src)
        if self.rank == src and not box[0].startswith(_REFUSAL):
            return value
        return _unpack(box[0], src)

    def all_gather_object(self, value: Any) -> list[Any]:
        self._same_call("all_gather_object")
        values: list[Any] = [b""] * self.world_size
        dist.all_gather_object(values, _pack(value), group=self.group)
        return [_unpack(each, rank) for rank, each in enumerate(values)]

    def any(self, flag: bool) -> bool:
        return bool(self.all_reduce(torch.tensor(int(flag)), "max"))

    def barrier(self) -> None:
        self._same_call("barrier")
        if "cpu" in self._backends:  # dist.barrier would wait for the device
            self._reduced(torch.zeros(()), "max")
        else:
            dist.barrier(group=self.group)

    def barrier_with_timeout(self, what: str, limit_s: float) -> None:
        self._num_barriers += 1
        key = f"stratagem/barrier/{self._num_barriers}"
        self._store.set(f"{key}/{self.rank}", "")
        try:
            meet(self._store, key, self.world_size, min(self.timeout, timedelta(seconds=limit_s)))
        except dist.DistError:
            late = [rank for rank in range(self.world_size) if not self._store.check([f"{key}/{rank}"])]
            came = self.world_size - len(late)
            message = f"{what} was called on rank {self.rank} and on {came} of {self.world_size} ranks"
            if late:
                message += f", not on rank {late[0]}" + (f" and {len(late) - 1} more" if len(late) > 1 else "")
            raise ConfigError(
                message,
                expected="all ranks to call it",
                do="remove an `if rank == 0` around it; without one, look for an exception on a rank that is missing, "
                "and for loaders of different lengths, after which the ranks are not at the same step",
            ) from None

    def key_value_store(self, shared: bool = False) -> KeyValueStore:
        return TCPKeyValueStore(self._store if shared else self._store.clone())

    def new_group(self) -> Self:
        self._same_call("new_group")
        return self._on_cpu()

    def close(self) -> None:
        self._comparing, self._duplicates = None, {}
        self.__dict__.pop("unchecked", None)
        if self._chose_interface:
            self._chose_interface = False
            unset_variables()
        if self._owns_group:
            self._owns_group = False
            atexit.unregister(leave_group)
            leave_group(self.failed)
        else:
            forget_meshes()


def _facts(tensor: torch.Tensor, place: torch.device) -> tuple[Any, ...]:
    """Return what must be equal on all ranks when they send `tensor` from `place`."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    return (shape, dtype) if place.type == "cpu" else (shape, dtype, place.type)


# --- Objects are sent as pickles, with their tensors on the CPU ---------------------------------------------------


class _Packer(pickle.Pickler):
    """Pickles all tensors as CPU tensors: otherwise another rank would load them onto the sender's device."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta"):
            return value.detach().cpu().__reduce_ex__(self.proto)
        return NotImplemented

    proto = pickle.DEFAULT_PROTOCOL


#: Prefix of the message that replaces an object that cannot be pickled, so that all ranks raise. No pickle has it.
_REFUSAL = b"stratagem: "


def _pack(value: Any) -> bytes:
    """Return `value` pickled; if that fails, `_REFUSAL` and the reason."""
    file = io.BytesIO()
    try:
        _Packer(file).dump(value)
    except Exception as error:  # noqa: BLE001 - the user's objects may raise anything
        return _REFUSAL + f"{type(value).__name__}, {type(error).__name__}: {error}".encode()
    return file.getvalue()


def _unpack(message: bytes, rank: int) -> Any:
    """Return the object in a `message` of `_pack` from `rank`.

    Raises:
        ConfigError: that rank could not pickle it.
    """
    if message.startswith(_REFUSAL):
        reason = message.removeprefix(_REFUSAL).decode().rstrip(".")
        raise ConfigError(
            f"rank {rank} sends an object that cannot be pickled ({reason})",
            do="send an object that can be pickled: without open files, local functions and local classes",
        )
    return pickle.loads(message)  # noqa: S301 - what a rank of this run sent
