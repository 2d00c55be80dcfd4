"""Peak memory of a rank under DDP and FSDP, and of one process: a transformer with AdamW in fp32, CPU processes.

    MALLOC_MMAP_THRESHOLD_=1048576 python benchmarks/memory.py

The variable sets for every strategy the allocator option that FSDP sets itself. Reported is the peak of resident memory
above the memory of the process before the model was built; and the median time of a step after the first one.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem_testing import run_in_processes

WIDTH, DEPTH, HEADS, VOCABULARY, LENGTH, BATCH, STEPS = 768, 12, 12, 8192, 128, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        heads = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(sg.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.times = None, []

    def configure_model(self):
        if self.tokens is None:
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def training_step(self, batch, batch_idx):
        self.times.append(time.perf_counter())
        x = batch[:, :-1]
        hidden = self.blocks(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


IN_UNITS = {"name": "fsdp", "auto_wrap_policy": {Block}}
IN_BACKWARD = {"callbacks": "optimizer_in_backward"}
CASES = {
    "ddp": {"strategy": "ddp"},
    "fsdp NO_SHARD": {"strategy": IN_UNITS | {"sharding_strategy": "NO_SHARD"}},
    "fsdp SHARD_GRAD_OP": {"strategy": IN_UNITS | {"sharding_strategy": "SHARD_GRAD_OP"}},
    "fsdp FULL_SHARD": {"strategy": IN_UNITS},
    "fsdp FULL_SHARD, activation checkpointing": {"strategy": IN_UNITS, "activation_checkpointing": {Block}},
    "fsdp FULL_SHARD, bf16-mixed": {"strategy": IN_UNITS, "precision": "bf16-mixed"},
    "fsdp FULL_SHARD, optimizer_in_backward": {"strategy": IN_UNITS} | IN_BACKWARD,
    "one process": {"strategy": "single_device"},
    "one process, optimizer_in_backward": {"strategy": "single_device"} | IN_BACKWARD,
}


def resident(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) // 1024


def peak(rank, world_size, arguments):
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the parent
    before = resident("VmRSS")
    trainer = sg.Trainer(max_epochs=1, devices=world_size, accelerator="cpu", barebones=True, **arguments)
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(STEPS)]
    began, module = time.perf_counter(), GPT()
    trainer.fit(module, batches)
    ended = time.perf_counter()
    steps = [after - start for start, after in itertools.pairwise(module.times[1:])]
    return resident("VmHWM") - before, ended - began, statistics.median(steps)


if __name__ == "__main__":
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        raise SystemExit("set MALLOC_MMAP_THRESHOLD_=1048576, see the top of this file")
    model = GPT()
    model.configure_model()
    size = sum(parameter.numel() for parameter in model.parameters())
    del model
    print(f"{size / 1e6:.0f} million parameters, two processes, {STEPS} steps of {BATCH} x {LENGTH} tokens each\n")
    print("| strategy | peak of a rank above the start, MB | of ddp | seconds | a step |\n|---|---|---|---|---|")
    ddp = 0.0
    for name, arguments in CASES.items():
        ranks = run_in_processes(peak, 1 if arguments["strategy"] == "single_device" else 2, arguments, limit_s=300)
        most, seconds, step = (max(numbers) for numbers in zip(*ranks, strict=True))
        ddp = ddp or most
        print(f"| {name} | {most} | {most / ddp:.2f} | {seconds:.1f} | {step:.2f} |", flush=True)
