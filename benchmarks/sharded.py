"""Time and peak memory of sharded training compared with the same engine in a plain loop: two gloo ranks on CPUs.

    python benchmarks/sharded.py [--quick] [--strategies fsdp ...] [--sizes small medium large] [--rounds 1]

The model is a transformer in fp32 with AdamW and 4 x 32 tokens per rank and step. The engines are plain PyTorch, DDP,
DDP with ZeroRedundancyOptimizer, FSDP2 with a unit for each block, and `deepspeed.initialize` with the strategy's
configuration. The engine alone and stratagem alternate, each in new processes of one thread. Reported are the minimum
and the median of the wall time of a step, its median CPU time (all threads), and the peak of resident memory above the
memory after imports. The ratio is that of the CPU times; the last column tells whether the losses have the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import define, field
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

import stratagem as sg
from stratagem_testing import run_in_processes

#: Width, number of blocks, vocabulary, measured steps.
SIZES = {"small": (64, 2, 64, 40), "medium": (256, 12, 1024, 8), "large": (512, 12, 4096, 4)}
HEADS, LENGTH, BATCH = 8, 32, 4
#: The first steps connect, make the optimizer's state and trace the order of parameters.
WARM_UP = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x.shape[0], x.shape[1], HEADS, x.shape[2] // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Network(nn.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, depth, vocabulary, _ = SIZES[size]
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.tokens(batch[:, :-1]))).flatten(0, 1), batch[:, 1:].flatten())


class Model(sg.Module):
    def __init__(self, size: str) -> None:
        super().__init__()
        self.net = Network(size)
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@define
class Clock(sg.Callback):
    """The times at which steps end, after those of the warm-up."""

    wall: list[float] = field(factory=list)
    cpu: list[float] = field(factory=list)

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        if batch_idx >= WARM_UP - 1:
            self.wall.append(time.perf_counter())
            self.cpu.append(time.process_time())


@define
class Result:
    wall: list[float]
    cpu: list[float]
    peak: float
    losses: list[float]


def batches(size: str, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    _, _, vocabulary, steps = SIZES[size]
    return [torch.randint(vocabulary, (BATCH, LENGTH + 1), generator=generator) for _ in range(steps + WARM_UP)]


def resident(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def measured(rank: int, world_size: int, loop: Callable[..., list[float]], strategy: str, size: str) -> Result:
    logging.disable(logging.WARNING)
    data = batches(size, rank)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the parent
    before, clock = resident("VmRSS"), Clock()
    losses = loop(clock, strategy, size, world_size, data)
    wall, cpu = ([b - a for a, b in itertools.pairwise(times)] for times in (clock.wall, clock.cpu))
    return Result(wall, cpu, (resident("VmHWM") - before) / 1024, losses)


def by_trainer(clock: Clock, strategy: str, size: str, world_size: int, data) -> list[float]:
    chosen = {"name": "fsdp", "auto_wrap_policy": {Block}} if strategy == "fsdp" else strategy
    trainer = sg.Trainer(
        strategy={"single": "single_device"}.get(strategy, chosen), devices=world_size, accelerator="cpu", max_epochs=1,
        callbacks=[clock], logger=False, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    model = Model(size)
    trainer.fit(model, data)
    trainer.close()
    return model.losses


def by_hand(clock: Clock, strategy: str, size: str, world_size: int, data) -> list[float]:
    if strategy.startswith("deepspeed"):
        return by_deepspeed(clock, strategy, size, world_size, data)
    if strategy != "single":
        dist.init_process_group("gloo")
    model: nn.Module = Network(size)
    if strategy.startswith("ddp"):
        model = DistributedDataParallel(model)
    if strategy == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if strategy == "ddp_sharded":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for index, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        clock.on_train_batch_end(index)
    return losses


def by_deepspeed(clock: Clock, strategy: str, size: str, world_size: int, data) -> list[float]:
    from stratagem_deepspeed.engine_config import engine_config

    run = sg.Run(strategy=strategy, devices=world_size, accelerator="cpu")
    run.connect()
    import deepspeed

    from stratagem_deepspeed import start

    start.join(run)
    model, losses = Network(size), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = engine_config(run.stack.strategy, run)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for index, batch in enumerate(data):
        loss = engine(batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        clock.on_train_batch_end(index)
    engine.destroy()
    run.close()
    return losses


def compare(strategy: str, size: str, rounds: int) -> None:
    world_size = 1 if strategy == "single" else 2
    found: dict[str, list[Result]] = {"engine": [], "stratagem": []}
    for _ in range(rounds):
        for name, loop in (("engine", by_hand), ("stratagem", by_trainer)):
            found[name] += run_in_processes(measured, world_size, loop, strategy, size, limit_s=150)
    same = all(a.losses == b.losses for a, b in zip(*found.values(), strict=True))
    base = 0.0
    for name, results in found.items():
        wall, cpu = ([1e3 * each for r in results for each in getattr(r, kind)] for kind in ("wall", "cpu"))
        middle, peak = statistics.median(cpu), statistics.median(r.peak for r in results)
        base = base or middle
        last = f"{middle / base:.3f} | {'yes' if same else 'no'}" if name == "stratagem" else "1 |"
        times = f"{min(wall):.1f} | {statistics.median(wall):.1f} | {middle:.1f} ({min(cpu):.1f}-{max(cpu):.1f})"
        print(f"| {strategy} {size}, {name} | {times} | {peak:.0f} | {last} |", flush=True)


def main() -> None:
    strategies = ["single", "ddp", "ddp_sharded", "fsdp", *(f"deepspeed_stage_{stage}" for stage in (1, 2, 3))]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the small model, and fsdp with the medium one")
    parser.add_argument("--strategies", nargs="+", default=strategies, choices=strategies)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    # The processes fork from this one: imports are not measured. DeepSpeed logs to what is the standard output then.
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
        if not arguments.quick and any(each.startswith("deepspeed") for each in arguments.strategies):
            import deepspeed  # noqa: F401
    print("| | ms a step, minimum | median | CPU ms, median (range) | peak, MB | CPU ratio | same losses |")
    print("|---|---|---|---|---|---|---|")
    for strategy in arguments.strategies:
        for size in arguments.sizes:
            quick = (strategy, size) == ("fsdp", "medium") or (size == "small" and not strategy.startswith("deepspeed"))
            if quick or not arguments.quick:
                compare(strategy, size, arguments.rounds)


if __name__ == "__main__":
    main()
