"""Overhead of callbacks: CPU time per step above a plain PyTorch loop, with one callback at a time.

    python benchmarks/callbacks.py [--steps 2000] [--rounds 5]

Model and method are those of overhead.py. Every variant logs the loss in each step, with progress bar, CSV logger and
checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import stratagem as sg
from overhead import Batches, Tiny, raw

VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    **{
        name: {"callbacks": [name]}
        for name in (
            "preemption", "timer", "report", "learning_rate_monitor", "device_stats", "throughput", "gradient_norms",
            "spike_detection", "ema",
        )
    },
    "logger tensorboard": {"logger": "tensorboard"},
    "accumulate_grad_batches=4": {"accumulate_grad_batches": 4},
    "profiler simple": {"profiler": {"name": "simple", "write": False}},
}  # fmt: skip


def variant(arguments: dict[str, Any]) -> Callable[[Batches], float]:
    def run(batches: Batches) -> float:
        model = Tiny(log=True)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = sg.Trainer(
                max_epochs=1, strategy="single_device", accelerator="cpu", default_root_dir=folder, **arguments
            )
            trainer.fit(model, batches)
        return model.seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = Batches([(torch.randn(8, 32), torch.randn(8, 1)) for _ in range(arguments.steps)])
    over: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        base = raw(batches)
        for name, options in VARIANTS.items():
            over[name].append((variant(options)(batches) - base) / arguments.steps * 1e6)
    print(f"torch {torch.__version__}, {arguments.steps} steps, {arguments.rounds} rounds; CPU microseconds per step\n")
    print("| | above plain PyTorch, median | min | max |\n|---|---|---|---|")
    for name, values in over.items():
        print(f"| {name} | {statistics.median(values):+.0f} | {min(values):+.0f} | {max(values):+.0f} |")


if __name__ == "__main__":
    main()
