"""Time and loss of training over a slow network, with comm hooks and local updates. Needs root: see hosts.py.

    python benchmarks/slow_link/compare.py [--links 100 1000 100+5 1000+5] [--only none int8] [--out results.jsonl]

A link is given by its rate in Mbit/s, and after "+" its delay in milliseconds each way. Two hosts with one process of
one thread each train an MLP of 2.4M parameters in fp32 to classify noisy points in ten classes; the configurations
alternate for several rounds. Step times are medians, or means over whole periods if not every step sends. Bytes are
those that left the interface of host 1. Losses are of host 1's model on a fixed held-out batch; evaluation is not
timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from hosts import Hosts, NoHosts
from torch import Tensor, nn

import stratagem as sg

Record = dict[str, Any]

#: By name: arguments of the Trainer, and the period of its communication in steps.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({"strategy": "ddp"}, 1),
    "fp16_compress": ({"strategy": "ddp", "comm_hook": "fp16_compress"}, 1),
    "int8": ({"strategy": "ddp", "comm_hook": "int8"}, 1),
    "powersgd": ({"strategy": "ddp", "comm_hook": {"name": "powersgd", "rank": 2, "start_powerSGD_iter": 8}}, 1),
    "one_bit": ({"strategy": "ddp", "comm_hook": {"name": "one_bit", "start_iter": 8}}, 1),
    "local_sgd": ({"strategy": [{"name": "local_sgd", "period": 8}, "single_device"]}, 8),
    "diloco": ({"strategy": [{"name": "diloco", "period": 16}, "single_device"]}, 16),
}
#: Training ends at multiples of this number, which is a multiple of every period above.
CHUNK = 16
#: Not measured: the first steps build buckets, or send uncompressed gradients.
WARM_UP = CHUNK
#: Steps between two evaluations of the loss.
LOOK_EVERY = 4
BATCH_SIZE = 64
RESULT = "RESULT "


# --- One link ----------------------------------------------------------------------------------------------------


def measure(link: str, asked: argparse.Namespace) -> list[Record]:
    """Create two hosts, train on them with every configuration, and return a record for each training."""
    mbit, _, delay = link.partition("+")
    with Hosts.up(2, float(delay or 0), f"compare{os.getpid()}") as hosts:
        hosts.rate(float(mbit))
        words = ["work", "--rounds", asked.rounds, "--seconds", asked.seconds, "--steps", asked.steps, "--only"]
        words += asked.only
        processes = [_start(hosts, rank, [str(word) for word in words]) for rank in range(2)]
        records = []
        for line in _lines(processes[0]):
            if line.startswith(RESULT):
                records.append({"link": link} | json.loads(line.removeprefix(RESULT)))
                print(_progress(records[-1]), flush=True)
            else:
                print(line, end="", flush=True)
        codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"a process of link {link} ended with code {max(codes, key=abs)}")
    return records


def _start(hosts: Hosts, rank: int, words: list[str]) -> subprocess.Popen[str]:
    place = {"RANK": rank, "LOCAL_RANK": 0, "NODE_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "h1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
    command = hosts.command(rank + 1, sys.executable, __file__, *words)
    environment = os.environ | {name: str(value) for name, value in place.items()}
    output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=output, text=True)


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    yield from process.stdout


def _progress(record: Record) -> str:
    return (
        f"{record['link']}, round {record['round']}, {record['configuration']}: {record['step_ms']:.0f} ms and "
        f"{record['megabytes']:.2f} MB a step, loss {record['curve'][-1][2]:.3f} after {record['curve'][-1][0]} steps"
    )


# --- In each process ---------------------------------------------------------------------------------------------


def work(asked: argparse.Namespace) -> None:
    """Train with every configuration in turn, as one of two ranks; rank 0 prints a record for each."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # All trainers use this group: starting processes for each of them would take longer than training.
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank, installed = torch.distributed.get_rank(), _installed(asked.only)
    for number, name in itertools.product(range(asked.rounds), installed):
        before = {"round": number, "configuration": name, "load": os.getloadavg()[0]}
        before |= _round_trip_ms() if rank == 0 else {}
        torch.distributed.barrier()
        record = before | _train(name, asked.seconds, asked.steps)
        if rank == 0:
            print(RESULT + json.dumps(record), flush=True)
    torch.distributed.destroy_process_group()


def _installed(names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            _trainer(name)
            found.append(name)
        except sg.StratagemError as error:
            print(f"left out: {name} ({error.found})", flush=True)
    return found


def _trainer(name: str) -> sg.Trainer:
    quiet = {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "barebones": True, "use_distributed_sampler": False}
    return sg.Trainer(max_epochs=1, **quiet, **CONFIGURATIONS[name][0])


def _train(name: str, seconds: float, steps: int) -> Record:
    student = Student(seconds, steps)
    _trainer(name).fit(student, batches(torch.distributed.get_rank()))
    period = CONFIGURATIONS[name][1]
    times, sent = student.step_s[WARM_UP:], student.bytes_sent
    step_s = statistics.median(times) if period == 1 else statistics.mean(times)
    return {
        "step_ms": step_s * 1e3, "us_per_sample": step_s / (2 * BATCH_SIZE) * 1e6, "curve": student.curve,
        "megabytes": (sent[-1] - sent[WARM_UP]) / (len(sent) - 1 - WARM_UP) / 1e6,
    }  # fmt: skip


class Student(sg.Module):
    """Trains for a number of seconds and at least a number of steps; keeps times, bytes and losses."""

    def __init__(self, seconds: float, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [256, 1024, 1024, 1024, 10]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        self.net = nn.Sequential(*[part for pair in layers for part in pair][:-1])
        self.seconds, self.least_steps, self.held_out = seconds, steps, samples(512, seed=-1)
        self.step_s: list[float] = []
        self.bytes_sent = [_bytes_sent()]
        #: Steps so far, seconds of training so far, loss of the held-out batch.
        self.curve: list[tuple[int, float, float]] = []
        self._last_step = 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self._look()
        torch.distributed.barrier()
        self._started = time.perf_counter()

    def on_train_batch_end(self) -> None:
        self.step_s.append(time.perf_counter() - self._started)
        self.bytes_sent.append(_bytes_sent())
        done = len(self.step_s)
        if done % LOOK_EVERY == 0:
            self._look()
        if done % CHUNK == 0:
            if done == 2 * CHUNK:
                self._last_step = self._agree_on_the_last_step()
            self.trainer.should_stop = done == self._last_step
        self._started = time.perf_counter()

    def _look(self) -> None:
        with torch.no_grad():
            x, y = self.held_out
            loss = float(nn.functional.cross_entropy(self.net(x), y))
        self.curve.append((len(self.step_s), sum(self.step_s), loss))

    def _agree_on_the_last_step(self) -> int:
        """Return how many steps fill the time according to rank 0, in whole chunks. Its bytes are not counted."""
        chunk_s = sum(self.step_s[CHUNK:])
        before = _bytes_sent()
        chunks = torch.tensor(max(2, -(-self.least_steps // CHUNK), round(self.seconds / chunk_s)))
        torch.distributed.broadcast(chunks, 0)
        extra = _bytes_sent() - before
        self.bytes_sent[:] = [each + extra for each in self.bytes_sent]
        return int(chunks) * CHUNK


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy copies of forty points, and their classes: four points for each of ten classes."""
    points = torch.randn(40, 256, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1000 + seed)
    origin = torch.randint(len(points), (count,), generator=generator)
    return points[origin] + 4 * torch.randn(count, 256, generator=generator), origin % 10


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's part of an epoch, longer than any training here."""
    x, y = samples(400 * BATCH_SIZE, seed=rank)
    return list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)) * 10


def _bytes_sent() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def _round_trip_ms(attempts: int = 10) -> Record:
    """Return how long host 2 takes to refuse a connection, which measures the round trip without a server."""
    times = []
    for _ in range(attempts):
        with socket.socket() as probe:
            start = time.perf_counter()
            probe.connect_ex(("h2", 9))
            times.append((time.perf_counter() - start) * 1e3)
    return {"round_trip_min_ms": min(times), "round_trip_mean_ms": statistics.mean(times)}


# --- The table ---------------------------------------------------------------------------------------------------


def table(records: list[Record]) -> str:
    """Return the records of one link as a Markdown table: medians over the rounds, minimum and maximum step time."""
    steps = min(record["curve"][-1][0] for record in records)
    seconds = min(record["curve"][-1][1] for record in records)
    low, mean = (_median(records, f"round_trip_{word}_ms") for word in ("min", "mean"))
    mbit, _, delay = records[0]["link"].partition("+")
    link = f"{mbit} Mbit/s" + (f" and {delay} ms each way" if delay else "")
    beside = f"load {_median(records, 'load'):.1f}, loss at the start {records[0]['curve'][0][2]:.3f}"
    lines = [
        f"{link}: round trip {low:.1f} ms at least, {mean:.1f} on average, {beside}\n",
        f"| | ms a step | min | max | us a sample | MB a step | loss at step {steps} | loss at {seconds:.0f} s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(record["configuration"] for record in records):
        own = [record for record in records if record["configuration"] == name]
        times = [record["step_ms"] for record in own]
        at_step = statistics.median(_loss_at(record, 0, steps) for record in own)
        in_time = statistics.median(_loss_at(record, 1, seconds) for record in own)
        lines.append(
            f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} | {max(times):.0f} | "
            f"{_median(own, 'us_per_sample'):.0f} | {_median(own, 'megabytes'):.2f} | {at_step:.3f} | {in_time:.3f} |"
        )
    return "\n".join(lines)


def _loss_at(record: Record, column: int, limit: float) -> float:
    """Return the last loss of the curve before steps (column 0) or seconds (column 1) passed `limit`."""
    return float([point[2] for point in record["curve"] if point[column] <= limit][-1])


def _median(records: list[Record], key: str) -> float:
    return statistics.median(record[key] for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["work"], help=argparse.SUPPRESS)
    parser.add_argument("--links", nargs="+", default=["100", "1000", "100+5", "1000+5"])
    parser.add_argument("--only", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each training")
    parser.add_argument("--steps", type=int, default=2 * CHUNK, help="minimum number of steps of each training")
    parser.add_argument("--out", type=Path, default=Path("slow_link.jsonl"))
    asked = parser.parse_args()
    if asked.command == "work":
        work(asked)
        return
    tables = []
    try:
        for link in asked.links:
            records = measure(link, asked)
            with asked.out.open("a") as out:
                out.writelines(json.dumps(record) + "\n" for record in records)
            tables.append(table(records))
    except NoHosts as error:
        raise SystemExit(f"compare.py: {error}") from None
    print(f"\ntorch {torch.__version__}, {asked.rounds} rounds\n\n" + "\n\n".join(tables))


if __name__ == "__main__":
    main()
