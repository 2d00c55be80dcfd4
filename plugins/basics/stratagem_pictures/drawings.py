"""Parts of charts as SVG of 360 units width, which a phone shows in its natural size: elements, axes, bars, legends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from stratagem_pictures import style
from stratagem_pictures.scales import Scale, si

WIDTH = 360.0
#: Left and right end of what is drawn over an axis of its own labels.
LEFT, RIGHT = 54.0, 346.0


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


def drawing(title: str, height: float, parts: Iterable[Element], width: float = WIDTH) -> Element:
    """Return an SVG of `parts`; `title` describes it to screen readers."""
    box = f"0 0 {width:g} {math.ceil(height)}"
    namespace = "http://www.w3.org/2000/svg"
    return tag("svg", tag("title", title), *parts, xmlns=namespace, viewBox=box, role="img", aria_label=title)


def file_text(svg: Element) -> str:
    """Return a drawing as an SVG file of its own, with colours and a background."""
    _, _, width, height = svg.attrib["viewBox"].split()
    background = tag("rect", width=width, height=height, class_="sheet")
    whole = tag("svg", *svg, **dict(svg.attrib), width=width, height=height)
    whole[1:1] = [tag("style", style("palette", "drawing")), background]
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, encoding="unicode") + "\n"


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
