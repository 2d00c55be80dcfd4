"""Steps of torch's optimizers on a CPU: one tensor after another, with foreach=True and with fused=True.

    python benchmarks/optimizers.py [--quick]

"equal" says whether the weights after the steps are bit-equal to those of the first column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}), "Adam": (torch.optim.Adam, {}), "SGD": (torch.optim.SGD, {"momentum": 0.9}),
}  # fmt: skip
SIZES = ((200, 64), (50, 4096), (8, 1_000_000))
WAYS: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def steps(kind: Any, options: dict[str, Any], tensors: int, size: int, count: int) -> tuple[float, list[torch.Tensor]]:
    """Return the median CPU time of a step in milliseconds, and the weights after `count` steps."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=generator)) for _ in range(tensors)]
    for weight in weights:
        weight.grad = torch.randn(size, generator=generator)
    optimizer, seconds = kind(weights, lr=1e-2, **options), []
    for _ in range(count):
        began = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds) * 1e3, [weight.detach() for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    count = 10 if parser.parse_args().quick else 40
    torch.set_num_threads(1)
    print("CPU milliseconds of a step\n\n| | loop | foreach | fused | equal |\n|---|---|---|---|---|")
    for tensors, size in SIZES:
        for name, (kind, options) in OPTIMIZERS.items():
            found = {way: steps(kind, options | more, tensors, size, count) for way, more in WAYS.items()}
            loop = found["loop"][1]
            equal = [way for way in ("foreach", "fused") if all(map(torch.equal, loop, found[way][1]))]
            times = " | ".join(f"{found[way][0]:.2f}" for way in WAYS)
            print(f"| {name}, {tensors} x {size:,} | {times} | {', '.join(equal)} |", flush=True)


if __name__ == "__main__":
    main()
