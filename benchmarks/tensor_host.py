"""What a cut activation costs the host: plain tensors, torch's DTensor and stratagem's parts of activations, in turn.

python benchmarks/tensor_host.py [--rounds 15]

One process stands for a rank of two: messages of its group send nothing, and tensors are so small that only the host's
work is measured. The block is Llama's (RMSNorm, rotary positions, grouped attention, SwiGLU), whose code says nothing
about parallelism, with attention by hand, since DTensor has no rule for the CPU's. `parallelize_module` cuts it for
DTensor; activations stay DTensors between the layers, since the model's code counts all heads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812
from torch.testing._internal.distributed.fake_pg import FakeStore

from stratagem.api.traffic import Traffic
from stratagem_parallel_unchanged.tensor import connect, cut_layers
from stratagem_parallel_unchanged.tensor.moves import Line, TracedStep
from stratagem_parallel_unchanged.tensor.slices import as_slice

WIDTH, HEADS, KEYS, LENGTH, SIZE = 64, 8, 4, 8, 2

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "x + x": lambda x: x + x,
    "silu": F.silu,
    "transpose": lambda x: x.transpose(0, 1),
    "view as heads": lambda x: x.view(2, LENGTH, HEADS, -1),
    "x[..., :]": lambda x: x[..., :],
    "float": lambda x: x.to(torch.float64),
}


class Block(nn.Module):
    """One layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEYS * self.head, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotated(self.q(x).view(batch, length, HEADS, self.head).transpose(1, 2), cos, sin)
        k = rotated(self.k(x).view(batch, length, KEYS, self.head).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, length, KEYS, self.head).transpose(1, 2)
        k, v = (each.repeat_interleave(HEADS // KEYS, dim=1) for each in (k, v))
        weights = (torch.matmul(q, k.transpose(-1, -2)) / self.head**0.5).softmax(-1)
        out = torch.matmul(weights, v)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


COLWISE, ROWWISE = ("q", "k", "v", "gate", "up"), ("o", "down")


def cut_by_dtensor(block: Block, mesh: Any) -> tuple[Block, Callable[[Tensor], Any]]:
    """Cut `block` with torch's styles; return how its inputs are made."""
    plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in COLWISE}
    plan |= {name: RowwiseParallel(output_layouts=Replicate(), use_local_output=False) for name in ROWWISE}
    parallelize_module(block, mesh, plan)
    for norm in (block.before, block.between):
        norm.weight = nn.Parameter(DTensor.from_local(norm.weight.detach(), mesh, [Replicate()]))
    return block, lambda x: DTensor.from_local(x, mesh, [Replicate()])


def forwards() -> dict[str, Callable[[], Any]]:
    """Return the block's forward by what cuts it."""
    mesh = init_device_mesh("cpu", (SIZE,))
    over: Any = SimpleNamespace(rank=0, world_size=SIZE, group=dist.group.WORLD, traffic=Traffic())
    x, (cos, sin) = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH // HEADS)
    plain, ours = Block(), Block()
    styles = dict.fromkeys(COLWISE, "colwise") | dict.fromkeys(ROWWISE, "rowwise")
    cut_layers(ours, styles, over, mesh, lambda _: None)
    traced = Block()
    cut_layers(traced, styles, over, mesh, lambda _: None)
    connect(traced, over, traced=True)
    line = Line(over, mesh)
    torchs, given = cut_by_dtensor(Block(), mesh)
    graph, torchs_graph, traced_graph = (torch.compile(each, fullgraph=True) for each in (plain, torchs, traced))

    def compiled() -> Any:
        with TracedStep(line):  # as in a step
            return traced_graph(x, cos, sin)

    return {
        "plain": lambda: plain(x, cos, sin),
        "DTensor": lambda: torchs(given(x), given(cos), given(sin)),
        "stratagem": lambda: ours(x, cos, sin),
        "plain, compiled": lambda: graph(x, cos, sin),
        "DTensor, compiled": lambda: torchs_graph(given(x), given(cos), given(sin)),
        "stratagem, compiled": compiled,
    }


def operations(function: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """Return one operation by what it is applied to."""
    line = Line(SimpleNamespace(rank=0, world_size=SIZE, group=None), None)  # type: ignore[arg-type]
    part = torch.randn(2, LENGTH, WIDTH // SIZE, requires_grad=True)
    ours = as_slice(part, -1, WIDTH, line)
    torchs = DTensor.from_local(part, init_device_mesh("cpu", (SIZE,)), [Shard(2)])
    whole = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    return {"plain": lambda: function(whole), "DTensor": lambda: function(torchs), "stratagem": lambda: function(ours)}


def best(calls: dict[str, Callable[[], Any]], rounds: int, times: int) -> dict[str, float]:
    """Return the least microseconds of each call; they take turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first round fills caches
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(times):
                call()
            found[name] = min(found[name], (time.perf_counter() - start) / times * 1e6)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    print("| microseconds of the host | plain | DTensor | stratagem | to DTensor |\n|---|---|---|---|---|")
    for name, function in OPERATIONS.items():
        show(name, best(operations(function), arguments.rounds, 300))
    of_block = best(forwards(), arguments.rounds, 20)
    show("a block's forward", {name: of_block[name] for name in ("plain", "DTensor", "stratagem")})
    show("compiled", {name: of_block[f"{name}, compiled"] for name in ("plain", "DTensor", "stratagem")})
    dist.destroy_process_group()


def show(name: str, found: dict[str, float]) -> None:
    ratio = found["stratagem"] / found["DTensor"]
    print(f"| {name} | {' | '.join(f'{each:.1f}' for each in found.values())} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
