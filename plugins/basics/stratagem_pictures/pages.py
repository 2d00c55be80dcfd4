"""A page with everything in one HTML file: its frame, figures, lists and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from stratagem_pictures import style
from stratagem_pictures.drawings import tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, *body: Element) -> str:
    """Return a page that needs no other file."""
    head = tag(
        "head", tag("meta", charset="utf-8"), tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title), tag("style", style("palette", "drawing", "page")),
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
