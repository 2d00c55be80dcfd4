"""Overhead per step above a plain loop around ``deepspeed.initialize``: CPU time, a model of 10 million parameters.

    python benchmarks/deepspeed_overhead.py [--steps 20] [--rounds 7] [--stages 1 2 3]

Two processes of one thread each on gloo; an MLP in fp32, AdamW, batch 32. The plain loop uses the engine of the
strategy, without clipping and logging. Variants alternate; a ratio compares times of the same round.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes

WIDTH = 1024
#: The first steps connect and trace the order of parameters.
_WARM_UP = 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(10)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batches(rank: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(32, WIDTH, generator=generator), torch.randn(32, 1, generator=generator)
    return [batch] * (steps + _WARM_UP)


class Model(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(sg.Callback):
    """CPU time of this process from the end of the warm-up to the last step."""

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        if batch_idx == _WARM_UP - 1:
            self.started = time.process_time()

    @sg.hookimpl
    def on_train_end(self):
        self.seconds = time.process_time() - self.started


def by_trainer(rank: int, world_size: int, stage: int, steps: int) -> float:
    clock = Clock()
    trainer = sg.Trainer(
        strategy=f"deepspeed_stage_{stage}", devices=world_size, accelerator="cpu", max_epochs=1, callbacks=[clock],
        logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Model(), batches(rank, steps))
    trainer.run.close()
    return clock.seconds


def by_hand(rank: int, world_size: int, stage: int, steps: int) -> float:
    """The engine of the strategy in a plain loop."""
    from stratagem_deepspeed.engine_config import engine_config

    run = sg.Run(strategy=f"deepspeed_stage_{stage}", devices=world_size, accelerator="cpu")
    run.connect()
    import deepspeed

    from stratagem_deepspeed import start

    start.join(run)
    model = network()
    config = engine_config(run.stack.strategy, run)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config
    )
    started = 0.0
    for index, batch in enumerate(batches(rank, steps)):
        if index == _WARM_UP:
            started = time.process_time()
        engine.backward(loss_of(engine, batch))
        engine.step()
    seconds = time.process_time() - started
    engine.destroy()
    run.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    size = sum(parameter.numel() for parameter in network().parameters())
    print(f"{size / 1e6:.1f} M parameters, 2 processes, torch {torch.__version__}, {platform.processor()}")
    print("| stage | plain loop, ms CPU per step | trainer, ms CPU per step | overhead, median | min | max |")
    print("|---|---|---|---|---|---|")
    for stage in arguments.stages:
        pairs = []
        for _ in range(arguments.rounds):
            hand = sum(run_in_processes(by_hand, 2, stage, arguments.steps, limit_s=300))
            ours = sum(run_in_processes(by_trainer, 2, stage, arguments.steps, limit_s=300))
            pairs.append((hand, ours))
        ratios = [100 * (ours / hand - 1) for hand, ours in pairs]
        hand_ms, ours_ms = (1e3 * statistics.median(each) / arguments.steps / 2 for each in zip(*pairs, strict=True))
        middle = statistics.median(ratios)
        spread = f"{min(ratios):+.1f} % | {max(ratios):+.1f} %"
        print(f"| {stage} | {hand_ms:.0f} | {ours_ms:.0f} | {middle:+.1f} % | {spread} |")


if __name__ == "__main__":
    main()
