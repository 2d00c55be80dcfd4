"""Write a page, and its pictures as files of their own; and the page of a plan."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from xml.etree.ElementTree import Element

from attrs import asdict

from stratagem.errors import ConfigError
from stratagem_pictures import style
from stratagem_pictures.drawings import file_text, tag
from stratagem_pictures.pages import document, figure, listed, table
from stratagem_pictures.scales import number, si
from stratagem_plan import pictures
from stratagem_plan.cost import Interval, predict
from stratagem_plan.devices import Device
from stratagem_plan.plan_file import Plan, RankClass, totals

if TYPE_CHECKING:
    from stratagem_plan.simulate import Scale, Simulation

#: Title, picture and note of each picture, by name.
Drawn: TypeAlias = dict[str, tuple[str, Element, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `save` reads."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="write each picture as an SVG file")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="write each picture as a PNG file")


def check(arguments: argparse.Namespace) -> None:
    """Refuse files and folders that cannot be written, before what they are for is computed.

    Raises:
        ConfigError: names the option; or PNG files are asked for, and what draws them is not installed.
    """
    for name, path in vars(arguments).items():
        if name in ("json", "html", "measure") and path is not None:
            if not path.parent.is_dir():
                found = f"--{name} is '{path}', and the folder '{path.parent}' does not exist"
                raise ConfigError(found, do="make it first")
            if path.is_dir():
                raise ConfigError(f"--{name} is '{path}', which is a folder", expected="a file")
        if name in ("svg", "png") and path is not None and path.exists() and not path.is_dir():
            raise ConfigError(f"--{name} is '{path}', which is a file", expected="a folder")
    if arguments.png:
        renderer()


def wanted(arguments: argparse.Namespace) -> bool:
    """Whether `arguments` ask for a page or pictures."""
    return bool(arguments.html or arguments.svg or arguments.png)


def save(arguments: argparse.Namespace, text: str, drawn: Drawn) -> None:
    """Write the page `text` and the pictures to the files that `arguments` ask for."""
    if arguments.html:
        arguments.html.write_text(text, encoding="utf-8")
    for name, (_, svg, _) in drawn.items():
        for kind, folder, bytes_of in (("svg", arguments.svg, _svg_bytes), ("png", arguments.png, png_bytes)):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{name}.{kind}").write_bytes(bytes_of(svg))


def _svg_bytes(svg: Element) -> bytes:
    return file_text(svg).encode()


def write(arguments: argparse.Namespace, plan: Plan, device: Device, result: Simulation | None = None) -> None:
    """Write the page of a plan and the pictures that `arguments` ask for; `result` adds those of the time."""
    if wanted(arguments):
        drawn = _drawn(plan, device, result)
        save(arguments, _page(plan, device, result, drawn), drawn)


def renderer() -> Any:
    """Return the module that turns SVG into PNG.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "--png is set, and resvg-py is not installed", expected="what turns SVG into PNG",
            do="run `pip install stratagem-plan[png]`, or pass --svg",
        ) from None  # fmt: skip
    return resvg_py


def png_bytes(svg: Element) -> bytes:
    """Return a drawing as a PNG file of 1,080 pixels width, in the light colours: the renderer knows no variables."""
    colors = dict(re.findall(r"(--\w+): (#\w+)", style("palette").partition("@media")[0]))
    plain = re.sub(r"var\((--\w+)\)", lambda found: colors[found[1]], file_text(svg))
    return bytes(renderer().svg_to_bytes(svg_string=plain, zoom=3))


# --- A plan ----------------------------------------------------------------------------------------------------------


def _drawn(plan: Plan, device: Device, result: Simulation | None) -> Drawn:
    """Return the pictures that the plan and the prediction have data for."""
    found: Drawn = {}
    if all(each.at_peak for each in plan.classes):
        note = "When a device holds most, and when the step has ended."
        found["memory"] = ("Memory", pictures.memory(plan, device.memory_bytes), note)
    if result:
        step, step_s = predict(plan, device)
        note = f"Of the ranks that need longest. Communication takes {si(step.communication, 's')}, hidden or not."
        found["timeline"] = ("Time of a step", pictures.timeline(step, step_s), note)
        if result.weak_scaling:
            found["scaling"] = ("Scaling", pictures.scaling(result), "The shaded areas are intervals.")
        if any(work.kind != "vector" for work in step.rank_class.work):
            found["roofline"] = ("Roofline", pictures.roofline(plan, device, step.rank_class), "")
    if plan.mesh and plan.world.world_size > 1:
        found["mesh"] = ("Ranks", pictures.mesh(plan), "")
    return found


def _page(plan: Plan, device: Device, result: Simulation | None, drawn: Drawn) -> str:
    name = Path(plan.script.split(" ")[0]).name
    facts = [f"{kind} {choice}" for kind, choice in plan.stack.items() if choice]
    facts += [f"{plan.world.world_size:,} x {device.name}", f"nodes: {plan.world.nodes:,}"]
    return document(
        f"{name}: a plan", tag("p", "Plan of a training run", class_="note"), tag("h1", name),
        tag("p", tag("code", plan.script)), tag("p", "; ".join(facts)), *_verdict(plan, device),
        tag("dl", *_tiles(plan, device, result)),
        tag("div", *(figure(*each) for each in drawn.values()), class_="charts"),
        tag("div", *_tables(plan, result), class_="tables"),
    )  # fmt: skip


def _verdict(plan: Plan, device: Device) -> Iterator[Element]:
    from stratagem_plan.result import verdict

    limit = device.memory_bytes
    if limit is None:
        yield tag("p", f"The memory of {device.name} is not known: whether it fits is not said.", class_="note")
    elif any(each.peak for each in plan.classes):
        first, *ways = verdict(asdict(plan), limit)
        yield tag("p", first, class_="good" if first.startswith("fits") else "bad")
        yield tag("ul", *(tag("li", each.strip()) for each in ways))


def _tiles(plan: Plan, device: Device, result: Simulation | None) -> Iterator[Element]:
    """Yield the most important figures: name, value, interval."""
    if peak := max(each.peak for each in plan.classes):
        limit = device.memory_bytes
        share = [tag("dd", f"{peak / limit:.1%} of {si(limit, 'B')}")] if limit else []
        yield tag("div", tag("dt", "peak memory"), tag("dd", si(peak, "B")), *share)
    flops = max(sum(work.count * work.flops_of_one for work in each.work) for each in plan.classes)
    inputs = f"samples: {plan.inputs.samples:,}, tokens: {plan.inputs.tokens:,}"
    yield tag("div", tag("dt", "a step of a rank"), tag("dd", si(flops, "FLOP")), tag("dd", inputs))
    if result:
        yield _tile("time of a step", result.step_s, "s")
        yield _tile(f"{result.unit}/s", result.inputs_per_s)
        yield _tile("MFU, percent", result.model_flops_utilization.times(100))
        for name, value in (("days", result.days), ("device hours", result.device_hours), ("cost", result.cost)):
            if value:
                yield _tile(name, value)


def _tile(name: str, value: Interval, unit: str = "") -> Element:
    low, expected, high = (si(each, unit) if unit else number(each) for each in (value.low, value.expected, value.high))
    return tag("div", tag("dt", name), tag("dd", expected), tag("dd", f"{low} to {high}"))


def _tables(plan: Plan, result: Simulation | None) -> Iterator[Element]:
    for each in plan.classes:
        if each.collectives:
            head = ("phase", "collective", "axis", "link", "ranks", "calls", "bytes")
            yield tag("section", tag("h2", f"Messages of {pictures.name_of(each)}"), table(head, [*_traffic(each)], 4))
    if result:
        columns = ("nodes", "devices", "step", "from", "to", f"{result.unit}/s", "from", "to", "efficiency")
        for title, scales in (("Weak scaling", result.weak_scaling), ("Strong scaling", result.strong_scaling)):
            if scales:
                yield tag("section", tag("h2", title), table(columns, [*map(_scale, scales)]))
    assumed = result.assumptions if result else plan.assumptions
    yield listed("Assumptions", assumed)


def _scale(each: Scale) -> tuple[str, ...]:
    times = (si(getattr(each.step_s, name), "s") for name in ("expected", "low", "high"))
    rates = (si(getattr(each.inputs_per_s, name)) for name in ("expected", "low", "high"))
    return (f"{each.nodes:,}", f"{each.devices:,}", *times, *rates, f"{each.efficiency:.0%}")


def _traffic(ranks: RankClass) -> Iterator[tuple[str, ...]]:
    for (*words, size), (calls, num_bytes) in totals(ranks.collectives).items():
        yield (*words, f"{size:,}", f"{calls:,.0f}", f"{num_bytes:,.0f}")
