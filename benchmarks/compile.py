"""What `compile` gains on a CPU: the GPT of `stratagem demo`, in one process and in two.

    python benchmarks/compile.py [--steps 20]

Reported are the milliseconds of a step, the median after the first five, and the seconds from the call of fit until the
first step is done, with an empty cache of inductor's and with a full one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch

import stratagem as sg
from stratagem_testing import run_in_processes

try:
    from stratagem_demo import gpt
except ImportError:  # the package of the demo
    raise SystemExit("pip install stratagem-demo") from None

BATCH, VOCABULARY = 16, "".join(map(chr, range(32, 128)))
BLOCKS = {"name": "fsdp", "auto_wrap_policy": {gpt.Block}}
STRATEGIES = [("one process", "single_device", 1), ("ddp, 2 processes", "ddp", 2), ("fsdp, 2 processes", BLOCKS, 2)]
CASES = {
    "not compiled": False,
    "steps": True,
    "blocks": {"per_block": True},
    "blocks, aot_eager": {"per_block": True, "backend": "aot_eager"},
}


class Clock(sg.Callback):
    """Remembers when each step was done."""

    def __init__(self):
        self.times = [time.perf_counter()]

    @sg.hookimpl
    def on_train_batch_end(self):
        self.times.append(time.perf_counter())


def _measure(rank, world_size, strategy, wanted, steps, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch.manual_seed(0)
    batches = [(torch.randint(len(VOCABULARY), (BATCH, gpt.CONTEXT)),) * 2 for _ in range(steps)]
    clock = Clock()
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, accelerator="cpu", max_epochs=1, barebones=True, compile=wanted,
        callbacks=[clock],
    )  # fmt: skip
    trainer.fit(gpt.CharGPT(VOCABULARY, steps=steps), batches)
    steps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return steps[0], statistics.median(steps[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    print("| strategy | compile | ms a step | start-up, s | with a full cache, s |\n|---|---|---|---|---|")
    for name, strategy, world_size in STRATEGIES:
        for title, wanted in CASES.items():
            if wanted is True and "fsdp" in name:
                continue  # it compiles units
            with tempfile.TemporaryDirectory() as cache:
                runs = [run_in_processes(_measure, world_size, strategy, wanted, steps, cache, limit_s=900)[0]
                        for _ in range(2)]  # fmt: skip
            print(f"| {name} | {title} | {1e3 * runs[1][1]:.0f} | {runs[0][0]:.1f} | {runs[1][0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
