"""What a plan says: as the data of a plan file, and as text."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from stratagem.api import COMPILATION
from stratagem_plan.allocator import LIBRARY_BYTES
from stratagem_plan.plan_file import SCHEMA, RankClass, structure, totals

if TYPE_CHECKING:
    from stratagem_plan.planned import Planner
    from stratagem_plan.script import PlannedScript

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "messages", "temporary")
#: What makes torch's allocator keep less.
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
#: What is taken for granted in every plan.
ASSUMPTIONS = (
    f"the libraries of the device take {LIBRARY_BYTES / 2**20:.0f} MiB, as cuBLAS does on an H200",
    "validation, loggers and checkpoints are left out",
    "all ranks decide as this one, where a decision depends on what others say",
    "what NCCL takes for its buffers is not counted",
)


def tree_of(script: PlannedScript, device: str, planner: Planner) -> dict[str, Any]:
    """Return the plan of one rank as data: the plan file's, see `stratagem_plan.plan_file`."""
    run, inputs = planner.run, planner.inputs
    assumptions = [*ASSUMPTIONS, *planner.assumptions.used]
    for name, count in sorted(planner.counter.uncounted.items()):
        assumptions.append(f"{name} ({count} calls) counts no FLOPs")
    if len(run.stack.strategies) > 1:
        assumptions.append(f"what {run.stack.strategies[0]} sends between steps is not counted")
    if run.mesh.size("expert") > 1:
        assumptions.append("experts get as many tokens on each rank")
    if run.mesh.size("pipeline") > 1:
        assumptions.append("of stages with equal layers the first is planned, which holds most activations")
    if run.provides(COMPILATION):
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
            "comm_hook": ", ".join(choice.name for choice in run.stack.of("comm_hook")),
        },
        "mesh": dict(run.mesh.axes),
        "model": {"parameters": planner.numbers},
        "trainer": run.settings.for_trainer,
        "inputs": {"samples": inputs.get("samples", 0), "tokens": inputs.get("tokens", 0)},
        "data_ranks": run.mesh.num_data_shards,
        "accumulate": inputs.get("batches", 1),
        "other_classes": [alike[0] for alike in planner.classes if run.rank not in alike],
        "classes": [_class_of(script, planner)],
        "assumptions": assumptions,
    }  # fmt: skip


def _class_of(script: PlannedScript, planner: Planner) -> dict[str, Any]:
    counter, run = planner.counter, planner.run
    peak, allocator = counter.peak.total + LIBRARY_BYTES, counter.allocators[0]
    return {
        "rank": run.rank,
        "ranks": next(len(alike) for alike in planner.classes if run.rank in alike),
        "peak": peak,
        "needs": int(allocator.limit + allocator.lacking) if allocator.lacking and peak <= allocator.limit else peak,
        "reserved": allocator.peak,
        "returns": allocator.returns,
        "reserved_expandable": counter.allocators[1].peak,
        "at_peak": {name: counter.peak.by.get(name, 0) for name in CATEGORIES} | {"libraries": LIBRARY_BYTES},
        "peak_phase": counter.peak.phase,
        "peak_module": counter.peak.module,
        "end": {name: planner.ends[-1].get(name, 0) for name in CATEGORIES} | {"libraries": LIBRARY_BYTES},
        "flops": counter.flops,
        "work": [_work(key, count) for key, count in sorted(counter.work.items(), key=str)],
        "collectives": [_collective(key, calls, script, run) for key, calls in sorted(counter.sent.items())],
        "bubble": _bubble(run),
    }  # fmt: skip


def _bubble(run: Any) -> dict[str, int] | None:
    layout = run.strategy.layout(run.peers_world, None)
    timeline = layout and layout.timeline
    if timeline is None:
        return None
    ranks = len(timeline.rows)
    return {"stages": ranks, "microbatches": timeline.microbatches, "interleave": timeline.stages // ranks}


def _work(key: tuple[Any, ...], count: int) -> dict[str, Any]:
    phase, kind, dtype, *rest = key
    names = {"matmul": ("m", "n", "k", "batch"), "attention": ("flops",), "vector": ("op", "bytes")}[kind]
    return {"phase": phase, "kind": kind, "dtype": dtype, "count": count} | dict(zip(names, rest, strict=True))


def _collective(key: Any, calls: int, script: PlannedScript, run: Any) -> dict[str, Any]:
    phase, op, ranks, payload = key
    return {
        "phase": phase, "op": op, "axis": _axis(op, ranks, run), "ranks": len(ranks),
        "within_node": len({rank // script.devices for rank in ranks}) == 1, "payload": payload, "calls": calls,
    }  # fmt: skip


def _axis(op: str, ranks: tuple[int, ...], run: Any) -> str:
    """Return the axes of the mesh on which `ranks` differ; "" if they are neither a line nor two ranks of one."""
    places = [evolve(run.mesh, rank=rank) for rank in ranks]
    axes = [axis for axis in run.mesh.axes if len({place.position(axis) for place in places}) > 1]
    is_line = math.prod(run.mesh.axes[axis] for axis in axes) == len(ranks)
    return "+".join(axes) if is_line or (op == "send" and len(axes) == 1) else ""


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
    for each, ranks in zip(tree["classes"], structure(tree, tree["script"]).classes, strict=True):
        yield ""
        yield (
            f"rank {each['rank']}; {each['ranks'] - 1} more are taken to do the same"
            if each["ranks"] > 1
            else f"rank {each['rank']}"
        )
        yield from _memory(each, limit)
        yield from _traffic(ranks)
        yield f"  {each['flops']:.4g} FLOP a step"
    if found := tree.get("largest_micro_batch"):
        yield ""
        yield _largest(found)
    yield ""
    yield "assumed:"
    yield from (f"  {each}" for each in tree["assumptions"])


def _largest(found: dict[str, Any]) -> str:
    if not found["size"]:
        return f"no micro-batch fits: one sample needs {found['peak_of_next']:,} bytes"
    more = found["peak_of_next"]
    text = f"largest micro-batch that fits: {found['size']:,} samples, {found['peak']:,} bytes"
    return f"{text}; one more needs {more:,}" if more else text


def _mesh(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "1"


def _memory(each: dict[str, Any], limit: float | None) -> Iterator[str]:
    yield f"  {'bytes':<14}{'at the peak':>18}{'at the end':>18}"
    for name in (*CATEGORIES, "libraries"):
        yield f"  {name:<14}{each['at_peak'][name]:>18,} {each['end'][name]:>17,}"
    yield f"  {'all':<14}{each['peak']:>18,} {sum(each['end'].values()):>17,}"
    yield f"  {'reserved':<14}{each['reserved']:>18,}; {each['reserved_expandable']:,} with {EXPANDABLE}"
    where = f"in {each['peak_phase']}" + (f" of {each['peak_module']}" if each["peak_module"] else "")
    if limit is not None:
        yield f"  peak {where}: {each['peak'] / limit:.1%} of {limit:,.0f} bytes"
    else:
        yield f"  peak {where}"


def _traffic(ranks: RankClass) -> Iterator[str]:
    sums = totals(ranks.collectives)
    if sums:
        yield f"  {'sent':<11}{'':<16}{'axis':<10}{'ranks':>6}  {'link':<8}{'calls':>7}{'bytes':>18}"
    for (phase, op, axis, link, size), (calls, payload) in sums.items():
        yield f"  {phase:<11}{op:<16}{axis:<10}{size:>6}  {link:<8}{calls:>7,.0f} {payload:>17,.0f}"


def verdict(tree: dict[str, Any], limit: float) -> list[str]:
    """Return whether the plan fits into `limit` bytes, as lines of text."""
    if words := misfit(tree, limit):
        return words
    if max(each["returns"] for each in tree["classes"]):
        return [f"fits, and torch gives back what it keeps, which slows steps down; less so with {EXPANDABLE}"]
    return ["fits"]


def misfit(tree: dict[str, Any], limit: float) -> list[str]:
    """Return by how much the plan does not fit into `limit` bytes, and three ways out; nothing if it does."""
    worst = max(tree["classes"], key=lambda each: each["needs"])
    over, in_pieces = worst["needs"] - limit, worst["peak"] <= limit
    if over <= 0:
        return []
    text = f"rank {worst['rank']} needs {over:,.0f} bytes more than the device has"
    text += ", since what torch keeps free is in pieces" if in_pieces else ""
    more = "more devices, with " * (tree["world"]["world_size"] == 1)
    ways = sorted(_ways(worst["at_peak"], more), key=lambda way: -way[0])
    said = [f"  {text} ({amount:,.0f} bytes are {name})" for amount, name, text in ways]
    said[:0] = [f"  {EXPANDABLE}, with which it keeps less"] * in_pieces
    return [f"does not fit: {text}", *said[:3]]


def _ways(by: dict[str, int], more: str) -> Iterator[tuple[int, str, str]]:
    yield by["activations"], "activations", "smaller batches with accumulate_grad_batches, or activation_checkpointing"
    yield by["parameters"], "parameters", f'{more}strategy="fsdp", which divides them, or more ranks under it'
    yield by["optimizer"], "the optimizer's", f'{more}strategy="ddp_sharded" or "fsdp", which divide its state'
    yield by["temporary"], "temporary", "smaller batches; a loss in parts, if logits are large; smaller reduce buckets"
    yield by["gradients"], "gradients", f'{more}strategy="fsdp", which divides them'
    yield by["messages"], "messages", "a smaller bucket_cap_mb, or smaller units (auto_wrap_policy)"
