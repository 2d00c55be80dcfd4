"""What the evidence for a post-mortem costs: CPU microseconds of a record, of a phase, and of a step of two processes.

    python benchmarks/evidence.py [--rounds 8] [--steps 300]

A record is timed by calling the method that replaces ProcessGroup.allreduce around one that does nothing. A step trains
a tiny model with ddp over gloo, with the callback `peer_diagnosis` and without; the best of all rounds counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import stratagem as sg
from stratagem_evidence import Recorder
from stratagem_evidence import recorder as module

CALLS = 50_000


def best_us(call, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.process_time() - began) / CALLS * 1e6)
    return best


def records(rounds: int) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder.start(Path(folder), 0, ("setup", "backward"))
        assert recorder is not None
        method = module._recorded(lambda *_: None, "all_reduce", 0, True)
        tensors, group = [torch.ones(8)], dist.group.WORLD
        with_us = best_us(lambda: method(group, tensors), rounds)
        phase_us = best_us(lambda: recorder.enter(1), rounds)
        recorder.stop(keep=True)
        without_us = best_us(lambda: method(group, tensors), rounds)
    dist.destroy_process_group()
    print(f"record {with_us - without_us:.2f} us, phase {phase_us:.2f} us")


class Tiny(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(steps: int) -> None:
    marks = []

    class Clock(sg.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (50, steps - 1):
                marks.append(time.process_time())

    trainer = sg.Trainer(
        strategy="ddp", devices=2, accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[Clock()],
    )  # fmt: skip
    trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(8 * steps, 8), batch_size=2))
    if trainer.is_global_zero:
        print((marks[1] - marks[0]) / (steps - 51) * 1e6)


def steps(rounds: int, count: int) -> None:
    best = {"with": float("inf"), "without": float("inf")}
    for _ in range(rounds):
        for name in best:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            env |= {"STRATAGEM_DISABLE_PLUGINS": "peer_diagnosis"} if name == "without" else {}
            words = [sys.executable, __file__, "--train", str(count)]
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
            best[name] = min(best[name], float(done.stdout.split()[-1]))
    print(f"step of two processes: {best['with']:.0f} us of CPU with, {best['without']:.0f} us without")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--train", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
    else:
        records(arguments.rounds)
        steps(arguments.rounds // 2 or 1, arguments.steps)
