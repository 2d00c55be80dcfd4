"""What starts and failures of many ranks ask of rank 0's store: the ranks are threads of this process, with one store.

python benchmarks/world.py [--ranks 64,256,1024] [--gloo 128] [--starts] [--quick]

Seconds are upper bounds, since all threads share this process and its cores; calls and bytes are exact. A group of gloo
that connects each rank to all needs n^2 calls, so it is measured up to `--gloo` ranks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pickle
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stratagem.api.seeding import random_state
from stratagem.api.world import Collectives, World
from stratagem.checkpoint.rank_rows import states_of_ranks
from stratagem.distributed.process_group import TorchCollectives
from stratagem.distributed.store import TCPKeyValueStore
from stratagem_checkpoints.shards.plan import Plan
from stratagem_meeting.attempts import agree_on_generation
from stratagem_peer_diagnosis.failure_reports import FailureReports

LIMIT = datetime.timedelta(seconds=300)
PER_NODE = 8


class Counting(dist.Store):
    """A store that counts what one rank asks of another store, and the bytes that it reads."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.calls, self.read = store, 0, 0

    def set(self, key: str, value: Any) -> None:
        self.calls += 1
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self.store.get(key)
        self.calls, self.read = self.calls + 1, self.read + len(value)
        return value

    def add(self, key: str, number: int) -> int:
        self.calls += 1
        return int(self.store.add(key, number))

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], *limit: Any) -> None:
        self.calls += 1
        self.store.wait(keys, *limit)


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Return what `call` returns for each rank, in threads that run at the same time."""
    results: list[Any] = [None] * count

    def act(rank: int) -> None:
        results[rank] = call(rank)

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def place(rank: int, count: int, port: int | None = None) -> World:
    """Return the place of `rank` among `count` ranks on nodes of eight."""
    return World(
        rank=rank, world_size=count, local_rank=rank % PER_NODE, local_world_size=PER_NODE, num_nodes=count // PER_NODE,
        node_rank=rank // PER_NODE, main_address="127.0.0.1", main_port=port, store_hosted=port is not None,
        generation=None,
    )  # fmt: skip


def generation(count: int) -> str:
    """Rank 0's time to agree with all ranks, which have asked already."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def act(rank: int) -> float:
        if rank == 0:  # when all others wait for it
            asked = dist.PrefixStore("stratagem/attempts", server)
            while not all(asked.check([f"nonce/{other}"]) for other in range(1, count)):
                time.sleep(0.1)
        began = time.perf_counter()
        agree_on_generation(place(rank, count, server.port), LIMIT)
        return time.perf_counter() - began

    return f"{together(count, act)[0]:.2f} s"


def gloo(count: int, lazy: bool) -> str:
    """What a rank asks of the store for a group of all ranks, and one all-reduce over it."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))
    shared = dist.HashStore()
    stores = [Counting(shared) for _ in range(count)]

    def act(rank: int) -> Any:
        group = dist.ProcessGroupGloo(stores[rank], rank, count, LIMIT)
        group.allreduce(torch.ones(4)).wait()
        return group

    together(count, act)
    calls, read = (max(getattr(store, name) for store in stores) for name in ("calls", "read"))
    return f"{calls} calls, {read:,} bytes"


def reports(count: int) -> str:
    """Of how many others a rank learns that they failed, if all fail at once: the least and the most."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    boards = together(count, lambda _: TCPKeyValueStore(dist.TCPStore("127.0.0.1", server.port, is_master=False)))
    ready = threading.Barrier(count)

    def act(rank: int) -> int:
        collectives: Any = SimpleNamespace(rank=rank, key_value_store=lambda: boards[rank])
        ready.wait()
        return len(FailureReports(collectives).exchange(set(range(count)) - {rank}))

    seen = together(count, act)
    return f"{min(seen)} to {max(seen)} of {count - 1}"


def groups(count: int) -> str:
    """How many groups a rank makes for a mesh of nodes by four by two, one for each of its axes at least."""
    made: Counter[bool] = Counter()
    make, dist.new_group = dist.new_group, lambda ranks, **_: made.update([1 in ranks]) or make([1], backend="fake")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=count)
    try:
        whole = TorchCollectives(place(1, count), torch.device("cpu"), owns_group=False)
        ranks = torch.arange(count).view(-1, 4, 2)
        for axis in range(3):
            whole.split(ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist())
    finally:
        dist.new_group = make
        dist.destroy_process_group()
    return str(made.total())


class Alike(Collectives):
    """Collectives of a rank whose peers all send what it sends, at no cost."""

    def __init__(self, count: int) -> None:
        self.world_size, self.rank, self.sent = count, 1, 0

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent += tensor.nbytes
        return [tensor] * self.world_size

    def all_gather_object(self, value: Any) -> list[Any]:
        self.sent += len(pickle.dumps(value))
        return [value] * self.world_size


def save(count: int) -> str:
    """A rank's own time for a sharded save of 80 layers with Adam, beside writing, and what it sends to each other."""
    collectives = Alike(count)
    run: Any = SimpleNamespace(collectives=collectives, whole_state=False)
    mesh = DeviceMesh("cpu", torch.arange(count), _init_backend=False, _rank=1)
    weights = {
        str(number): DTensor.from_local(torch.zeros(1, 4), mesh, [Shard(0)], run_check=False) for number in range(2160)
    }
    mine = {"random": random_state([]), "epoch_start": random_state([])}
    began = time.perf_counter()
    Plan({"state_dict": weights, "ranks": states_of_ranks(run, lambda: mine)}, 1, count).divide(collectives)
    return f"{time.perf_counter() - began:.2f} s, {collectives.sent:,} bytes"


def main() -> None:
    """Print a table with a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--gloo", type=int, default=128, help="most ranks of a group that connects each to all")
    parser.add_argument("--starts", action="store_true", help="only rank 0's time to agree with all ranks")
    parser.add_argument("--quick", action="store_true", help="16 and 64 ranks")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(1 << 18)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; a rank is a thread\n")
    if arguments.starts:
        for count in map(int, arguments.ranks.split(",")):
            print(f"{count} ranks: rank 0 agrees on an attempt in {generation(count)}", flush=True)
        return
    what = "agree on an attempt | gloo, each to all | gloo, as needed | groups for 3 axes | reports read | sharded save"
    print(f"| ranks | {what} |")
    print("|---|---|---|---|---|---|---|")
    for count in [16, 64] if arguments.quick else [int(each) for each in arguments.ranks.split(",")]:
        eager = gloo(count, lazy=False) if count <= arguments.gloo else ""
        cells = generation(count), eager, gloo(count, lazy=True), groups(count), reports(count), save(count)
        print(f"| {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads end with the process
