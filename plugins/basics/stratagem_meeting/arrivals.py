"""What each rank tells the others when it arrives at their meeting, and what rank 0 compares."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from stratagem.errors import ConfigError, LaunchError, PeerError, StratagemError, differences

if TYPE_CHECKING:
    from stratagem.api.world import World

#: A message names so many ranks.
_NAMED = 8


@frozen(kw_only=True)
class Arrival:
    """One process at the meeting of the ranks; see [Note: meeting] in `stratagem.distributed.rendezvous`."""

    rank: int
    world_size: int
    num_nodes: int
    host: str
    pid: int
    #: Differs between any two processes, also of two containers.
    id: str
    #: Digest of the facts that all ranks must agree on.
    digest: str
    #: What tells the device of this process from all others, and its model; "" if ranks may share it.
    device: str = ""
    model: str = ""
    may_share_device: bool = False

    @classmethod
    def of(cls, world: World, digest: str, device: tuple[str, str] | None, *, may_share_device: bool) -> Arrival:
        name, model = device or ("", "")
        return cls(
            rank=world.rank, world_size=world.world_size, num_nodes=world.num_nodes, host=socket.gethostname(),
            pid=os.getpid(), id=uuid.uuid4().hex, digest=digest, device=name, model=model,
            may_share_device=may_share_device,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.host}"

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


def problem(new: Arrival, facts: Mapping[str, Any], zero: Arrival, zero_facts: Mapping[str, Any],
            arrived: Iterable[Arrival]) -> ConfigError | None:  # fmt: skip
    """Return why the process `new` cannot be one of the ranks; None if it can.

    Args:
        zero: rank 0's arrival, whose values hold.
        arrived: those that were found to be fine.
    """
    others = [each for each in arrived if each.id != new.id]
    return (
        _other_world(new, zero)
        or _other_facts(new, facts, zero, zero_facts)
        or _same_rank(new, others)
        or _same_device(new, others)
    )


def error_of_late_rank(new: Arrival, zero: Arrival, arrived: Iterable[Arrival]) -> ConfigError:
    """Return why `new` is not one of the ranks, all of which have `arrived` before it.

    What it trains is not compared: it belongs to another run, or is the second process of a rank.
    """
    error = _other_world(new, zero) or _same_rank(new, arrived)
    assert error is not None, "all ranks have arrived, so one of them has this rank"
    return error


def _other_world(new: Arrival, zero: Arrival) -> ConfigError | None:
    if (new.world_size, new.num_nodes) != (zero.world_size, zero.num_nodes):
        return ConfigError(
            f"{new} has a world of {new.world_size} processes on {new.num_nodes} nodes, and {zero} one of "
            f"{zero.world_size} on {zero.num_nodes}",
            expected="the same on all ranks",
            do="give every node the same num_nodes and devices, and the same WORLD_SIZE where it is set; if these are "
            "two runs, choose another MASTER_PORT for one",
        )
    if not 0 <= new.rank < new.world_size:
        return ConfigError(
            f"{new} is in a world of {new.world_size}", expected=f"ranks from 0 to {new.world_size - 1}",
            do="correct RANK, NODE_RANK or WORLD_SIZE",
        )  # fmt: skip
    return None


def _other_facts(
    new: Arrival, facts: Mapping[str, Any], zero: Arrival, zero_facts: Mapping[str, Any]
) -> ConfigError | None:
    if new.digest == zero.digest:
        return None
    found = differences(facts, zero_facts, f"on rank {new.rank}", "on rank 0")
    pids = f"rank {new.rank} is {new.process}, rank 0 {zero.process}"
    return ConfigError(
        f"{found} ({pids})", expected="the same on all ranks",
        do="start every rank with the same code, files, variables and packages",
    )  # fmt: skip


def _same_rank(new: Arrival, others: Iterable[Arrival]) -> ConfigError | None:
    for other in others:
        if other.rank == new.rank:
            return ConfigError(
                f"two processes have rank {new.rank} of {new.world_size}: {other.process}, and {new.process}",
                expected="one process for each rank",
                do="give each node a NODE_RANK of its own, and each run on one machine a MASTER_PORT of its own",
            )
    return None


def _same_device(new: Arrival, others: Iterable[Arrival]) -> ConfigError | None:
    for other in others:
        if new.device and other.device == new.device and not (new.may_share_device and other.may_share_device):
            return ConfigError(
                f"{other} and {new} have the same device, {new.model} {new.device}",
                expected="a device for each rank",
                do="correct devices or CUDA_VISIBLE_DEVICES; to let ranks share a GPU, set the strategy's option "
                'process_group_backend="gloo"',
            )
    return None


def different_models(arrived: Iterable[Arrival]) -> str:
    """Return a note if the ranks have devices of several models, else ""."""
    models: dict[str, list[int]] = {}
    for each in sorted(arrived, key=lambda arrival: arrival.rank):
        models.setdefault(each.model, []).append(each.rank)
    if len(models) < 2:
        return ""
    told = "; ".join(f"{model or 'unknown'} on {ranks_in_words(ranks)}" for model, ranks in models.items())
    return f"the ranks have devices of different models, and wait for the slowest in each step: {told}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return "rank 2", "ranks 2 and 5", or "ranks 0 to 7 and 12"."""
    numbers = sorted(ranks)
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        block = [number for _, number in run]
        parts += map(str, block) if len(block) < 3 else [f"{block[0]} to {block[-1]}"]
    if len(parts) > _NAMED:
        parts = [*parts[:_NAMED], f"more ({len(numbers)} in all)"]
    *most, last = parts
    return f"rank{'s' if len(numbers) > 1 else ''} " + (f"{', '.join(most)} and {last}" if most else last)


# --- Errors as the others receive them ---------------------------------------------------------------------------


def error_to_json(error: StratagemError) -> dict[str, str]:
    return {"kind": type(error).__name__, "found": error.found, "expected": error.expected, "do": error.do}


def error_from_json(data: Mapping[str, str]) -> StratagemError:
    kinds = {kind.__name__: kind for kind in (ConfigError, LaunchError, PeerError)}
    cls: type[StratagemError] = kinds.get(data["kind"], PeerError)
    return cls(data["found"], expected=data["expected"], do=data["do"])
