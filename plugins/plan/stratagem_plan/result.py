"""What a plan says: as the data of a plan file, and as text."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from stratagem_plan.plan_file import SCHEMA

if TYPE_CHECKING:
    from stratagem_plan.planned import Planner
    from stratagem_plan.script import PlannedScript

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "messages", "temporary")
#: What CUDA's libraries take for themselves on an H200 in torch 2.11: cuBLAS's workspaces.
LIBRARY_BYTES = 68_157_440
#: What is taken for granted in every plan.
ASSUMPTIONS = (
    f"the libraries of the device take {LIBRARY_BYTES / 2**20:.0f} MiB, as cuBLAS does on an H200",
    "validation, loggers and checkpoints are left out",
    "all ranks decide as this one, where a decision depends on what others say",
    "the allocator wastes nothing: what it reserves is more, by 1 to 32 percent where it was measured",
)


def tree_of(script: PlannedScript, device: str, planner: Planner) -> dict[str, Any]:
    """Return the plan of one rank as data: the plan file's, see `stratagem_plan.plan_file`."""
    run, inputs = planner.run, planner.inputs
    assumptions = [*ASSUMPTIONS]
    for name, count in sorted(planner.counter.uncounted.items()):
        assumptions.append(f"{name} ({count} calls) counts no FLOPs")
    if len(run.stack.strategies) > 1:
        assumptions.append(f"what {run.stack.strategies[0]} sends between steps is not counted")
    if run.compiles:
        assumptions.append("the model is not compiled: a compiled one holds less, and computes fewer operations")
    return {
        "schema": SCHEMA,
        "versions": {"stratagem": importlib.metadata.version("stratagem-core"), "torch": torch.__version__},
        "script": " ".join([str(script.path), *script.arguments]),
        "device": device,
        "world": {
            "devices_per_node": script.devices, "nodes": script.nodes, "world_size": script.devices * script.nodes,
        },
        "stack": {
            "strategy": ", ".join(choice.name for choice in run.stack.strategies),
            "precision": run.stack.precision.name,
            "comm_hook": ", ".join(choice.name for choice in run.stack.comm_hooks),
        },
        "mesh": dict(run.mesh.axes),
        "inputs": {"samples": inputs.get("samples", 0), "tokens": inputs.get("tokens", 0)},
        "data_ranks": run.mesh.num_data_shards,
        "accumulate": inputs.get("batches", 1),
        "classes": [_class_of(script, planner)],
        "assumptions": assumptions,
    }  # fmt: skip


def _class_of(script: PlannedScript, planner: Planner) -> dict[str, Any]:
    counter, run = planner.counter, planner.run
    return {
        "rank": run.rank,
        "ranks": run.world_size,
        "peak": counter.peak.total + LIBRARY_BYTES,
        "at_peak": {name: counter.peak.by.get(name, 0) for name in CATEGORIES} | {"libraries": LIBRARY_BYTES},
        "peak_phase": counter.peak.phase,
        "end": {name: planner.ends[-1].get(name, 0) for name in CATEGORIES} | {"libraries": LIBRARY_BYTES},
        "flops": counter.flops,
        "work": [_work(key, count) for key, count in sorted(counter.work.items(), key=str)],
        "collectives": [_collective(key, calls, script, run) for key, calls in sorted(counter.sent.items())],
    }  # fmt: skip


def _work(key: tuple[Any, ...], count: int) -> dict[str, Any]:
    phase, kind, dtype, *rest = key
    names = {"matmul": ("m", "n", "k", "batch"), "attention": ("flops",), "vector": ("op", "bytes")}[kind]
    return {"phase": phase, "kind": kind, "dtype": dtype, "count": count} | dict(zip(names, rest, strict=True))


def _collective(key: Any, calls: int, script: PlannedScript, run: Any) -> dict[str, Any]:
    phase, op, ranks, payload = key
    return {
        "phase": phase, "op": op, "axis": _axis(ranks, run), "ranks": len(ranks),
        "within_node": len({rank // script.devices for rank in ranks}) == 1, "payload": payload, "calls": calls,
    }  # fmt: skip


def _axis(ranks: tuple[int, ...], run: Any) -> str:
    """Return the axes of the mesh on which `ranks` differ; "" if they are not the ranks of a line."""
    places = [evolve(run.mesh, rank=rank) for rank in ranks]
    axes = [axis for axis in run.mesh.axes if len({place.position(axis) for place in places}) > 1]
    return "+".join(axes) if math.prod(run.mesh.axes[axis] for axis in axes) == len(ranks) else ""


# --- Text --------------------------------------------------------------------------------------------------------


def lines_of(tree: dict[str, Any], limit: float | None) -> Iterator[str]:
    """Yield the plan as lines of text; `limit` is the memory of the device, in bytes."""
    world, stack = tree["world"], tree["stack"]
    yield f"{tree['script']}"
    yield (
        f"strategy {stack['strategy']}, precision {stack['precision']}; {world['world_size']} x {tree['device']} "
        f"(nodes: {world['nodes']}, of {world['devices_per_node']}); mesh {_mesh(tree['mesh'])}"
    )
    inputs = tree["inputs"]
    batches = "1 batch" if tree["accumulate"] == 1 else f"{tree['accumulate']} batches"
    yield f"a step of one rank: {inputs['samples']} samples, {inputs['tokens']:,} whole numbers in {batches}"
    for each in tree["classes"]:
        yield ""
        yield (
            f"rank {each['rank']}; {each['ranks'] - 1} others are taken to do the same"
            if each["ranks"] > 1
            else "rank 0"
        )
        yield from _memory(each, limit)
        yield from _traffic(each)
        yield f"  {each['flops']:.4g} FLOP a step"
    yield ""
    yield "assumed:"
    yield from (f"  {each}" for each in tree["assumptions"])


def _mesh(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "1"


def _memory(each: dict[str, Any], limit: float | None) -> Iterator[str]:
    yield f"  {'bytes':<14}{'at the peak':>18}{'at the end':>18}"
    for name in (*CATEGORIES, "libraries"):
        yield f"  {name:<14}{each['at_peak'][name]:>18,}{each['end'][name]:>18,}"
    yield f"  {'all':<14}{each['peak']:>18,}{sum(each['end'].values()):>18,}"
    where = f"in {each['peak_phase']}"
    if limit is not None:
        yield f"  peak {where}: {each['peak'] / limit:.1%} of {limit:,.0f} bytes"
    else:
        yield f"  peak {where}"


def _traffic(each: dict[str, Any]) -> Iterator[str]:
    sums: dict[tuple[str, ...], list[float]] = {}
    for sent in each["collectives"]:
        link = "node" if sent["within_node"] else "network"
        key = (sent["phase"], sent["op"], sent["axis"], str(sent["ranks"]), link)
        total = sums.setdefault(key, [0, 0])
        total[0] += sent["calls"]
        total[1] += sent["calls"] * sent["payload"]
    if sums:
        yield f"  {'sent':<11}{'':<16}{'axis':<10}{'ranks':>6}  {'link':<8}{'calls':>7}{'bytes':>18}"
    for (phase, op, axis, ranks, link), (calls, payload) in sums.items():
        yield f"  {phase:<11}{op:<16}{axis:<10}{ranks:>6}  {link:<8}{calls:>7,}{payload:>18,}"


def misfit(tree: dict[str, Any], limit: float) -> list[str]:
    """Return by how much the plan does not fit into `limit` bytes, and three ways out; nothing if it does."""
    worst = max(tree["classes"], key=lambda each: each["peak"])
    over = worst["peak"] - limit
    if over <= 0:
        return []
    by = worst["at_peak"]
    ways = sorted(_ways(by), key=lambda way: -way[0])[:3]
    return [
        f"does not fit: rank {worst['rank']} needs {over:,.0f} bytes more than the device has",
        *(f"  {text} ({amount:,.0f} bytes are {name})" for amount, name, text in ways),
    ]


def _ways(by: dict[str, int]) -> Iterator[tuple[int, str, str]]:
    yield by["activations"], "activations", "smaller batches with accumulate_grad_batches, or activation_checkpointing"
    yield by["parameters"], "parameters", 'strategy="fsdp", which divides them over the ranks, or more ranks under it'
    yield by["optimizer"], "the optimizer's", 'strategy="ddp_sharded" or "fsdp", which divide its state over the ranks'
    yield by["temporary"], "temporary", "smaller batches; a loss in parts, if logits are large; smaller reduce buckets"
    yield by["gradients"], "gradients", 'strategy="fsdp", which divides them over the ranks'
    yield by["messages"], "messages", "a smaller bucket_cap_mb, or smaller units (auto_wrap_policy)"
