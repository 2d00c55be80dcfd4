"""Count how often a training step makes the host wait for a GPU, by strategy, precision and comm hook. Needs no GPU.

    python benchmarks/synchronizations.py [--where]

Two processes train a small model on a fake device, on the CPU. A recorder counts in the steps after the warm-up (see
`stratagem_testing.synchronizations`). Prints the tables of docs/synchronization.md. ``--where`` adds the source lines
that wait.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch

from stratagem_testing import run_in_processes, synchronizations_per_step
from stratagem_testing.reference import Net, joined_batches, part

BATCHES = joined_batches(8, 16)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
PRECISIONS: dict[str, Any] = {
    "32-true": "32-true", "bf16-mixed": "bf16-mixed", "16-mixed": {"name": "16-mixed", "init_scale": 16.0},
    "bf16-true": "bf16-true",
}  # fmt: skip
STRATEGIES: dict[str, Any] = {
    "single_device": "single_device", "ddp": "ddp", "ddp_sharded": "ddp_sharded", "fsdp": "fsdp",
    "fsdp, NO_SHARD": {"name": "fsdp", "sharding_strategy": "NO_SHARD"},
    "local_sgd": {"name": "local_sgd", "period": 2},
    "diloco": {"name": "diloco", "period": 2}, "decentralized": "decentralized",
    "async_averaging": {"name": "async_averaging", "interval_steps": 2, "delay_steps": 1},
}  # fmt: skip
HOOKS: dict[str, dict[str, Any]] = {
    "allreduce": {}, "fp16_compress": {}, "bf16_compress": {}, "int8": {}, "topk": {}, "one_bit": {"start_iter": 2},
    "powersgd": {"start_powerSGD_iter": 2, "min_compression_rate": 1}, "batched_powersgd": {"start_powerSGD_iter": 2},
    "post_localsgd": {"model_averaging_period": 2},
}  # fmt: skip


class Fused(Net):
    """A model with an optimizer that can skip a step on the device."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def count(rank: int, world_size: int, cases: list[tuple[type[Net], dict[str, Any]]]) -> list[tuple[str, list[str]]]:
    """Return for each case the largest count of a step, or "-" if it is refused, and the lines that wait."""
    results = []
    for make, arguments in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loader = part(BATCHES, rank, world_size)
                steps = synchronizations_per_step(make(), loader, devices=world_size, **QUIET, **arguments)
        except ValueError:  # plugins that cannot be combined
            results.append(("-", []))
            continue
        results.append((str(max(map(len, steps))), sorted({str(found) for step in steps for found in step})))
    return results


def table(head: str, rows: dict[str, list[tuple[type[Net], dict[str, Any]]]], world_size: dict[str, int]) -> list[str]:
    """Print a row of counts for each of `rows`; return the lines that wait."""
    lines = []
    print(f"| {head} | " + " | ".join(PRECISIONS) + " |")
    print("|---" * (len(PRECISIONS) + 1 + head.count("|")) + "|")
    for name, cases in rows.items():
        counts = run_in_processes(count, world_size.get(name, 2), cases, limit_s=600)
        worst = [max(each, key=lambda result: result[0]) for each in zip(*counts, strict=True)]
        print(f"| {name} | " + " | ".join(number for number, _ in worst) + " |", flush=True)
        lines += [f"{name}: {where}" for where in sorted({each for _, found in worst for each in found})]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", action="store_true", help="print the source lines that wait")
    options = parser.parse_args()
    lines = table(
        "strategy",
        {
            name: [(Net, {"strategy": strategy, "precision": precision}) for precision in PRECISIONS.values()]
            for name, strategy in STRATEGIES.items()
        },
        {"single_device": 1},
    )
    print()
    hooks = {}
    for strategy in ("ddp", "ddp_sharded", "fsdp, NO_SHARD"):
        for hook, given in HOOKS.items():
            for optimizer, make in (("SGD", Net), ("AdamW(fused=True)", Fused)):
                chosen = {"strategy": STRATEGIES[strategy], "comm_hook": {"name": hook, **given}}
                hooks[f"{strategy}, {hook} | {optimizer}"] = [
                    (make, chosen | {"precision": precision}) for precision in PRECISIONS.values()
                ]
    lines += table("strategy, comm hook | optimizer", hooks, {})
    if options.where:
        print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
