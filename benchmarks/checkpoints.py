"""Time and memory of saving and loading a model with its AdamW state: stratagem's formats and their libraries, fsynced.

    python benchmarks/checkpoints.py [--ranks 2] [--rounds 5] [--dir FOLDER] [--quick]

Each save and each load runs in new processes, which alternate between the methods: the speed of a disk may vary by a
multiple from one second to the next. A load is a resume: into a new model, and an optimizer without state. Memory is
the peak of a rank's resident memory (VmHWM, which counts the pages of mapped files) above what the state itself takes.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import stratagem as sg
from stratagem_testing import run_in_processes

#: Width and number of the layers: 100 million parameters, and 10 million.
FULL_SIZE, QUICK_SIZE = (4096, 6), (2048, 2)
OURS = ("full", "safetensors", "dcp", "sharded")


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder, as stratagem does."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Way:
    """A method to save and load `model` and `optimizer`."""

    def __init__(self, run: sg.Run, model: Any, optimizer: Any) -> None:
        self.run, self.handles = run, {"model": model, "optimizer": optimizer}
        self.model, self.optimizer = model.module, optimizer

    def save(self, path: Path) -> None:
        self.run.save(path, **self.handles)

    def load(self, path: Path) -> None:
        self.run.load(path, **self.handles)


class TorchSave(Way):
    """One process, one file."""

    mmap = False

    def save(self, path: Path) -> None:
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        sync(path)
        sync(path.parent)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, mmap=self.mmap)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class TorchMapped(TorchSave):
    """The optimizer keeps tensors in the mapped file: what it does not touch is not read."""

    mmap = True


class Safetensors(Way):
    """Tensors by name, those of the optimizer too."""

    def save(self, path: Path) -> None:
        tensors = dict(self.model.state_dict())
        for number, entry in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{key}": value for key, value in entry.items()}
        save_file(tensors, path)
        sync(path)
        sync(path.parent)

    def load(self, path: Path) -> None:
        state, entries = load_file(path), {}
        for name in [name for name in state if name.startswith("optimizer.")]:
            _, number, key = name.split(".")
            entries.setdefault(int(number), {})[key] = state.pop(name)
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": entries})


class RawDCP(Way):
    """torch.distributed.checkpoint as in its tutorial."""

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path) -> None:
        dcp.save(self.state(), storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        sync(path)
        sync(path.parent)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class RawWhole(Way):
    """The whole state, gathered on rank 0 and saved there in one file; all ranks map it to load."""

    def save(self, path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, path)
            sync(path)
            sync(path.parent)
        dist.barrier()

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, mmap=True)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )  # fmt: skip


class RawAsyncDCP(RawDCP):
    """Returns when the state is copied."""

    def save(self, path: Path) -> None:
        self.saving = dcp.async_save(self.state(), storage_writer=dcp.FileSystemWriter(path, sync_files=True))


RAW_ASYNC = "torch DCP, async"
RAW = {"torch": TorchSave, "torch, mmap=True": TorchMapped, "safetensors": Safetensors, "torch DCP": RawDCP}
RAW_DIVIDED = {"torch DCP": RawDCP, "torch, full_state_dict": RawWhole}


def ways(ranks: int) -> list[str]:
    raw = RAW if ranks == 1 else RAW_DIVIDED
    return [*raw, *(f"stratagem {name}" for name in OURS)]


def built(way: str, ranks: int, size: tuple[int, int], stepped: bool) -> Way:
    """Return `way` with a new model; its optimizer has taken a step if `stepped`."""
    warnings.simplefilter("ignore")
    name, _, background = way.removeprefix("stratagem ").partition(", ")
    strategy: Any = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}} if ranks > 1 else "auto"
    checkpoint = {"name": name if name in OURS else "full", **({"async_save": True} if background == "async" else {})}
    run = sg.Run(accelerator="cpu", devices=ranks, strategy=strategy, checkpoint=checkpoint)
    run.connect()
    torch.manual_seed(0)
    width, layers = size
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    handle, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    if stepped:
        run.backward(handle(torch.randn(2, width)).square().mean())
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
    return (RAW | RAW_DIVIDED | {RAW_ASYNC: RawAsyncDCP}).get(way, Way)(run, handle, optimizer)


def resident(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1000


def local_megabytes(tensors: list[Any]) -> float:
    parts = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(part.numel() * part.element_size() for part in parts) / 1e6


def measured(rank: int, ranks: int, way: str, what: str, size: tuple[int, int], path: Path) -> tuple[float, ...]:
    """Save or load once; return wall seconds, CPU seconds and MB above the state."""
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    it = built(way, ranks, size, stepped=what != "load")
    it.run.collectives.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    (it.load if what == "load" else it.save)(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resident("VmHWM") - before
    if what == "load":  # the state of the optimizer is new
        peak -= 2 * local_megabytes(list(it.model.parameters()))
    it.run.saver.wait()
    if isinstance(it, RawAsyncDCP):
        it.saving.result()
    it.run.collectives.barrier()
    return wall, cpu, peak


def clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    for each in (path, path.with_name(f"{path.name}.sum")):
        each.unlink(missing_ok=True)


def table(ranks: int, rounds: int, size: tuple[int, int], folder: Path) -> None:
    saves = [(way, what) for way in ways(ranks) for what in ("save", "load")]
    stalls = [(RAW_ASYNC, "stall"), *((f"stratagem {name}, async", "stall") for name in OURS)]
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {(what, way): [] for way, what in [*saves, *stalls]}
    order = random.Random(0)
    for _ in range(rounds):
        shuffled = [*ways(ranks), *(way for way, _ in stalls)]
        order.shuffle(shuffled)
        for way in shuffled:
            path = folder / way.replace(" ", "_").replace(",", "")
            for what in ("stall",) if way.endswith("async") else ("save", "load"):
                try:
                    results = run_in_processes(measured, ranks, way, what, size, path, limit_s=300)
                except AssertionError as error:
                    if "async_save" not in str(error):
                        raise
                    continue  # this format has no such option
                rows[what, way].append(tuple(max(values) for values in zip(*results, strict=True)))
            clear(path)
            os.sync()
    print("| | s, min | median | max | CPU s, median | peak MB above the state |\n|---|---|---|---|---|---|")
    for (what, way), values in sorted(rows.items(), key=lambda row: ("save", "load", "stall").index(row[0][0])):
        if values:
            wall, cpu, peak = zip(*values, strict=True)
            middle = [f"{number:.2f}" for number in (min(wall), statistics.median(wall), max(wall))]
            print(f"| {what}: {way} | {' | '.join(middle)} | {statistics.median(cpu):.2f} | {max(peak):.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("benchmark_checkpoints"))
    parser.add_argument("--quick", action="store_true", help="one tenth of the parameters, two rounds")
    arguments = parser.parse_args()
    size = QUICK_SIZE if arguments.quick else FULL_SIZE
    rounds = min(arguments.rounds, 2) if arguments.quick else arguments.rounds
    folder = arguments.dir / "benchmark_checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    parameters = size[1] * (size[0] * size[0] + size[0])
    print(
        f"{parameters / 1e6:.0f} million parameters, {parameters * 12 / 1e6:.0f} MB with AdamW, "
        f"{arguments.ranks} rank(s), {rounds} rounds, torch {torch.__version__}\n"
    )
    try:
        table(arguments.ranks, rounds, size, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
