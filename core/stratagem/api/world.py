"""Ranks of processes (`World`), how they are arranged (`Mesh`) and how they communicate (`Collectives`)."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

from attrs import frozen

from stratagem.api.group_services import GroupServices
from stratagem.errors import StratagemError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


ReduceOp = Literal["mean", "sum", "max", "min"]


@frozen(kw_only=True)
class World:
    """The ranks of one process and the world size, from an environment plugin."""

    #: This process's rank over all nodes.
    rank: int = 0
    #: Its rank on its node.
    local_rank: int = 0
    #: Which node it is on.
    node_rank: int = 0
    #: Number of processes over all nodes.
    world_size: int = 1
    #: Number of processes on this node.
    local_world_size: int = 1
    #: Number of nodes.
    num_nodes: int = 1
    #: The host of the rendezvous store.
    main_address: str = "127.0.0.1"
    #: Port of the rendezvous store; None for one process.
    main_port: int | None = None
    #: The launcher hosts the store, so rank 0 connects as a client like all ranks.
    store_hosted: bool = False
    #: Distinguishes restarts that share a store: a restarted process must not read the address of an earlier one. None:
    #: no variable does, and the ranks agree on one through the store, which must be hosted.
    generation: str | None = "0"
    #: The same command may start the processes again: without a checkpoint ``ckpt_path="last"`` begins at step 0.
    may_restart: bool = False


#: The axes on which ranks read different samples, outermost first.
DATA_AXES = ("team", "data", "shard", "expert")


@frozen(kw_only=True)
class Mesh:
    """The processes as named axes, outermost first; samplers, clipping and metrics ask it for sizes and positions.

    Known names: ``team``, ``pipeline``, ``data``, ``shard``, ``expert``, ``context``, ``tensor``. Ranks are laid out
    row by row. Ranks that differ only in ``pipeline``, ``context`` or ``tensor`` read the same samples.
    """

    #: Size of each axis by name, outermost first.
    axes: dict[str, int]
    #: This process's rank.
    rank: int = 0

    def size(self, axis: str) -> int:
        """Return the size of `axis`; 1 if there is none."""
        return self.axes.get(axis, 1)

    def position(self, axis: str) -> int:
        """Return the position of this process on `axis`."""
        stride = 1
        for name, size in reversed(self.axes.items()):
            if name == axis:
                return self.rank // stride % size
            stride *= size
        return 0

    @property
    def num_data_shards(self) -> int:
        """Number of parts of a data set: ranks on the axes of `DATA_AXES` read different samples."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    @property
    def data_shard(self) -> int:
        """Index of the part that this process reads, from 0 to `num_data_shards` - 1."""
        return functools.reduce(lambda index, axis: index * self.size(axis) + self.position(axis), DATA_AXES, 0)

    def lines(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only in their positions on `axes`, each in order of the ranks."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(math.prod(self.axes.values())):
            other = Mesh(axes=self.axes, rank=rank)
            groups.setdefault(tuple(other.position(axis) for axis in self.axes if axis not in axes), []).append(rank)
        return list(groups.values())


class Collectives(GroupServices):
    """Collective operations over a group of ranks; the base class is the single-process no-op.

    Every method is collective: all ranks call it, in the same order. Tensors keep their device and shape, and are on
    the same type of device on all ranks; objects arrive with their tensors on the CPU. Ranks are numbered within the
    group, from 0.
    """

    #: This process's rank within the group.
    rank = 0
    #: The device of tensors that are sent.
    device: Any = "cpu"
    #: The device of tensors that point-to-point messages send: the CPU beside gloo, which sends from its memory alone.
    message_device: Any = "cpu"
    #: torch's process group of these ranks, for engines that need one; None is the default group.
    group: Any = None

    @property
    def unchecked(self) -> Collectives:
        """Collectives over the same ranks that do not check whether all ranks make the same call.

        For calls of a training step that are the same on all ranks by construction. Without `unchecked`, calls that
        differ between ranks are an error on all of them.
        """
        return self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        """Return the reduction of `tensor` over all ranks as a new tensor."""
        return tensor.clone()

    def average_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average `tensor` over all ranks in place; the future holds it. Called after the innermost comm hook."""
        import torch

        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(tensor)
        return future

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's `tensor` (equal shapes), in rank order."""
        return [tensor.clone()]

    def all_gather_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return a future of every rank's 1-D `tensor` (equal sizes), concatenated in rank order: (ranks * n,)."""
        return self.average_async(tensor.clone())

    def all_to_all_async(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Send a chunk of the 1-D `tensor` to each rank; the future holds the chunks that this rank received."""
        return self.average_async(tensor.clone())

    def send_recv(self, tensor: torch.Tensor, to: int, source: int) -> torch.Tensor:
        """Send `tensor` to rank `to`, and return what rank `source` sent (of the same shape)."""
        return tensor.clone()

    def split(self, groups: Sequence[Sequence[int]]) -> Collectives:
        """Return collectives over the one of the disjoint `groups` that contains this rank.

        All ranks call it, with the same groups.
        """
        return self

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with rank `src`'s and return it."""
        return tensor

    def replicate(self, tensors: Iterable[torch.Tensor], src: int = 0) -> None:
        """Copy rank `src`'s values of `tensors` to all ranks, in place; parameters and buffers."""
        for tensor in tensors:
            self.broadcast(tensor.data, src)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return rank `src`'s picklable `value` on every rank."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order."""
        return [value]

    def barrier(self) -> None:
        """Wait until every rank has called it."""

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank."""
        return any(self.all_gather_object(bool(flag)))

    def fail_together(self, error: BaseException | None) -> None:
        """Raise an error on all ranks if any rank passes one, naming the first such rank; else return on all.

        If a check fails on some ranks only, the others would wait in the next collective.
        """
        reports = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                raise StratagemError(f"rank {rank} failed with {report.rstrip('.')}", do="this rank stops with it")

    def close(self) -> None:
        """Destroy the group; may be called twice."""
