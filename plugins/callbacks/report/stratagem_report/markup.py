"""HTML that cannot be broken by what is put into it: everything that is not `Html` already is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

from stratagem.api.redaction import redact

#: Elements without content.
_VOID = {"meta", "input", "br"}


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return `value` as HTML; passwords in URLs go, wherever they were hidden."""
    return value if isinstance(value, Html) else Html(html.escape(str(redact("text", str(value)))))


def join(parts: Iterable[object]) -> Html:
    """Return `parts` one after the other."""
    return Html("".join(text(part) for part in parts))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """Return an element. ``class_`` is ``class``, other underscores are dashes; one that is None is left out."""
    given = (
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    opened = Html(f"<{name}{''.join(given)}>")
    return opened if name in _VOID else Html(f"{opened}{join(content)}</{name}>")
