"""What the loop itself costs: CPU time per batch where model, backward and optimizer compute nothing.

    python benchmarks/loop.py [--quick]

A step that computes nothing leaves only what stratagem adds, so that fractions of a microsecond can be seen; in a real
step, whose tensors displace the loop's code and data from the processor's caches, the same calls take longer (see
overhead.py). Where an option computes something (clipping, autocast), the same by hand is subtracted. A fit of few
batches is subtracted from one of many, so that start and end are not counted.
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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import stratagem as sg
from overhead import Batches

FEW = 200


class Idle(torch.optim.SGD):
    """Steps nothing."""

    def step(self, closure: Any = None) -> None: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class Model(sg.Module):
    """Returns the same loss in each step."""

    def __init__(self, log: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.weight.grad = torch.ones(1)
        self.__dict__["loss"] = self.weight.sum()
        self.log_it = log

    def training_step(self, batch, batch_idx):
        if self.log_it:
            self.log("loss", self.loss, prog_bar=True)
        return self.loss

    def validation_step(self, batch, batch_idx):
        if self.log_it:
            self.log("val_loss", self.loss)

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def backward(self, loss): ...

    def configure_optimizers(self):
        optimizer = Idle(self.parameters(), lr=1e-3)
        optimizer.step = lambda closure=None: None  # without the hooks that torch wraps around each step
        return optimizer

    def on_train_start(self):
        self.started = time.process_time()

    def on_train_end(self):
        self.seconds = time.process_time() - self.started

    on_validation_start = on_predict_start = on_train_start
    on_validation_end = on_predict_end = on_train_end


def stage(name: str = "fit", log: bool = False, **options: Any) -> Callable[[Batches], float]:
    """Return what measures a stage of a trainer with `options`."""

    def measure(batches: Batches) -> float:
        model = Model(log)
        with tempfile.TemporaryDirectory() as folder:
            given = options if options.get("barebones") else {"default_root_dir": folder} | options
            trainer = sg.Trainer(max_epochs=1, strategy="single_device", accelerator="cpu", **given)
            getattr(trainer, name)(model, batches)
        return model.seconds

    return measure


@contextlib.contextmanager
def idle_backward() -> Iterator[None]:
    """Within, differentiating a loss computes nothing."""
    backward = torch.Tensor.backward
    torch.Tensor.backward = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def own_loop(batches: Batches) -> float:
    with sg.Run(strategy="single_device", accelerator="cpu") as run, idle_backward():
        model = Model()
        loss = model.loss
        _, optimizer = run.setup(model, model.configure_optimizers())
        began = time.process_time()
        for _ in batches:
            run.backward(loss)
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        return time.process_time() - began


def own_loop_by_hand(batches: Batches) -> float:
    with idle_backward():
        model = Model()
        loss, optimizer = model.loss, model.configure_optimizers()
        began = time.process_time()
        for _ in batches:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - began


def clipped(batches: Batches) -> float:
    parameters = list(Model().parameters())
    began = time.process_time()
    for _ in batches:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    return time.process_time() - began


def autocast(batches: Batches) -> float:
    began = time.process_time()
    for _ in batches:
        with torch.autocast("cpu", torch.bfloat16):
            pass
    return time.process_time() - began


QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "enable_model_summary": False}

#: What is measured, and what computes the same by hand, if it computes anything.
VARIANTS: dict[str, tuple[Callable[[Batches], float], Callable[[Batches], float] | None]] = {
    "own loop with Run": (own_loop, own_loop_by_hand),
    "Trainer, barebones": (stage(barebones=True), None),
    "Trainer, bar + CSV + checkpoints": (stage(), None),
    "the same, a metric logged": (stage(log=True), None),
    "accumulate_grad_batches=4": (stage(**QUIET, accumulate_grad_batches=4), None),
    "gradient_clip_val=1.0": (stage(**QUIET, gradient_clip_val=1.0), clipped),
    "precision bf16-mixed": (stage(**QUIET, precision="bf16-mixed"), autocast),
    "CSV, a metric logged": (stage(log=True, **QUIET | {"logger": True}), None),
    "validate": (stage("validate", **QUIET), None),
    "validate, a metric logged": (stage("validate", log=True, **QUIET), None),
    "predict": (stage("predict", **QUIET), None),
    **{
        f"callback {name}": (stage(log=True, **QUIET | {"logger": True}, callbacks=[name]), None)
        for name in (
            "preemption", "timer", "report", "device_stats", "throughput", "gradient_norms", "spike_detection", "ema",
        )
    },
}  # fmt: skip


def microseconds(measure: Callable[[Batches], float], batches: int) -> float:
    """Return what a batch costs, without start and end of the stage."""
    few, many = (Batches([(torch.ones(1), torch.ones(1))] * count) for count in (FEW, FEW + batches))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        gc.collect()
        return (measure(many) - measure(few)) / batches * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, batches = (3, 1500) if quick else (9, 5000)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, (measure, by_hand) in VARIANTS.items():
            base = 0.0 if by_hand is None else microseconds(by_hand, batches)
            found[name].append(microseconds(measure, batches) - base)
    print(f"{batches} batches, {rounds} rounds; CPU microseconds per batch\n")
    print("| | median | min | max |\n|---|---|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")


if __name__ == "__main__":
    main()
