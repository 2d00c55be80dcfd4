"""Markdown that several pages have: options with type, default and text; sentences; escaped characters."""

from __future__ import annotations

import html
import re


class MissingTextError(Exception):
    """A plugin, an option, an argument or a page has no text to show: the build fails."""


def required(text: str | None, owner: str) -> str:
    """Return `text`, which describes `owner`.

    Raises:
        MissingTextError: there is none.
    """
    if not (text or "").strip():
        raise MissingTextError(f"{owner} has no text; expected a sentence for its reader; write it in the code")
    return " ".join((text or "").split())


def prose(text: str) -> str:
    """Return what a docstring or ``#:`` comment says as Markdown: double backticks become single ones."""
    code = re.compile(r"(``.+?``|`[^`]+`)")
    parts = code.split(text)
    return "".join(
        code_span(part.strip("`")) if code.fullmatch(part) else re.sub(r"([*_])", r"\\\1", part.replace("<", "&lt;"))
        for part in parts
    )


def code_span(text: str) -> str:
    """Return `text` as code of a line, in a table cell too."""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def option(name: str, kind: str, default: str, text: str, owner: str, level: int = 3) -> str:
    """Return the section of an option or an argument: a heading, its type (Markdown) and default, its text."""
    shown = "required" if default == "(required)" else f"default {code_span(default)}"
    sentence = prose(required(text, f"option {owner}.{name}"))
    return (
        f"{'#' * level} `{name}` {{ #{anchor(owner, name)} .option }}\n\n"
        f'<p class="option-type" markdown="1">{kind}, {shown}</p>\n\n{sentence}\n'
    )


def anchor(*words: str) -> str:
    """Return the name of a heading, for links."""
    return "-".join(re.sub(r"[^A-Za-z0-9_]+", "-", word).strip("-") for word in words if word)


def as_html(text: str) -> str:
    """Return plain `text` with the characters of HTML escaped, and with names between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
