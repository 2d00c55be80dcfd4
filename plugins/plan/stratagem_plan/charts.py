"""Parts of charts as SVG of 360 units width, which a phone shows in its natural size: elements, axes, bars, legends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from attrs import frozen

from stratagem.errors import ConfigError

WIDTH = 360.0
#: Left and right end of what is drawn over an axis of its own labels.
LEFT, RIGHT = 54.0, 346.0
_PREFIXES = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E")

#: Colours of both schemes, for pages and for single pictures: the class ``c1`` is the first colour.
STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --sheet: #fff; --ink: #1d2127; --soft: #5d6570; --faint: #dfe2e6;
  --good: #1b7f4b; --bad: #c0322b; --c1: #2563b8; --c2: #d9772b; --c3: #1f8a70; --c4: #8a4fbf; --c5: #c2417c;
  --c6: #9a8414; --c7: #5aa9cc; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --sheet: #1d2127; --ink: #e6e8ea; --soft: #a3acb6;
  --faint: #39414a; --good: #54c78a; --bad: #ff7b72; --c1: #6ea8fe; --c2: #f59e5b; --c3: #4fc9a8; --c4: #c79bf2;
  --c5: #f27ea9; --c6: #d3bf5a; --c7: #a9dcf2; } }
svg text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg .strong { font-weight: 650; }
svg .small { font-size: 9px; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
svg .rule { stroke: var(--faint); fill: none; }
svg .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; fill: none; }
svg .line { stroke: currentColor; stroke-width: 2; fill: none; }
svg .thin { stroke: currentColor; stroke-width: 1.2; stroke-dasharray: 3 3; fill: none; }
svg .fill { fill: currentColor; stroke: var(--sheet); stroke-width: .7; }
svg .band { fill: currentColor; opacity: .18; }
svg .ring { fill: var(--sheet); stroke: currentColor; stroke-width: 1.8; }
svg .box { fill: var(--paper); stroke: var(--faint); }
svg .sheet { fill: var(--sheet); }
svg .ink { color: var(--ink); } svg .dim { color: var(--soft); }
svg .c1 { color: var(--c1); } svg .c2 { color: var(--c2); } svg .c3 { color: var(--c3); } svg .c4 { color: var(--c4); }
svg .c5 { color: var(--c5); } svg .c6 { color: var(--c6); } svg .c7 { color: var(--c7); }
"""


def tag(name: str, /, *children: Element | str, **attributes: object) -> Element:
    """Return an element of HTML or SVG; ``class_`` is the attribute ``class``, and numbers get one decimal."""
    texts = {key: f"{round(each, 1):g}" if isinstance(each, float) else str(each) for key, each in attributes.items()}
    found = Element(name, {key.rstrip("_").replace("_", "-"): text for key, text in texts.items()})
    for child in children:
        if isinstance(child, Element):
            found.append(child)
        elif len(found):
            found[-1].tail = (found[-1].tail or "") + child
        else:
            found.text = (found.text or "") + child
    return found


def drawing(title: str, height: float, parts: Iterable[Element]) -> Element:
    """Return an SVG of `parts`; `title` describes it to screen readers."""
    box = f"0 0 {WIDTH:g} {math.ceil(height)}"
    namespace = "http://www.w3.org/2000/svg"
    return tag("svg", tag("title", title), *parts, xmlns=namespace, viewBox=box, role="img", aria_label=title)


def file_text(svg: Element) -> str:
    """Return a drawing as an SVG file of its own, with colours and a background."""
    _, _, width, height = svg.attrib["viewBox"].split()
    background = tag("rect", width=width, height=height, class_="sheet")
    whole = tag("svg", *svg, **dict(svg.attrib), width=width, height=height)
    whole[1:1] = [tag("style", STYLE), background]
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, encoding="unicode") + "\n"


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
    colors = dict(re.findall(r"(--\w+): (#\w+)", STYLE.partition("@media")[0]))
    plain = re.sub(r"var\((--\w+)\)", lambda found: colors[found[1]], file_text(svg))
    return bytes(renderer().svg_to_bytes(svg_string=plain, zoom=3))


def text(x: float, y: float, words: str, kind: str = "") -> Element:
    """Return `words` at the left end and baseline `x`, `y`; `kind` is CSS classes: end, middle, soft, small, strong."""
    return tag("text", words, x=x, y=y, class_=kind) if kind else tag("text", words, x=x, y=y)


def path(points: Iterable[tuple[float, float]], kind: str) -> Element:
    """Return a line through `points`."""
    return tag("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), class_=kind)


def circle(x: float, y: float, radius: float, kind: str, title: str) -> Element:
    """Return a point, with a title for a reader that points at it."""
    return tag("circle", tag("title", title), cx=x, cy=y, r=radius, class_=kind)


def bar(x: float, y: float, width: float, kind: str, title: str, height: float = 14.0) -> Element:
    """Return a part of a bar, wide enough to be seen."""
    return tag("rect", tag("title", title), x=x, y=y, width=max(width, 2.0), height=height, class_=f"fill {kind}")


def si(value: float, unit: str = "") -> str:
    """Return `value` with three digits and a decimal prefix: "8.07 GB"."""
    size = abs(float(f"{value:.3g}"))
    group = min(6, max(-3, math.floor(math.log10(size) / 3 + 1e-9))) if size else 0
    return f"{value / 1000.0**group:.3g} {_PREFIXES[group + 3]}{unit}".strip()


@frozen
class Scale:
    """Map values from `low` to `high` to positions from `start` to `end`; values beyond are drawn at the end."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the position of `value`."""
        if self.logarithmic:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five round numbers."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for digits in ((1,), (1, 2, 5)):
                found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
                found = [each for each in found if self.low <= each <= self.high]
                if len(found) >= 3:
                    return found[:: math.ceil(len(found) / 6)]
        least = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
        return [step * each for each in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def x_axis(
    scale: Scale, top: float, bottom: float, unit: str = "", ticks: Sequence[float] | None = None
) -> list[Element]:
    """Return rules from `top` to `bottom` with labels in 16 units of height below; what has no unit gets no prefix."""
    drawn: list[Element] = []
    end = -math.inf
    for each in scale.ticks() if ticks is None else ticks:
        words = si(each, unit) if unit else f"{each:,g}"
        if (x := scale.at(each)) > end + 7 * len(words):
            end = x
            drawn += [path([(x, top), (x, bottom)], "rule"), text(x, bottom + 14, words, "middle soft")]
    return drawn


def y_axis(scale: Scale, unit: str = "") -> list[Element]:
    """Return rules from LEFT to RIGHT with labels left of them."""
    rules = [path([(LEFT, scale.at(each)), (RIGHT, scale.at(each))], "rule") for each in scale.ticks()]
    labels = [text(LEFT - 5, scale.at(each) + 4, si(each, unit), "end soft") for each in scale.ticks()]
    return [*rules, *labels]


def legend(y: float, items: list[tuple[str, str]], columns: int = 2) -> Iterator[Element]:
    """Yield colours with what they are, in lines of 17 units; `items` have CSS classes and words."""
    for number, (kind, words) in enumerate(items):
        x, line = 12 + number % columns * (WIDTH - 12) / columns, y + 17 * (number // columns)
        yield tag("rect", x=x, y=line - 9, width=10, height=10, class_=f"fill {kind}")
        yield text(x + 15, line, words)
