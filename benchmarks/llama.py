"""Llama 3 8B with FSDP2 by hand and with the trainer, beside torchtitan's published tokens per second and GPU.

    python benchmarks/llama.py                                  one GPU: 4 of the 32 layers, as many tokens
    torchrun --nproc-per-node 8 benchmarks/llama.py             all layers
    ... [--json llama.json] [--rounds 3] [--rows fsdp] [--device cpu --small]

Sequences of 8,192 tokens, two for each rank, in bf16 with sums in fp32, blocks as units, activations of each computed
again but for matrix products, AdamW with one kernel. A row is measured in rounds that alternate between both loops, of
at least five seconds each on a GPU; the ratio is that of the two medians.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import stratagem as sg
from gpu import Clock, synchronize
from stratagem_callbacks import throughput

#: Tokens per second and GPU of torchtitan on 8 H100s (96 GB, 500 W), in its report of December 2024.
PUBLISHED = {"fsdp": 5762, "fsdp, compile": 6667}
#: Seconds that a round takes at least on a GPU, after which clocks are steady.
ROUND_S = 5.0


@frozen
class Sizes:
    layers: int
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    length: int = 8192
    batch: int = 2


SMALL = Sizes(layers=2, width=64, hidden=96, heads=4, key_heads=2, vocabulary=256, length=32)


# --- The model ---------------------------------------------------------------------------------------------------


def rotated(x: Tensor) -> Tensor:
    """Return heads (B, H, T, D) turned by their positions; Su et al., "RoFormer", 2021."""
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 500_000.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(length, device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, head = sizes.width, sizes.width // sizes.heads
        self.heads = head
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, sizes.key_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.heads)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.norm_2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Language(sg.Module):
    """Predicts the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.net = sizes, None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Llama(self.sizes)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.net is not None
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fused = next(self.parameters()).device.type == "cuda"
        return torch.optim.AdamW(self.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


# --- Both loops --------------------------------------------------------------------------------------------------


@frozen
class Job:
    sizes: Sizes
    ranks: int
    device: torch.device
    steps: int
    warmup: int

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def batches(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (self.sizes.batch, self.sizes.length + 1)
        made = [torch.randint(self.sizes.vocabulary, shape, generator=generator) for _ in range(4)]
        if self.device.type == "cuda":
            made = [batch.pin_memory() for batch in made]
        return [made[number % len(made)] for number in range(self.warmup + self.steps)]


def by_hand(job: Job, compiles: bool) -> float:
    """Return the seconds of a step of FSDP2 in plain PyTorch."""
    kept = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "_scaled_dot_product_flash_attention")]
    with torch.device("meta"):
        module = Language(job.sizes)
        module.configure_model()
    model: Any = module.net
    mesh = init_device_mesh(job.device.type, (job.ranks,))
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, context_fn=lambda: create_selective_checkpoint_contexts(kept))
        if compiles:
            model.blocks[number].compile()
        fully_shard(model.blocks[number], mesh=mesh, mp_policy=job.policy)
    fully_shard(model, mesh=mesh, mp_policy=job.policy, reshard_after_forward=False)
    model.to_empty(device=job.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer, started = module.configure_optimizers(), 0.0
    for index, batch in enumerate(job.batches()):
        module.training_step(batch.to(job.device, non_blocking=True), index).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index == job.warmup - 1:
            synchronize(job.device)
            started = time.perf_counter()
    synchronize(job.device)
    return (time.perf_counter() - started) / job.steps


def with_trainer(job: Job, compiles: bool) -> float:
    """Return the seconds of a step with the trainer."""
    clock = Clock(job.warmup - 1, job.warmup + job.steps - 1, job.device)
    trainer = sg.Trainer(
        max_epochs=1, accelerator=job.device.type, devices=job.ranks, callbacks=[clock], compile=compiles or None,
        strategy={"name": "fsdp", "auto_wrap_policy": {Block}, "mixed_precision": job.policy},
        activation_checkpointing={"policy": {Block}, "mode": "selective"}, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.fit(Language(job.sizes), job.batches())
    trainer.close()
    return clock.seconds / job.steps


# --- The table ---------------------------------------------------------------------------------------------------


def flops_per_token(sizes: Sizes) -> float:
    """Return the FLOPs of forward and backward of a token, without what is computed again."""
    head = sizes.width // sizes.heads
    block = sizes.width * (2 * sizes.width + 2 * sizes.key_heads * head + 3 * sizes.hidden)
    return (
        6.0 * (sizes.layers * block + sizes.vocabulary * sizes.width) + 12.0 * sizes.layers * sizes.width * sizes.length
    )


def measure(name: str, job: Job, rounds: int) -> dict[str, Any]:
    """Return the row `name`."""
    seconds: dict[Any, list[float]] = {by_hand: [], with_trainer: []}
    for number in range(rounds):
        for loop in (by_hand, with_trainer) if number % 2 else (with_trainer, by_hand):
            torch._dynamo.reset()
            seconds[loop].append(loop(job, "compile" in name))
    plain, ours = (statistics.median(seconds[loop]) for loop in (by_hand, with_trainer))
    tokens = job.sizes.batch * job.sizes.length
    peak = throughput.peak_flops(torch.cuda.get_device_name()) if job.device.type == "cuda" else None
    return {
        "name": name, "layers": job.sizes.layers, "ranks": job.ranks, "step_s": ours, "by_hand_step_s": plain,
        "ratio": ours / plain, "tokens_per_s_gpu": tokens / ours, "by_hand_tokens_per_s_gpu": tokens / plain,
        "mfu": tokens / ours * flops_per_token(job.sizes) / peak if peak else None,
        "torchtitan_tokens_per_s_gpu": PUBLISHED[name], "rounds": seconds[with_trainer],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("llama.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=PUBLISHED, default=PUBLISHED)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model: to test this program, not to measure")
    arguments = parser.parse_args()
    on_cuda, ranks = arguments.device == "cuda", int(os.environ.get("WORLD_SIZE", "1"))
    if on_cuda and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is visible: nothing is measured (--device cpu --small tests the program)")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_cuda else torch.device("cpu")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", **alone)
    sizes = SMALL if arguments.small else Sizes(layers=32 if ranks >= 8 else 4)
    # A step of all layers takes about 2.8 s on an H100, one of four half a second.
    steps = 2 if arguments.small else round(ROUND_S / (0.09 * sizes.layers)) + 1
    job = Job(sizes, ranks, device, steps, warmup=1 if arguments.small else 4)
    rows = []
    if dist.get_rank() == 0:
        titles = "| | layers | GPUs | tokens/s/GPU | FSDP2 by hand | ratio | MFU | torchtitan, 32 layers, 8 H100 |"
        print(f"{titles}\n" + "|---" * 8 + "|")
    for name in arguments.rows:
        rows.append(row := measure(name, job, arguments.rounds))
        if dist.get_rank() == 0:
            mfu = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
            cells = [
                name, sizes.layers, ranks, f"{row['tokens_per_s_gpu']:.0f}", f"{row['by_hand_tokens_per_s_gpu']:.0f}",
                f"{row['ratio']:.3f}", mfu, PUBLISHED[name],
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            arguments.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
