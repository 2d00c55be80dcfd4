"""Pictures of a plan and of its prediction, as SVG: memory, mesh, timeline, scaling, roofline; and of several plans."""

from __future__ import annotations

import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from stratagem_pictures.drawings import LEFT, RIGHT, bar, circle, drawing, legend, path, tag, text, x_axis, y_axis
from stratagem_pictures.scales import Scale, si
from stratagem_plan.cost import Interval, Machine, Step, number_format
from stratagem_plan.devices import MEASURED, Device, find
from stratagem_plan.plan_file import Plan, RankClass, Work

if TYPE_CHECKING:
    from stratagem_plan.simulate import Scale as Scaled
    from stratagem_plan.simulate import Simulation

#: Colours of what is in the memory, in the order of a bar.
_CATEGORIES = {
    "parameters": "c1", "gradients": "c2", "optimizer": "c3", "activations": "c4", "messages": "c5", "temporary": "c6",
    "libraries": "c7",
}  # fmt: skip
#: Parts of a step in the order of its bars: name in `Step`, words, colour.
_PARTS = (
    ("forward", "forward", "c1"),
    ("backward", "backward", "c2"),
    ("exposed", "communication that is not hidden", "c5"),
    ("bubble", "bubble of the pipeline", "c6"),
    ("optimizer", "optimizer", "c3"),
    ("host", "waiting for the host", "c7"),
)
_PHASES = {"forward": "c1", "backward": "c2", "optimizer": "c3"}
#: Ranks of a node, and compared plans, that are drawn with a number.
_MOST_DEVICES, _MOST_NUMBERS = 16, 12


# --- Memory ----------------------------------------------------------------------------------------------------------


def memory(plan: Plan, limit: float | None) -> Element:
    """Draw what each class of ranks holds at its peak and at the end of the step, beside the device's bytes."""
    worst = max(plan.classes, key=lambda each: each.peak)
    near = limit is not None and worst.peak > limit / 5
    scale = Scale(0, 1.02 * max(worst.peak, limit or 0.0) if near else 1.15 * worst.peak, 12, RIGHT)
    drawn, y = [], 34.0
    for each in plan.classes:
        share = f", {each.peak / limit:.0%} of the limit" if limit else ""
        drawn += [
            text(12, y, name_of(each), "strong"),
            text(12, y + 17, f"peak, in {each.peak_phase}", "soft"),
            text(RIGHT, y + 17, f"{si(each.peak, 'B')}{share}", "end"),
            *_stack(scale, y + 23, each.at_peak),
            text(12, y + 54, "end of the step", "soft"), text(RIGHT, y + 54, si(sum(each.end.values()), "B"), "end"),
            *_stack(scale, y + 60, each.end),
        ]  # fmt: skip
        if limit and near:
            drawn += [path([(scale.at(limit), top), (scale.at(limit), top + 20)], "limit") for top in (y + 20, y + 57)]
        y += 96
    bottom = y - 12
    held = {name for each in plan.classes for by in (each.at_peak, each.end) for name, amount in by.items() if amount}
    amounts = {name: worst.at_peak.get(name, 0.0) for name in _CATEGORIES if name in held}
    items = [(_CATEGORIES[name], f"{name} {si(amount, 'B')}") for name, amount in amounts.items()]
    words = "" if limit is None else f"limit {si(limit, 'B')}"
    shown = [
        *x_axis(scale, 20, bottom, "B"), *drawn,
        text(RIGHT, 14, words if near or not words else f"{words}, to the right of this axis", "end strong"),
        text(12, bottom + 36, f"at the peak of {name_of(worst)}", "soft"), *legend(bottom + 54, items),
    ]  # fmt: skip
    title = f"Memory of a device by category, {words or 'its limit is not known'}"
    return drawing(title, bottom + 48 + 17 * math.ceil(len(items) / 2), shown)


def name_of(ranks: RankClass) -> str:
    """Return how a class of ranks is called."""
    return f"rank {ranks.rank}" + (f" and {ranks.ranks - 1:,} like it" if ranks.ranks > 1 else "")


def _stack(scale: Scale, y: float, by: dict[str, float]) -> Iterator[Element]:
    start = 0.0
    for name, kind in _CATEGORIES.items():
        if amount := by.get(name, 0.0):
            x = scale.at(start)
            yield bar(x, y, scale.at(start + amount) - x, kind, f"{name}: {amount:,.0f} bytes")
            start += amount


# --- The mesh --------------------------------------------------------------------------------------------------------


def mesh(plan: Plan) -> Element:
    """Draw nodes with their devices, and which of them each axis connects with rank 0."""
    per_node, size = plan.world.devices_per_node, plan.world.world_size
    axes = {name: length for name, length in plan.mesh.items() if length > 1}
    strides = {name: math.prod([*axes.values()][number:]) for number, name in enumerate(axes, 1)}
    kinds = {name: f"c{number % 7 + 1}" for number, name in enumerate(axes)}
    ends = {rank for name, stride in strides.items() for rank in (stride, stride * (axes[name] - 1))}
    nodes = sorted({0, plan.world.nodes - 1, *(rank // per_node for rank in ends)} & {*range(plan.world.nodes)})
    drawn, y = [], 14.0
    for before, node in zip([-1, *nodes], nodes, strict=False):
        if node - before > 1:
            drawn.append(text(12, y, f"… {node - before - 1:,} more", "soft"))
            y += 17
        drawn.append(text(12, y, f"node {node:,}", "strong"))
        for place in range(min(per_node, _MOST_DEVICES)):
            rank = node * per_node + place
            lines = [name for name in axes if rank % strides[name] == 0 and rank // strides[name] < axes[name]]
            drawn += _device(12 + place % 8 * 42, y + 5 + place // 8 * 34, rank, [kinds[name] for name in lines])
        y += 22 + 34 * -(-min(per_node, _MOST_DEVICES) // 8)
        if per_node > _MOST_DEVICES:
            drawn.append(text(12, y, f"… {per_node:,} devices in each node", "soft"))
            y += 17
    items = [(kinds[name], _axis(name, axes[name], strides[name], per_node)) for name in axes]
    shape = " x ".join(f"{name} {length:,}" for name, length in axes.items()) or "no axes"
    words = [text(12, y + 8, "a colour: in the group of rank 0 on that axis", "soft")] if axes else []
    title = f"{size:,} ranks on {plan.world.nodes:,} nodes: {shape}"
    return drawing(title, y + 16 + 17 * len(axes), [*drawn, *words, *legend(y + 26, items, 1)])


def _device(x: float, y: float, rank: int, kinds: list[str]) -> Iterator[Element]:
    yield tag("rect", x=x, y=y, width=38, height=29, rx=3, class_="box")
    yield text(x + 19, y + 14, f"{rank}", "middle small" if rank > 9999 else "middle")
    for number, kind in enumerate(kinds):
        yield bar(x + 2 + 34 * number / len(kinds), y + 19, 34 / len(kinds), kind, f"rank {rank}", 8)


def _axis(name: str, length: int, stride: int, per_node: int) -> str:
    where = "within a node" if (length - 1) * stride < per_node else "across nodes"
    return f"{name} {length:,}: ranks {f'{stride:,} apart' if stride > 1 else 'side by side'}, {where}"


# --- Time ------------------------------------------------------------------------------------------------------------


def timeline(step: Step, step_s: Interval) -> Element:
    """Draw the parts of a step one after the other, and its time with the interval below them."""
    parts = [(words, getattr(step, name), kind) for name, words, kind in _PARTS if getattr(step, name)]
    scale = Scale(0, step_s.high * 1.02, 12, RIGHT)
    drawn, y, start = [], 16.0, 0.0
    for words, seconds, kind in parts:
        value, x = f"{si(seconds, 's')}, {seconds / step.total:.1%}", scale.at(start)
        drawn += [text(12, y, words), text(RIGHT, y, value, "end")]
        drawn.append(bar(x, y + 6, scale.at(start + seconds) - x, kind, f"{words}: {value}"))
        y, start = y + 38, start + seconds
    low, high = scale.at(step_s.low), scale.at(step_s.high)
    words = f"{si(step_s.expected, 's')} ({si(step_s.low, 's')} to {si(step_s.high, 's')})"
    drawn += [
        text(12, y, "step", "strong"), text(RIGHT, y, words, "end strong"),
        bar(12, y + 6, scale.at(step_s.expected) - 12, "dim", f"step: {words}"),
        path([(low, y + 13), (high, y + 13)], "line ink"),
        *(path([(x, y + 8), (x, y + 18)], "line ink") for x in (low, high)),
    ]  # fmt: skip
    return drawing(f"Parts of a step, {words}", y + 48, [*x_axis(scale, 4, y + 28, "s"), *drawn])


def scaling(result: Simulation) -> Element:
    """Draw tokens per second over the number of devices, with intervals, and what no loss would be."""
    series = [("weak: a rank computes as much", "c1", result.weak_scaling)]
    series += [("strong: a step has as many samples", "c2", result.strong_scaling)]
    every = [each for _, _, scales in series for each in scales]
    counts = sorted({each.devices for each in every})
    x = Scale(counts[0] / 1.2, counts[-1] * 1.2, LEFT, RIGHT, True)
    low, high = min(each.inputs_per_s.low for each in every), max(each.inputs_per_s.high for each in every)
    rate = result.inputs_per_s.expected / result.devices
    y = Scale(low / 1.3, 1.3 * max(high, rate * counts[-1]), 222, 30, True)
    ideal = [(x.at(count), y.at(rate * count)) for count in counts]
    drawn = [*x_axis(x, 30, 222, ticks=counts), *y_axis(y), path(ideal, "thin dim")]
    for _, kind, scales in series:
        drawn += _curve(x, y, kind, scales)
    drawn += [text(12, 16, f"{result.unit}/s"), text(RIGHT, 252, "devices", "end")]
    items = [(kind, words) for words, kind, _ in series] + [("dim", "dashed: each device as fast as in the plan")]
    title = f"{result.unit.capitalize()} per second from {counts[0]:,} to {counts[-1]:,} devices, with intervals"
    return drawing(title, 314, [*drawn, *legend(272, items, 1)])


def _curve(x: Scale, y: Scale, kind: str, scales: list[Scaled]) -> Iterator[Element]:
    at = [x.at(each.devices) for each in scales]
    low, middle, high = (
        [(place, y.at(getattr(each.inputs_per_s, name))) for place, each in zip(at, scales, strict=True)]
        for name in ("low", "expected", "high")
    )
    yield path([*low, *reversed(high)], f"band {kind}")
    yield path(middle, f"line {kind}")
    for (place, height), each in zip(middle, scales, strict=True):
        words = f"{each.devices:,} devices: {si(each.inputs_per_s.expected)}/s, efficiency {each.efficiency:.0%}"
        yield circle(place, height, 3.5, f"fill {kind}", words)


# --- Roofline --------------------------------------------------------------------------------------------------------


def roofline(plan: Plan, device: Device, ranks: RankClass) -> Element:
    """Draw FLOP/s over FLOPs per byte for what `ranks` compute, below what the device's memory and peaks allow.

    A point is a product of one shape, or all vector operations of a phase and a format; larger ones take longer. What
    takes less than a thousandth of the time is left out.
    """
    machine = Machine(device, device if device.curve else find(MEASURED), plan.world.devices_per_node)
    groups: dict[object, list[Work]] = {}
    for each in ranks.work:
        shape = each.kind != "vector" and (each.sizes, each.batch, each.flops)
        groups.setdefault((each.phase, each.dtype, each.kind, shape), []).append(each)
    points = sorted((_point(group, machine) for group in groups.values()), key=lambda point: -point[-1])
    total = sum(seconds for *_, seconds in points)
    points = [point for point in points if point[2] and point[-1] > total / 1000]
    formats = sorted({number_format(each.dtype) for each in ranks.work if each.kind != "vector"})
    memory_rate, peaks = device.need("memory_bytes_per_s"), {name: device.need(f"flops.{name}") for name in formats}
    most = max(peaks.values())
    known = [most / memory_rate, *(per_byte for _, per_byte, *_ in points if per_byte < math.inf)]
    x = Scale(min(known) / 3, 3 * max(known), LEFT, RIGHT, True)
    y = Scale(min([most, *(rate for _, _, rate, _ in points)]) / 3, 2 * most, 222, 30, True)
    corner = max(x.low, y.low / memory_rate)
    drawn = [*x_axis(x, 30, 222), *y_axis(y)]
    for peak in peaks.values():
        ends = [(corner, corner * memory_rate), (peak / memory_rate, peak), (x.high, peak)]
        drawn.append(path([(x.at(per_byte), y.at(rate)) for per_byte, rate in ends], "line dim"))
    for work, per_byte, rate, seconds in points:
        kind = f"{'ring' if work.kind == 'vector' else 'fill'} {_PHASES[work.phase]}"
        what = f"{work.batch} x ({work.m} x {work.k} x {work.n})" if work.kind == "matmul" else work.kind
        words = f"{work.phase}, {what} in {work.dtype}: {si(rate, 'FLOP/s')}, {si(seconds, 's')}"
        place = min(x.at(per_byte), RIGHT - 6)
        drawn.append(circle(place, y.at(rate), 3 + 9 * math.sqrt(seconds / total), kind, words))
    roof = [f"{si(memory_rate, 'B/s')} of memory", *(f"{si(peak, 'FLOP/s')} in {name}" for name, peak in peaks.items())]
    lines = ["rings: vector operations, one FLOP for two numbers", *textwrap.wrap(f"roof: {', '.join(roof)}", 52)]
    lines += ["at the right edge: attention, whose bytes are not counted"] * (
        math.inf in [point[1] for point in points]
    )
    drawn += [text(12, 16, "FLOP/s"), text(RIGHT, 252, "FLOP per byte", "end")]
    drawn += [text(12, 293 + 17 * number, line, "soft") for number, line in enumerate(lines)]
    title = f"Roofline of {device.name}: products and vector operations, by phase"
    phases = [(kind, name) for name, kind in _PHASES.items()]
    return drawing(title, 284 + 17 * len(lines), [*drawn, *legend(272, phases, 3)])


def _point(group: list[Work], machine: Machine) -> tuple[Work, float, float, float]:
    """Return one of the works, FLOPs per byte (infinite if no bytes are known), FLOP/s and seconds of all."""
    num_bytes = sum(each.count * each.bytes_of_one for each in group)
    flops = sum(each.count * each.flops_of_one for each in group)
    if group[0].kind == "vector":
        bits = re.search(r"\d+", group[0].dtype)
        flops = num_bytes / (2 * int(bits[0] if bits else 8) / 8)
    seconds = sum(machine.seconds(each) for each in group)
    return group[0], flops / num_bytes if num_bytes else math.inf, flops / seconds, seconds


# --- Several plans ---------------------------------------------------------------------------------------------------


def pareto(points: Sequence[tuple[str, float, float, bool]], limit: float | None = None) -> Element:
    """Draw peak memory over step time for plans that are compared: label, seconds, bytes, and whether it fits.

    A line connects those that fit and that no other one beats in both; `limit` is the memory of a device, in bytes.
    """
    times, sizes = [seconds for _, seconds, _, _ in points], [num_bytes for _, _, num_bytes, _ in points]
    sizes += [] if limit is None else [limit]
    x = Scale(min(times) / 1.3, max(times) * 1.3, LEFT, RIGHT, True)
    y = Scale(min(sizes) / 1.3, max(sizes) * 1.3, 222, 30, True)
    best = _best(points)
    drawn = [*x_axis(x, 30, 222, "s"), *y_axis(y, "B")]
    if limit is not None:
        drawn.append(path([(LEFT, y.at(limit)), (RIGHT, y.at(limit))], "limit"))
        drawn.append(text(RIGHT, 16, f"limit {si(limit, 'B')}", "end strong"))
    places = [(x.at(points[number][1]), y.at(points[number][2])) for number in best]
    corners = [(after[0], before[1]) for before, after in itertools.pairwise(places)]
    steps = [point for pair in itertools.zip_longest(places, corners) for point in pair if point]
    drawn += [path(steps, "line c1")] * (len(steps) > 1)
    shown = [number for number in range(len(points)) if number in best or number < _MOST_NUMBERS]
    taken: list[tuple[float, float]] = []
    listed, line = [], 276.0
    for number, (label, seconds, num_bytes, fits) in enumerate(points):
        at = (x.at(seconds), y.at(num_bytes))
        words = f"{label}: {si(seconds, 's')}, {si(num_bytes, 'B')}" + ("" if fits else ", does not fit")
        drawn.append(circle(*at, 5, ("fill c1" if number in best else "fill c7") if fits else "ring c5", words))
        if number in shown:
            name = f"{shown.index(number) + 1}"
            taken.append(_free(at, -1 if number in best else 1, taken))
            drawn.append(text(*taken[-1], name, "strong middle"))
            for row, part in enumerate(textwrap.wrap(words, 46)):
                listed += [text(30, line, part), *([] if row else [text(24, line, name, "strong end")])]
                line += 15
    drawn += [text(12, 16, "peak memory of a device"), text(RIGHT, 252, "time of a step", "end"), *listed]
    items = [("c1", "not beaten"), ("c7", "fits"), ("c5", "does not fit")]
    title = f"Step time and peak memory of {len(points)} plans"
    return drawing(title, line + 16, [*drawn, *legend(line + 6, items, 3)])


def _best(points: Sequence[tuple[str, float, float, bool]]) -> list[int]:
    """Return the numbers of those that fit and that no other one beats, by time."""
    found: list[int] = []
    for number in sorted(range(len(points)), key=lambda number: points[number][1:3]):
        if points[number][3] and (not found or points[number][2] < points[found[-1]][2]):
            found.append(number)
    return found


def _free(at: tuple[float, float], side: int, taken: list[tuple[float, float]]) -> tuple[float, float]:
    """Return where a number has no line: left below a point (`side` -1) or right above it, beside those `taken`."""
    x, y = at[0] + 10 * side, at[1] + 4 - 8 * side
    while any(abs(x - other[0]) < 15 and abs(y - other[1]) < 11 for other in taken):
        y -= 11 * side
    return x, y
