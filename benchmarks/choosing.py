"""Step time, memory and bytes sent of each strategy for a small and a medium transformer, on CPUs over gloo.

    OMP_NUM_THREADS=1 python benchmarks/choosing.py [--quick]

Each row is a run in new processes: one for `single_device`, otherwise two. A process has batches of 2 sequences, so two
processes train with twice as many samples a step. Time is that of the fastest step after the first two, from the start
of one `training_step` to the next; CPU time is the median over these steps, of all threads of a rank. Memory is the
peak of a rank (VmHWM) above its value before the model is built, when torch and stratagem are imported. Bytes are what
a rank writes to sockets and files in a step (``wchar`` of /proc/self/io); nothing is written to files meanwhile.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import statistics
import sys
import time
from pathlib import Path

import torch

import stratagem as sg
from memory import resident
from stratagem_testing import run_in_processes

LENGTH, BATCH, VOCABULARY, WARM_UP = 64, 2, 512, 2
#: Width and number of layers.
MODELS = {"small": (128, 2), "medium": (384, 4)}
STRATEGIES = ["single_device", "ddp", "ddp_sharded", "fsdp"]
#: DeepSpeed's default buckets have 500 M elements.
BUCKETS = {"allgather_bucket_size": 5_000_000, "reduce_bucket_size": 5_000_000}
DEEPSPEED = ["deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]


class Transformer(sg.Module):
    """Predict the next of 512 tokens; keep the time and the bytes written at the start of each step."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, VOCABULARY)
        self.starts: list[tuple[float, float, int]] = []

    def training_step(self, batch, batch_idx):
        self.starts.append((time.perf_counter(), time.process_time(), bytes_written()))
        x = self.tokens(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bytes_written() -> int:
    return int(re.findall(r"wchar: (\d+)", Path("/proc/self/io").read_text())[0])


def options(strategy: str) -> dict:
    """Return the strategy with the options that it needs for models of this size."""
    if strategy == "fsdp":
        return {"name": "fsdp", "auto_wrap_policy": [torch.nn.TransformerEncoderLayer]}
    if strategy.startswith("deepspeed"):
        zero = {"stage": int(strategy[-1]), **BUCKETS}
        return {"name": "deepspeed", "config": {"zero_optimization": zero, "zero_allow_untested_optimizer": True}}
    return {"name": strategy}


def train(rank, world_size, strategy, model, steps):
    """Return the milliseconds of a step, wall and CPU, the peak of the memory and the bytes of a step, both in MB."""
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the parent
    before = resident("VmRSS")
    module = Transformer(*MODELS[model])
    batches = [torch.randint(VOCABULARY, (BATCH, LENGTH + 1)) for _ in range(steps + WARM_UP + 1)]
    trainer = sg.Trainer(
        strategy=options(strategy), max_epochs=1, devices=world_size, accelerator="cpu", barebones=True
    )
    trainer.fit(module, batches)
    peak = resident("VmHWM") - before
    starts = module.starts[WARM_UP:]
    trainer.close()
    times = [1e3 * (after[0] - start[0]) for start, after in itertools.pairwise(starts)]
    cpu = [1e3 * (after[1] - start[1]) for start, after in itertools.pairwise(starts)]
    sent = (starts[-1][2] - starts[0][2]) / len(times) / 1e6
    return min(times), statistics.median(cpu), peak, sent


def main(quick: bool) -> None:
    strategies = STRATEGIES + (DEEPSPEED if importlib.util.find_spec("deepspeed") and not quick else [])
    for model in ["small"] if quick else MODELS:
        size = sum(parameter.numel() for parameter in Transformer(*MODELS[model]).parameters())
        print(f"\n{model}: {size / 1e6:.1f} M parameters, {4 * size / 1e6:.1f} MB of gradients\n")
        print(f"| strategy | processes | ms a step | CPU ms of a rank | peak, MB | sent a step, MB |\n{'|---' * 6}|")
        steps = 5 if quick else {"small": 40, "medium": 8}[model]
        for strategy in strategies:
            processes = 1 if strategy == "single_device" else 2
            results = run_in_processes(train, processes, strategy, model, steps, limit_s=300)
            ms, cpu, peak, sent = (max(values) for values in zip(*results, strict=True))
            print(f"| `{strategy}` | {processes} | {ms:.0f} | {cpu:.0f} | {peak:.0f} | {sent:.1f} |", flush=True)


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
