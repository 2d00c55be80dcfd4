"""How costs grow: with callbacks, logged metrics, tensors, parameters and plugins that a run has.

    python benchmarks/scale.py [--quick]

Each row is the CPU time of stratagem alone: what a fit takes beyond the same loop in plain PyTorch. "For each" divides
what is above the first row by what was added; a cost that grows with the work stays about the same there, or falls. A
difference below 5 % of the loop itself, or a fifth of the start, tells nothing and is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import stratagem as sg
from overhead import Batches


class Idle(sg.Callback):
    """Listens to each batch and does nothing."""

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        pass


class Model(sg.Module):
    """`tensors` parameters of `size` numbers each, and a step that uses one of them and logs `metrics` numbers."""

    def __init__(self, tensors: int = 1, size: int = 1, metrics: int = 0) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(size) for _ in range(tensors))
        self.names = [f"metric_{index}" for index in range(metrics)]

    def training_step(self, batch, batch_idx):
        for name in self.names:
            self.log(name, 1.0)
        return (self.parts[0] * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_start(self):
        self.started = time.process_time()

    def on_train_end(self):
        self.seconds = time.process_time() - self.started


def raw(model: Model, batches: Batches) -> tuple[float, float]:
    """Return the seconds of preparing and of training in plain PyTorch."""
    began = time.process_time()
    optimizer = model.configure_optimizers()
    ready = time.process_time()
    for batch in batches:
        loss = (model.parts[0] * batch[0]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ready - began, time.process_time() - ready


def ours(model: Model, batches: Batches, **options: Any) -> tuple[float, float]:
    """Return the seconds of all that is not training, and of training."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        began = time.process_time()
        trainer = sg.Trainer(
            max_epochs=1, strategy="single_device", accelerator="cpu", default_root_dir=folder,
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, logger=False, **options,
        )  # fmt: skip
        trainer.fit(model, batches)
        return time.process_time() - began - model.seconds, model.seconds


def measured(
    make: Callable[[], Model], steps: int, rounds: int, **options: Callable[[], Any]
) -> tuple[float, float, float]:
    """Return the medians of what preparing takes more (ms), what a step takes more, and the plain step (us)."""
    batches = Batches([(torch.ones(1), torch.ones(1)) for _ in range(steps)])
    starts, per_step, alone = [], [], []
    for number in range(rounds):
        gc.collect()
        variants: dict[str, Callable[[], tuple[float, float]]] = {
            "raw": lambda: raw(make(), batches),
            "ours": lambda: ours(make(), batches, **{name: value() for name, value in options.items()}),
        }
        took = {name: variants[name]() for name in sorted(variants, reverse=bool(number % 2))}
        (base_start, base), (start, seconds) = took["raw"], took["ours"]
        starts.append((start - base_start) * 1e3)
        per_step.append((seconds - base) / steps * 1e6)
        alone.append(base / steps * 1e6)
    return statistics.median(starts), statistics.median(per_step), statistics.median(alone)


def table(title: str, counts: list[int], measure: Callable[[int], tuple[float, float, float]]) -> None:
    """Print a row for each of `counts`."""
    names = [title, "start, ms", "for each, us", "a step, us", "for each, us", "the loop alone, us"]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    first: tuple[int, float, float] | None = None
    for count in counts:
        start, step, alone = measure(count)
        tells = abs(step) >= 0.05 * alone
        if first is None:
            first = (count, start, step)
            each = ["", ""]
        else:
            added = count - first[0]
            more, later = step - first[2], start - first[1]
            each = [
                f"{later * 1e3 / added:.3g}" if abs(later) >= 0.2 * first[1] else "",
                f"{more / added:.3g}" if tells and abs(more) >= 0.05 * alone else "",
            ]
        shown = f"{step:.1f}" if tells else "below 5 %"
        print(f"| {count:,} | {start:.1f} | {each[0]} | {shown} | {each[1]} | {alone:.0f} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    rounds = 3 if quick else 7
    measured(Model, 100, 1)  # imports what a fit needs

    table(
        "callbacks that listen to batches", [0, 10, 50],
        lambda count: measured(Model, 1000, rounds, callbacks=lambda: [Idle() for _ in range(count)]),
    )  # fmt: skip
    table(
        "metrics logged in each step", [0, 10, 100, 1000],
        lambda count: measured(lambda: Model(metrics=count), 1000 if count < 100 else 50, rounds),
    )  # fmt: skip
    table(
        "tensors", [10, 100, 1000, 5000],
        lambda count: measured(lambda: Model(tensors=count), 20 if count > 100 else 200, rounds),
    )  # fmt: skip
    millions = [1, 10, 100] if quick else [1, 10, 100, 300]
    table(
        "million parameters, in ten tensors", millions,
        lambda count: measured(
            lambda: Model(tensors=10, size=count * 100_000), max(1000 // count, 10), rounds
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()
