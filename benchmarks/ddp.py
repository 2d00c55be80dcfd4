"""Steps per second of two gloo ranks with a model of 9.9M parameters: plain DDP and stratagem, alternating.

python benchmarks/ddp.py [--steps 40] [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stratagem as sg


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = [512, 2048, 2048, 2048, 256]
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for pair in layers for part in pair][:-1])


class Model(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_start(self):
        torch.distributed.barrier()
        self.started = time.perf_counter()

    def on_train_end(self):
        torch.distributed.barrier()
        self.seconds = time.perf_counter() - self.started


def raw(batches) -> float:
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.distributed.barrier()
    start = time.perf_counter()
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.barrier()
    return time.perf_counter() - start


def ours(batches, **options) -> float:
    model = Model()
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=2, accelerator="cpu", barebones=True, **options)
    trainer.fit(model, batches)
    return model.seconds


def measure(steps: int, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    batches = [(torch.randn(32, 512), torch.randn(32, 256)) for _ in range(steps)]
    variants = {"raw DDP": raw, "stratagem": ours, "raw DDP again": raw}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, variant in variants.items():
            took = variant(batches)
            if round_number:  # the first round is a warm-up
                seconds[name].append(took)
    return {name: [steps / took for took in values] for name, values in seconds.items()}


class Measure:
    """The function of each process; a class, so that it can be pickled."""

    def __init__(self, steps: int, rounds: int) -> None:
        self.steps, self.rounds = steps, rounds

    def __call__(self, run: sg.Run):
        import os

        # The measured trainers use this process group.
        os.environ["LOCAL_RANK"] = str(run.world.local_rank)
        return measure(self.steps, self.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    run = sg.Run(strategy="ddp_fork", devices=2, accelerator="cpu")
    rates = run.launch(Measure(arguments.steps, arguments.rounds))
    parameters = sum(parameter.numel() for parameter in network().parameters())
    base = statistics.median(rates["raw DDP"])
    print(f"torch {torch.__version__}, {parameters / 1e6:.1f}M parameters, 2 gloo ranks, one thread each\n")
    print("| | steps/s, median | min | max | relative to raw DDP |\n|---|---|---|---|---|")
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"| {name} | {middle:.2f} | {min(values):.2f} | {max(values):.2f} | {middle / base:.3f} |")


if __name__ == "__main__":
    main()
