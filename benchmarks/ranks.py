"""How costs grow with the number of ranks: `ddp` and plain DDP on gloo, a small MLP, up to 16 processes.

    python benchmarks/ranks.py [--quick] [--ranks 1 2 4 8 16]

Processes of one thread are forked after the imports, plain DDP and stratagem in turns. "Start" is the CPU time of a
rank from then to its first step, connecting included; a step's is the median over steps and ranks. With more ranks than
cores the processes wait for each other, which takes wall time, but hardly CPU time.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
from typing import Any

import torch
import torch._dynamo  # DDP imports it when it is made
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stratagem as sg
from stratagem_testing import run_in_processes

WARM_UP = 5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


class Model(sg.Module):
    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self.net, self.times = network(), times

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.process_time())


def by_trainer(world_size: int, batches: list[Any], times: list[float]) -> None:
    trainer = sg.Trainer(strategy="ddp", devices=world_size, accelerator="cpu", max_epochs=1, barebones=True)
    trainer.fit(Model(times), batches)
    trainer.close()


def by_hand(world_size: int, batches: list[Any], times: list[float]) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time())
    dist.barrier()
    del model, optimizer  # freed after its group, DDP was seen to wait forever
    dist.destroy_process_group()


def measured(rank: int, world_size: int, loop: Any, steps: int) -> tuple[float, float]:
    """Return the CPU seconds to the end of the first step, and the median of those of a later one."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    batches = [(torch.randn(16, 64), torch.randn(16, 1)) for _ in range(steps + WARM_UP)]
    began, times = time.process_time(), list[float]()
    loop(world_size, batches, times)
    return times[0] - began, statistics.median(b - a for a, b in itertools.pairwise(times[WARM_UP - 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round of 1, 2 and 4 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    options = parser.parse_args()
    counts, rounds = (options.ranks[:3], 1) if options.quick else (options.ranks, 3)
    print("| ranks | start, ms: plain DDP | stratagem | a step, us: plain DDP | stratagem | ratio of steps |")
    print("|---|---|---|---|---|---|")
    for count in counts:
        found: dict[Any, list[tuple[float, float]]] = {by_hand: [], by_trainer: []}
        for _ in range(rounds):
            for loop, results in found.items():
                results += run_in_processes(measured, count, loop, 100, limit_s=150)
        (raw_start, raw), (start, ours) = (
            [statistics.median(column) for column in zip(*each, strict=True)] for each in found.values()
        )
        starts, steps = f"{1e3 * raw_start:.0f} | {1e3 * start:.0f}", f"{1e6 * raw:.0f} | {1e6 * ours:.0f}"
        print(f"| {count} | {starts} | {steps} | {ours / raw:.3f} |", flush=True)


if __name__ == "__main__":
    main()
