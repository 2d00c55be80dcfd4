"""What `compile` gains on a CPU: an MLP of small operations and the GPT of `stratagem demo`, in one process and in two.

    python benchmarks/compile.py [--rounds 8] [--steps 15] [--compile true max-autotune] [--models mlp gpt]

Rounds of a compiled and of a plain trainer alternate within the same processes, so that other load on the machine
changes both. Reported are medians over the steps of all rounds on rank 0, without the first three: the CPU time of a
plain step, what a compiled one takes of it, in CPU time and in wall time; then the CPU time that all ranks take to
compile (the C++ compiler included) with an empty cache of inductor's and with a full one, and after how many steps the
saved CPU time exceeds that of an empty cache. Every process computes on one thread.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes

try:
    from stratagem_demo import gpt
except ImportError:  # the package of the demo
    raise SystemExit("pip install stratagem-tools") from None

VOCABULARY = "".join(map(chr, range(32, 128)))
STRATEGIES = {"one process": ("single_device", 1), "ddp, 2 processes": ("ddp", 2), "fsdp, 2 processes": ("fsdp", 2)}
WARM_UP = 3  # steps


class Gate(nn.Module):
    """A residual layer with one matrix product and ten operations on single elements."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        return x + torch.tanh(y) * torch.sigmoid(y) + 0.1 * nn.functional.gelu(y) - 0.01 * y.square()


class MLP(sg.Module):
    """Six layers of small operations, which inductor fuses into few loops."""

    def __init__(self, steps: int, width: int = 32) -> None:
        super().__init__()
        self.steps, self.net = steps, nn.Sequential(*(Gate(width) for _ in range(6)), nn.Linear(width, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_fit_start(self) -> None:
        self.trainer.max_steps = self.global_step + self.steps


def mlp(steps: int) -> tuple[sg.Module, list[Any]]:
    """Return the MLP, and batches of 4096 rows."""
    return MLP(steps), [(torch.randn(4096, 32), torch.randn(4096, 1)) for _ in range(steps)]


def small_gpt(steps: int) -> tuple[sg.Module, list[Any]]:
    """Return the GPT of the demo, and batches of 4 texts."""
    text = torch.randint(len(VOCABULARY), (4, gpt.CONTEXT))
    return gpt.CharGPT(VOCABULARY, steps=steps), [(text, text)] * steps


MODELS = {"mlp": mlp, "gpt": small_gpt}
#: The units of a model under fsdp, each of which is compiled.
UNITS = {"mlp": Gate, "gpt": gpt.Block}


class Clock(sg.Callback):
    """Notes the wall time and the CPU time of each step."""

    def __init__(self) -> None:
        self.start, self.steps = (0.0, 0.0), []

    @sg.hookimpl
    def on_train_batch_start(self) -> None:
        self.start = now()

    @sg.hookimpl
    def on_train_batch_end(self) -> None:
        wall, cpu = now()
        self.steps.append((wall - self.start[0], cpu - self.start[1]))


def now() -> tuple[float, float]:
    """Return the wall time, and the CPU time of this process and of the compilers it ran, in seconds."""
    compilers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + compilers.ru_utime + compilers.ru_stime


def _measure(rank, world_size, model, strategy, wanted, rounds, steps, cache):
    """Return the steps of the plain and of the compiled trainer, each (wall, CPU) in seconds."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose children's time is counted
    chosen = {"name": "fsdp", "auto_wrap_policy": {UNITS[model]}} if strategy == "fsdp" else strategy
    clocks = Clock(), Clock()
    fits = []
    for clock, compiled in zip(clocks, (False, wanted), strict=True):
        torch.manual_seed(0)
        module, batches = MODELS[model](steps)
        trainer = sg.Trainer(
            strategy=chosen, devices=world_size, accelerator="cpu", max_epochs=-1, barebones=True, compile=compiled,
            callbacks=[clock],
        )  # fmt: skip
        fits.append((trainer, module, batches))
    for _ in range(rounds):
        for trainer, module, batches in fits:
            trainer.fit(module, batches)
    return [clock.steps for clock in clocks]


def _row(model: str, title: str, wanted: Any, rounds: int, steps: int) -> str:
    strategy, world_size = STRATEGIES[title]
    with tempfile.TemporaryDirectory() as cache:
        arguments = (model, strategy, wanted, rounds, steps, cache)
        ranks = run_in_processes(_measure, world_size, *arguments, limit_s=600)
        again = run_in_processes(_measure, world_size, model, strategy, wanted, 1, WARM_UP, cache, limit_s=600)
    plain, compiled = ranks[0]
    assert len(plain) == len(compiled) == rounds * steps
    (wall, cpu), (fast_wall, fast_cpu) = (
        [statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True)] for rows in (plain, compiled)
    )
    empty, full = (sum(rows[0][1] - fast_cpu for _, rows in each) for each in (ranks, again))
    pays = f"{empty / world_size / (cpu - fast_cpu):.0f} steps" if fast_cpu < 0.98 * cpu else "never"
    return (
        f"| {model} | {title} | {wanted} | {1e3 * cpu:.1f} | {fast_cpu / cpu:.2f} | {fast_wall / wall:.2f} "
        f"| {empty:.1f} | {full:.1f} | {pays} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15, help="steps of a round")
    parser.add_argument("--compile", nargs="+", default=["true"], help="true, or modes of inductor's")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    print(
        "| model | strategy | compile | ms a step | CPU time | wall time | compiling, s | full cache, s | pays after |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model in options.models:
        for title in STRATEGIES:
            for mode in options.compile:
                print(_row(model, title, True if mode == "true" else mode, options.rounds, options.steps), flush=True)


if __name__ == "__main__":
    main()
