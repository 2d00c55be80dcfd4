"""Time to save and load 500 MB of model and Adam state: stratagem, torch.save and raw DCP, all with fsync.

    python benchmarks/checkpoints.py [--ranks 2] [--rounds 9] [--dir FOLDER]

The speed of a disk may vary by a multiple from one second to the next. So the methods alternate within a round, the
result is the median of each round's ratio to raw DCP, and CPU seconds (of rank 0) are printed besides wall time.
`--dir /dev/shm` measures without a disk.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import stratagem as sg
from stratagem_testing import run_in_processes

WIDTH, LAYERS = 2048, 10


def sync(folder):
    """Fsync the entries of a folder, as stratagem does."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def build(run):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    run.backward(model(torch.randn(2, WIDTH)).square().mean())
    run.optimizer_step(optimizer)
    optimizer.zero_grad()
    return model, optimizer


class Raw:
    """torch.distributed.checkpoint as in its tutorial."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model.module, optimizer

    def state(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path):
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        sync(path)
        sync(path.parent)

    def load(self, path):
        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class TorchSave(Raw):
    """One process, one file."""

    def save(self, path):
        with path.open("wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Ours:
    def __init__(self, run, model, optimizer):
        self.run, self.model, self.optimizer = run, model, optimizer

    def save(self, path):
        self.run.save(path, model=self.model, optimizer=self.optimizer)

    def load(self, path):
        self.run.load(path, model=self.model, optimizer=self.optimizer)


def runs(ranks, rounds, folder):
    warnings.simplefilter("ignore")
    strategy = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}} if ranks > 1 else "auto"
    ways, stalls = {}, {}
    for name in ("sharded", "dcp", *(() if ranks > 1 else ("full",))):
        run = sg.Run(accelerator="cpu", devices=ranks, strategy=strategy, checkpoint=name)
        run.connect()
        model, optimizer = build(run)
        ways[f"stratagem {name}"] = Ours(run, model, optimizer)
        if name == "sharded":
            ways["raw DCP"] = Raw(model, optimizer)
            if ranks == 1:
                ways["torch.save"] = TorchSave(model, optimizer)
    run = sg.Run(
        accelerator="cpu", devices=ranks, strategy=strategy, checkpoint={"name": "sharded", "async_save": True}
    )
    run.connect()
    model, optimizer = build(run)
    background = Ours(run, model, optimizer)
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    stalls = {
        "a bare copy": lambda path: [tensor.detach().clone() for tensor in tensors],
        "stratagem sharded, async_save": background.save,
    }
    rows = []
    order = random.Random(0)
    for turn in range(rounds + 1):
        names = [*ways, *stalls]
        order.shuffle(names)
        row = {}
        for name in names:
            path = folder / name.replace(" ", "_").replace(",", "")
            if run.is_global_zero:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
                os.sync()
            run.collectives.barrier()
            if name in stalls:
                kept, seconds, cpu = measured(stalls[name], path)
                row[name, "stall"] = seconds, cpu
                run.context.wait_for_saves()
                del kept
                run.collectives.barrier()
                continue
            _, *row[name, "save"] = measured(ways[name].save, path)
            run.collectives.barrier()
            _, *row[name, "load"] = measured(ways[name].load, path)
            run.collectives.barrier()
        if turn:  # the first is a warm-up
            rows.append(row)
    return rows


def measured(call, path):
    clock, cpu = time.perf_counter(), time.process_time()
    kept = call(path)
    return kept, time.perf_counter() - clock, time.process_time() - cpu


def work(rank, world_size, rounds, folder):
    if world_size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return runs(world_size, rounds, folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path("benchmark_checkpoints"))
    arguments = parser.parse_args()
    folder = arguments.dir / "benchmark_checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = run_in_processes(work, arguments.ranks, arguments.rounds, folder, limit_s=1800)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    size = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 * 3 / 1e6
    print(f"{size:.0f} MB, {arguments.ranks} rank(s), {len(rows)} rounds, torch {torch.__version__}")
    print("| | s, median | min | max | CPU s | ratio, median of rounds |\n|---|---|---|---|---|---|")
    for name, what in rows[0]:
        base = "a bare copy" if what == "stall" else "raw DCP"
        seconds = [row[name, what][0] for row in rows]
        cpu = statistics.median(row[name, what][1] for row in rows)
        ratio = statistics.median(row[name, what][0] / row[base, what][0] for row in rows)
        middle = statistics.median(seconds)
        print(f"| {what}: {name} | {middle:.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {cpu:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
