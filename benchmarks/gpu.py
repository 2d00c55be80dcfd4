"""Time of steps of a tiny model and of a GPT on one GPU, compared with a plain PyTorch loop with the same settings.

    python benchmarks/gpu.py [--json gpu-bench.json] [--rounds 5] [--only NAME ...] [--device cpu --small]

Wall time of synchronized steps after a warm-up; the trainer and the raw loop alternate within each round, and the
ratio is that of the two medians. Beside `fsdp` the raw loop calls torch's fully_shard with the same settings. MFU is
the share of the GPU's dense peak for the dtype of the matrix products, if that peak is known.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import logging
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem_callbacks import throughput

#: Peaks in FLOP/s for products in fp32 by the one in bf16, from NVIDIA's data sheets; in tf32 it is half of that.
FP32_PEAKS = {989e12: 67e12, 835e12: 60e12, 756e12: 51e12, 312e12: 19.5e12}


# --- Models ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward layer, pre-norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class GPT(nn.Module):
    """A GPT, by default GPT-2 in its smallest published size."""

    def __init__(self, vocabulary: int, context: int, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(sg.Module):
    """Predicts the next token; trained by AdamW."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT(**sizes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tiny(sg.Module):
    """An MLP with a cheap step, to measure the loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# --- Loops -------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Case:
    """One row of the table: the arguments of the trainer, and the settings of the raw loop."""

    name: str
    model: Callable[[], Any]
    batch: Callable[[], Tensor]
    steps: int
    warmup: int
    arguments: dict[str, Any] = field(factory=dict)
    #: The dtype of autocast in the raw loop.
    dtype: torch.dtype | None = None
    #: Arguments of fully_shard in the raw loop, without the mesh; None: it does not shard.
    sharded: dict[str, Any] | None = None
    tf32: bool = False
    compiled: bool = False
    pinned: bool = True
    #: Tokens per step, and FLOPs of forward and backward per token; 0 for models without tokens.
    tokens: int = 0
    flops_per_token: float = 0.0


class Clock(sg.Callback):
    """Seconds from the end of batch `first` to the end of batch `last`."""

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self.first, self.last, self.device, self.seconds = first, last, device, 0.0

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx: int) -> None:
        if batch_idx == self.first:
            synchronize(self.device)
            self.started = time.perf_counter()
        elif batch_idx == self.last:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self.started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def raw(case: Case, model: Any, batches: list[Tensor], device: torch.device) -> float:
    """Return the seconds of a step in plain PyTorch."""
    if case.sharded is None:
        return raw_steps(case, model.to(device), batches, device)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (1,))
        for unit in (*model.net.blocks, model.net):
            fully_shard(unit, mesh=mesh, **case.sharded)
        offloads = isinstance(case.sharded["offload_policy"], CPUOffloadPolicy)
        return raw_steps(case, model if offloads else model.to(device), batches, device)
    finally:
        dist.destroy_process_group()


def raw_steps(case: Case, model: Any, batches: list[Tensor], device: torch.device) -> float:
    optimizer = model.configure_optimizers()
    step = torch.compile(model.training_step) if case.compiled else model.training_step
    started = 0.0
    for index, batch in enumerate(batches):
        moved = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, case.dtype, enabled=case.dtype is not None):
            loss = step(moved, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == case.warmup - 1:
            synchronize(device)
            started = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - started) / case.steps


def ours(case: Case, model: Any, batches: list[Tensor], device: torch.device) -> float:
    """Return the seconds of a step with the trainer."""
    clock = Clock(case.warmup - 1, case.warmup + case.steps - 1, device)
    arguments = {
        "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False,
        "strategy": "single_device", **case.arguments,
    }  # fmt: skip
    trainer = sg.Trainer(max_epochs=1, accelerator=device.type, devices=1, callbacks=[clock], **arguments)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(torch.compile(model) if case.compiled else model, batches)
    trainer.close()
    return clock.seconds / case.steps


def measure(case: Case, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the row of `case`."""
    batches = [case.batch() for _ in range(case.warmup + case.steps)]
    if case.pinned and device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else "highest")
    kept = {raw: case.model(), ours: case.model()}
    seconds: dict[Any, list[float]] = {raw: [], ours: []}
    try:
        for number in range(rounds + 1):
            for loop in (raw, ours) if number % 2 else (ours, raw):
                # A compiled model is compiled once; a sharded one is not sharded again.
                model = kept[loop] if case.sharded is None else case.model()
                taken = loop(case, model, batches, device)
                if number:  # the first round is a warm-up
                    seconds[loop].append(taken)
    finally:
        torch.set_float32_matmul_precision(before)
    return row(case, seconds[raw], seconds[ours], device)


def row(case: Case, plain: list[float], timed: list[float], device: torch.device) -> dict[str, Any]:
    middle, base = statistics.median(timed), statistics.median(plain)
    result: dict[str, Any] = {
        "name": case.name, "step_ms": 1e3 * middle, "step_ms_min": 1e3 * min(timed), "step_ms_max": 1e3 * max(timed),
        "raw_step_ms": 1e3 * base, "raw_step_ms_min": 1e3 * min(plain), "raw_step_ms_max": 1e3 * max(plain),
        "ratio": middle / base, "over_raw_us": 1e6 * (middle - base),
    }  # fmt: skip
    if case.tokens:
        achieved = case.tokens * case.flops_per_token / middle
        peak = peak_flops(case, device)
        result |= {
            "tokens_per_s": case.tokens / middle, "raw_tokens_per_s": case.tokens / base, "tflops": achieved / 1e12,
            "mfu": achieved / peak if peak else None,
        }  # fmt: skip
    return result


def peak_flops(case: Case, device: torch.device) -> float | None:
    """Return the peak for the dtype of the matrix products of `case`; None if unknown."""
    if device.type != "cuda":
        return None
    peak = throughput.peak_flops(torch.cuda.get_device_name(device))
    if peak is None or case.dtype is not None:
        return peak
    return peak / 2 if case.tf32 else FP32_PEAKS.get(peak)


# --- Cases -------------------------------------------------------------------------------------------------------


def cases(small: bool) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    rows = functools.partial(torch.randn, 8, 32, generator=generator)
    tiny = Case(name="step, everything off", model=Tiny, batch=rows, steps=20 if small else 1000, warmup=5,
                arguments={"barebones": True, "enable_model_summary": None})  # fmt: skip
    yield tiny
    yield evolve(tiny, name="step, bar off, defaults", arguments={})
    yield evolve(tiny, name="step, pageable batches", arguments={}, pinned=False)
    sizes = {"vocabulary": 50304, "context": 1024, "width": 768, "depth": 12, "num_heads": 12}
    if small:
        sizes = {"vocabulary": 64, "context": 16, "width": 32, "depth": 2, "num_heads": 2}
    batch_size = 2 if small else 8
    shape = (batch_size, sizes["context"] + 1)
    tokens = functools.partial(torch.randint, sizes["vocabulary"], shape, generator=generator)
    multiplied = 12 * sizes["depth"] * sizes["width"] ** 2 + sizes["vocabulary"] * sizes["width"]
    attention = 2 * sizes["depth"] * sizes["width"] * sizes["context"]
    gpt = Case(
        name="GPT fp32", model=functools.partial(Language, **sizes), batch=tokens, steps=3 if small else 12, warmup=3,
        tokens=batch_size * sizes["context"], flops_per_token=6 * (multiplied + attention),
    )  # fmt: skip
    bf16 = evolve(gpt, name="GPT bf16-mixed", arguments={"precision": "bf16-mixed"}, dtype=torch.bfloat16)
    fsdp = {"name": "fsdp", "auto_wrap_policy": {Block}}
    plain = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
        "offload_policy": OffloadPolicy(),
    }
    yield gpt
    yield evolve(gpt, name="GPT tf32", tf32=True)
    yield bf16
    yield evolve(bf16, name="GPT bf16-mixed, ddp", arguments=bf16.arguments | {"strategy": "ddp"})
    yield evolve(bf16, name="GPT bf16-mixed, compile", compiled=True)
    yield evolve(bf16, name="GPT bf16-mixed, fsdp", arguments=bf16.arguments | {"strategy": fsdp}, sharded=plain)
    offload = bf16.arguments | {"strategy": fsdp | {"cpu_offload": True}}
    on_cpu = plain | {"offload_policy": CPUOffloadPolicy(pin_memory=not small)}
    yield evolve(bf16, name="GPT bf16-mixed, fsdp cpu_offload", arguments=offload, sharded=on_cpu, steps=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-bench.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose names contain one of these")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="small models: to test this program, not to measure")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible: nothing is measured (--device cpu --small tests the program)")
        arguments.json.write_text(json.dumps({"machine": machine(device), "rows": []}, indent=1) + "\n")
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("| | ms per step | raw loop | ratio | min | max | tokens/s | TFLOP/s | MFU |\n" + "|---" * 9 + "|")
    rows = []
    for case in cases(arguments.small):
        if not any(part in case.name for part in arguments.only):
            continue
        try:
            rows.append(measure(case, arguments.rounds, device))
            print(line(rows[-1]), flush=True)
        except Exception as error:  # noqa: BLE001 - an error in one case must not end the others
            rows.append({"name": case.name, "error": traceback.format_exc()})
            print(f"| {case.name} | {type(error).__name__}: {str(error).partition(chr(10))[0]} |", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        arguments.json.write_text(json.dumps({"machine": machine(device), "rows": rows}, indent=1) + "\n")


def line(row: dict[str, Any]) -> str:
    tokens, tflops, mfu = row.get("tokens_per_s"), row.get("tflops"), row.get("mfu")
    cells = [
        row["name"], f"{row['step_ms']:.3f}", f"{row['raw_step_ms']:.3f}", f"{row['ratio']:.3f}",
        f"{row['step_ms_min']:.3f}", f"{row['step_ms_max']:.3f}", f"{tokens:.0f}" if tokens else "",
        f"{tflops:.1f}" if tflops else "", f"{100 * mfu:.1f} %" if mfu else "",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions, on which the numbers depend."""
    on_cuda = device.type == "cuda" and torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_cuda else None, "python": platform.python_version(),
        "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_cuda else None,
    }  # fmt: skip


if __name__ == "__main__":
    main()
