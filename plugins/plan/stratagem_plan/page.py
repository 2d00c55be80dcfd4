"""Pages with everything in one HTML file, and their pictures as files of their own; and the page of a plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from attrs import asdict

from stratagem.errors import ConfigError
from stratagem_plan import pictures
from stratagem_plan.charts import STYLE, file_text, png_bytes, renderer, si, tag
from stratagem_plan.cost import Interval, predict
from stratagem_plan.devices import Device
from stratagem_plan.plan_file import Plan, RankClass, totals

if TYPE_CHECKING:
    from stratagem_plan.simulate import Scale, Simulation

#: Title, picture and note of each picture, by name.
Drawn: TypeAlias = dict[str, tuple[str, Element, str]]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem clamp(.75rem, 3vw, 2.5rem) 3rem; background: var(--paper);
  color: var(--ink); font: .9375rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { margin: 0 0 .25rem; font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; }
h2 { margin: 0 0 .5rem; font-size: 1rem; }
p { margin: .25rem 0; } .note { color: var(--soft); font-size: .875rem; }
code { font: .8125rem/1.5 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { margin: 0 0 .5rem; white-space: pre-wrap; user-select: all; }
.good, .bad { font-weight: 650; } .good { color: var(--good); } .bad { color: var(--bad); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.25rem, 1fr)); gap: 1rem; margin: 1.25rem 0; }
dt, dd + dd { color: var(--soft); font-size: .8125rem; } dd { margin: 0; font-size: 1.2rem; font-weight: 600; }
dd + dd { font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem; }
.tables { display: grid; gap: 1rem; margin: 1rem 0; }
figure, section { min-width: 0; margin: 0; padding: .9rem .75rem; border: 1px solid var(--faint); border-radius: 6px;
  background: var(--sheet); }
figure svg { display: block; width: 100%; max-width: 27rem; height: auto; margin: 0 auto; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; white-space: nowrap; font-size: .875rem; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--faint); text-align: right; }
th { color: var(--soft); font-weight: 500; } .left { text-align: left; }
ul { margin: 0; padding-left: 1.1rem; }
"""


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


def document(title: str, *body: Element) -> str:
    """Return a page that needs no other file."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title), tag("style", STYLE + _STYLE),
    )  # fmt: skip
    whole = tag("html", head, tag("body", *body), lang="en")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(whole, encoding="unicode", method="html") + "\n"


def figure(title: str, svg: Element, note: str = "") -> Element:
    """Return a picture with a title above and a note below."""
    return tag("figure", tag("h2", title), svg, *([tag("p", note, class_="note")] if note else ()))


def listed(title: str, items: Iterable[str]) -> Element:
    """Return a list with a title."""
    return tag("section", tag("h2", title), tag("ul", *(tag("li", each) for each in items)))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 0) -> Element:
    """Return a table that scrolls on a narrow screen; the first `words` columns have words, the others numbers."""

    def line(cells: Sequence[str], kind: str) -> Element:
        return tag("tr", *(tag(kind, cell, class_="left" if n < words else "") for n, cell in enumerate(cells)))

    body = tag("tbody", *(line(row, "td") for row in rows))
    return tag("div", tag("table", tag("thead", line(head, "th")), body), class_="scroll", tabindex=0)


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
        f"{name}: a plan",
        tag("p", "Plan of a training run", class_="note"),
        tag("h1", name),
        tag("p", tag("code", plan.script)),
        tag("p", "; ".join(facts)),
        *_verdict(plan, device),
        tag("dl", *_tiles(plan, device, result)),
        tag("div", *(figure(*each) for each in drawn.values()), class_="charts"),
        tag("div", *_tables(plan, result), class_="tables"),
    )


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
    def shown(number: float) -> str:
        return si(number, unit) if unit else f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"

    bounds = f"{shown(value.low)} to {shown(value.high)}"
    return tag("div", tag("dt", name), tag("dd", shown(value.expected)), tag("dd", bounds))


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
