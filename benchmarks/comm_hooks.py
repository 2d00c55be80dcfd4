"""Time of a step with a comm hook, relative to raw DDP with torch's hook, or with the same arithmetic written by hand.

python benchmarks/comm_hooks.py [--quick] [--only int8 topk] [--steps 10] [--rounds 10]

Two gloo ranks of one thread each train an MLP of 9.9M parameters. Each round runs both variants of a row one after the
other. torch has no int8, topk and one_bit for gloo: `comm_hooks_by_hand.py` writes them in a plain way. Those wait for
their messages within the hook, since a hook that sends from a callback aborts on gloo if there are several buckets; so
does torch's powerSGD_hook, which therefore gets one bucket, and so does stratagem's in that row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import comm_hooks_by_hand as by_hand
import stratagem as sg

#: Steps before the measurement: DDP lays out its buckets again, and one_bit and powersgd begin to compress.
WARM_UP = 3
ONE_BUCKET_MB = 100.0


@attrs.frozen
class Row:
    """One comparison: a comm hook of stratagem, and the hook of raw DDP."""

    #: `comm_hook=` of the trainer.
    comm_hook: Any
    #: Makes the state and the function of ``register_comm_hook``; None for raw DDP without a hook.
    make_hook: Callable[[], tuple[Any, Callable[..., Any]]] | None
    bucket_cap_mb: float = 25.0
    quick: bool = True


def _bf16(state, bucket):  # torch's hook refuses gloo by its own name
    return default_hooks.bf16_compress_hook(state, bucket)


def _powersgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return state, powerSGD_hook.powerSGD_hook


ROWS = {
    "none": Row(None, None),
    "none, 1 bucket": Row(None, None, bucket_cap_mb=ONE_BUCKET_MB, quick=False),
    "none, 1 MB buckets": Row(None, None, bucket_cap_mb=1.0, quick=False),
    "allreduce": Row("allreduce", lambda: (None, default_hooks.allreduce_hook), quick=False),
    "fp16_compress": Row("fp16_compress", lambda: (None, default_hooks.fp16_compress_hook)),
    "fp16_compress, 1 MB buckets": Row(
        "fp16_compress", lambda: (None, default_hooks.fp16_compress_hook), bucket_cap_mb=1.0, quick=False
    ),
    "bf16_compress": Row("bf16_compress", lambda: (None, _bf16)),
    "int8": Row("int8", lambda: (None, by_hand.Int8())),
    "topk": Row("topk", lambda: (None, by_hand.TopK(ratio=0.01))),
    "one_bit": Row({"name": "one_bit", "start_iter": 2}, lambda: (None, by_hand.OneBit(start_iter=2))),
    "powersgd, 1 bucket": Row(
        {"name": "powersgd", "start_powerSGD_iter": 2}, _powersgd, bucket_cap_mb=ONE_BUCKET_MB
    ),
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(0)
    sizes = [512, 2048, 2048, 2048, 256]
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for pair in layers for part in pair][:-1])


class Clock:
    """CPU and wall seconds of this process from `start` to `stop`; both wait for the other rank."""

    def start(self) -> None:
        torch.distributed.barrier()
        self.began = time.process_time(), time.perf_counter()

    def stop(self) -> tuple[float, float]:
        torch.distributed.barrier()
        return time.process_time() - self.began[0], time.perf_counter() - self.began[1]


class Model(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.clock = Clock()

    def training_step(self, batch, batch_idx):
        if batch_idx == WARM_UP:
            self.clock.start()
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self):
        self.took = self.clock.stop()


def raw(row: Row, batches) -> tuple[float, float]:
    model = DistributedDataParallel(network(), bucket_cap_mb=row.bucket_cap_mb)
    if row.make_hook is not None:
        model.register_comm_hook(*row.make_hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = Clock()
    for index, (x, y) in enumerate(batches):
        if index == WARM_UP:
            clock.start()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock.stop()


def ours(row: Row, batches) -> tuple[float, float]:
    model = Model()
    trainer = sg.Trainer(
        max_epochs=1, devices=2, accelerator="cpu", barebones=True, comm_hook=row.comm_hook,
        strategy={"name": "ddp", "bucket_cap_mb": row.bucket_cap_mb},
    )  # fmt: skip
    trainer.fit(model, batches)
    return model.took


def measure(names: list[str], steps: int, rounds: int, run: sg.Run) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the CPU and wall seconds per step of each variant of each row, by round."""
    import os

    os.environ["LOCAL_RANK"] = str(run.world.local_rank)  # the measured trainers use this process group
    torch.set_num_threads(1)
    torch.manual_seed(run.world.rank)
    batches = [(torch.randn(32, 512), torch.randn(32, 256)) for _ in range(WARM_UP + steps)]
    took: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"raw": [], "ours": []} for name in names}
    for number, name in itertools.product(range(rounds), names):
        variants = {"raw": raw, "ours": ours}
        for variant in list(variants) if number % 2 else reversed(variants):
            cpu, wall = variants[variant](ROWS[name], batches)
            took[name][variant].append((cpu / steps, wall / steps))
    return took


def _ratio(pairs: list[tuple[float, float]]) -> str:
    ratios = sorted(ours / raw for raw, ours in pairs)
    return f"{statistics.median(ratios):.3f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def table(results: list[dict[str, dict[str, list[tuple[float, float]]]]]) -> str:
    """Return a Markdown table; `results` are those of each rank."""
    lines = [
        "| hook | raw CPU ms | ours CPU ms | ratio of CPU | raw wall ms | ours wall ms | ratio of wall |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in results[0]:
        cells = [name]
        for kind in (0, 1):
            raw_s, ours_s = (
                [statistics.mean(each) for each in zip(*[[t[kind] for t in r[name][v]] for r in results], strict=True)]
                for v in ("raw", "ours")
            )
            cells += [f"{1e3 * statistics.median(times):.0f}" for times in (raw_s, ours_s)]
            cells.append(_ratio(list(zip(raw_s, ours_s, strict=True))))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gathered(names: list[str], steps: int, rounds: int, run: sg.Run) -> list[Any]:
    """Measure in each process; return the results of all."""
    return run.collectives.all_gather_object(measure(names, steps, rounds, run))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, three rounds of four steps")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="HOOK", help="these rows only")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    names = arguments.only or [name for name, row in ROWS.items() if row.quick or not arguments.quick]
    steps = arguments.steps or (4 if arguments.quick else 10)
    rounds = arguments.rounds or (3 if arguments.quick else 10)
    run = sg.Run(strategy="ddp_fork", devices=2, accelerator="cpu")
    results = run.launch(functools.partial(gathered, names, steps, rounds))
    parameters = sum(parameter.numel() for parameter in network().parameters())
    print(
        f"torch {torch.__version__}, {parameters / 1e6:.1f}M parameters, 2 gloo ranks, one thread each; per step, "
        f"medians of {rounds} rounds of {steps} steps; the ratio is the median of the rounds' (smallest-largest)\n"
    )
    print(table(results))


if __name__ == "__main__":
    main()
