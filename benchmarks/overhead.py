"""Overhead per training step above a plain PyTorch loop: CPU time, compared with other installed trainers.

    python benchmarks/overhead.py [--steps 2000] [--rounds 9]

A tiny MLP (32-32-1), batch 8, SGD, one thread, so that the step itself is cheap. The variants alternate; the overhead
is the difference to the raw loop of the same round. Trainers that are not installed are left out (pip install
lightning accelerate).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import stratagem as sg


class Batches:
    """Precomputed batches, so that no loader is measured. Not a list, which some trainers take for several loaders."""

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter(self.batches)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def raw(batches: Batches) -> float:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = time.process_time()
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


class Tiny(sg.Module):
    def __init__(self, log: bool = False) -> None:
        super().__init__()
        self.net, self.log_it = network(), log

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.log_it:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_start(self):
        self.started = time.process_time()

    def on_train_end(self):
        self.seconds = time.process_time() - self.started


def stratagem_bare(batches: Batches) -> float:
    model = Tiny()
    sg.Trainer(max_epochs=1, barebones=True, strategy="single_device", accelerator="cpu").fit(model, batches)
    return model.seconds


def stratagem_defaults(batches: Batches) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model = Tiny()
        trainer = sg.Trainer(max_epochs=1, strategy="single_device", accelerator="cpu", default_root_dir=folder)
        trainer.fit(model, batches)
    return model.seconds


def stratagem_logging(batches: Batches) -> float:
    with tempfile.TemporaryDirectory() as folder:
        model = Tiny(log=True)
        trainer = sg.Trainer(max_epochs=1, strategy="single_device", accelerator="cpu", default_root_dir=folder)
        trainer.fit(model, batches)
    return model.seconds


def fabric(batches: Batches) -> float:
    from lightning.fabric import Fabric

    tool = Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = tool.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    start = time.process_time()
    for x, y in batches:
        tool.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


def accelerate(batches: Batches) -> float:
    from accelerate import Accelerator

    tool = Accelerator(cpu=True)
    model = network()
    model, optimizer = tool.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    start = time.process_time()
    for x, y in batches:
        tool.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return time.process_time() - start


def _lightning(batches: Batches, log: bool = False, **arguments) -> float:
    import lightning

    class Peer(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if log:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_train_start(self):
            self.started = time.process_time()

        def on_train_end(self):
            self.seconds = time.process_time() - self.started

    model = Peer()
    lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **arguments).fit(model, batches)
    return model.seconds


def lightning_bare(batches: Batches) -> float:
    return _lightning(batches, barebones=True)


def lightning_defaults(batches: Batches) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _lightning(batches, default_root_dir=folder)


def lightning_logging(batches: Batches) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return _lightning(batches, log=True, default_root_dir=folder)


VARIANTS: dict[str, tuple[str, Callable[[Batches], float]]] = {
    "stratagem, everything off": ("stratagem", stratagem_bare),
    "stratagem, bar + CSV + checkpoints": ("stratagem", stratagem_defaults),
    "stratagem, the same + self.log": ("stratagem", stratagem_logging),
    "Fabric": ("lightning", fabric),
    "Accelerate": ("accelerate", accelerate),
    "Lightning, barebones": ("lightning", lightning_bare),
    "Lightning, defaults": ("lightning", lightning_defaults),
    "Lightning, defaults + self.log": ("lightning", lightning_logging),
}


def installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    generator = torch.Generator().manual_seed(0)
    batches = Batches(
        [
            (torch.randn(8, 32, generator=generator), torch.randn(8, 1, generator=generator))
            for _ in range(arguments.steps)
        ]
    )
    variants = {name: run for name, (package, run) in VARIANTS.items() if installed(package)}
    raws, overheads = [], {name: [] for name in variants}
    for round_number in range(arguments.rounds + 1):
        base = raw(batches)
        for name, run in variants.items():
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                seconds = run(batches)
            if round_number:  # the first round is a warm-up
                overheads[name].append((seconds - base) / arguments.steps * 1e6)
        if round_number:
            raws.append(base / arguments.steps * 1e6)
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").open() if "model name" in line), "")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cpu}, one thread")
    print(f"{arguments.steps} steps, {arguments.rounds} rounds; CPU microseconds per step\n")
    print("| | above the raw loop, median | min | max |\n|---|---|---|---|")
    print(f"| raw loop itself | {statistics.median(raws):.0f} | {min(raws):.0f} | {max(raws):.0f} |")
    for name, values in overheads.items():
        print(f"| {name} | {statistics.median(values):+.0f} | {min(values):+.0f} | {max(values):+.0f} |")


if __name__ == "__main__":
    main()
