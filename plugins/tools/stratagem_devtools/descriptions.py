"""Describe one plugin: options with types, defaults and their ``#:`` docs, capabilities, hooks."""

from __future__ import annotations

import inspect
from typing import Any

from stratagem.discovery.registry import Entry
from stratagem.stack.construction import make
from stratagem.stack.description import traits
from stratagem.stack.plugins import hook_implementations
from stratagem_devtools.plugin_table import row
from stratagem_trainer.option_texts import as_written, help_lines, option_texts
from stratagem_trainer.terminal import bold, width, wrapped


def describe(entry: Entry) -> dict[str, Any]:
    """Load the plugin of `entry` and return its description as plain data."""
    target = entry.load()
    preset = None if isinstance(target, type) else make(entry, {})
    cls = target if preset is None else type(preset)
    return {
        **row(entry),
        "summary": _first_sentence(cls),
        "options": [*option_texts(cls, preset)],
        **traits(_capabilities(cls, preset), hook_implementations(cls, of_class=True)),
    }


def _capabilities(cls: type[Any], preset: Any) -> Any:
    """Return the capabilities of the `preset`, else those of `cls` with default options."""
    found = getattr(cls if preset is None else preset, "capabilities", None)
    return cls().capabilities if isinstance(found, property) else found


def _first_sentence(cls: type[Any]) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    return text.split(". ")[0].rstrip(".") + "." if text else ""


def render(description: dict[str, Any]) -> str:
    """Return `description` as text for people."""
    origin = f"{description['distribution']} {description['version']}, {description['value']}"
    title = f"{description['kind']} {description['name']}"
    lines = [bold(title), wrapped(f"({origin})", "  "), wrapped(description["summary"], "  ")]
    if width() is None:
        lines[:2] = [f"{title}  ({origin})"]
    if description["options"]:
        lines.append(bold("options:"))
        for option in description["options"]:
            head = f"{option['name']} = {as_written(option['default'])}  ({option['type']})"
            lines += help_lines(head, option["doc"])
    for title in ("provides", "requires", "conflicts", "answers", "wraps", "acts"):
        if description[title]:
            lines.append(wrapped(f"{title}: {', '.join(description[title])}", "", "  "))
    return "\n".join(lines)
