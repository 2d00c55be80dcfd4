"""What a plugin looks like from outside: options with types, defaults and their ``#:`` docs, capabilities, hooks."""

from __future__ import annotations

import inspect
import re
from typing import Any

import attrs

from stratagem.config import describe as describe_type
from stratagem.config import option_types, options
from stratagem.plugin import Capabilities
from stratagem.registry import Entry
from stratagem.resolver import hook_implementations, make


def describe(entry: Entry) -> dict[str, Any]:
    """Load the plugin of `entry` and return everything a user may want to know, as plain data."""
    target = entry.load()
    is_class = isinstance(target, type)
    plugin = None if is_class else make(entry, {})
    cls = target if is_class else type(plugin)
    capabilities = getattr(cls, "capabilities", Capabilities())
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "summary": _first_sentence(cls),
        "options": [_option(cls, name, field, plugin) for name, field in options(cls).items()],
        "provides": sorted(capabilities.provides),
        "requires": sorted(capabilities.requires),
        "conflicts": sorted(capabilities.conflicts),
        "answers": _hooks(cls, wrapper=False),
        "wraps": _hooks(cls, wrapper=True),
    }


def option_docs(cls: type[Any]) -> dict[str, str]:
    """Return the ``#:`` comments over the fields of `cls` and its bases, by field name; no source, no docs."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = inspect.getsource(base) if base is not object else ""
        except (OSError, TypeError):
            continue
        for match in re.finditer(r"((?:^[ \t]*#:.*\n)+)^[ \t]*(\w+)[ \t]*:", source, re.MULTILINE):
            lines = [line.strip().removeprefix("#:").strip() for line in match[1].strip().splitlines()]
            docs[match[2]] = " ".join(lines)
    return docs


def render(description: dict[str, Any]) -> str:
    """Return `description` as text for people."""
    origin = f"{description['distribution']} {description['version']}, {description['value']}"
    lines = [f"{description['kind']} {description['name']}  ({origin})", f"  {description['summary']}"]
    if description["options"]:
        lines.append("options:")
        for option in description["options"]:
            lines.append(f"  {option['name']} = {option['default']}  ({option['type']})")
            lines += [f"      {option['doc']}"] if option["doc"] else []
    for title in ("provides", "requires", "conflicts", "answers", "wraps"):
        if description[title]:
            lines.append(f"{title}: {', '.join(description[title])}")
    return "\n".join(lines)


def _option(cls: type[Any], name: str, field: attrs.Attribute[Any], preset: Any) -> dict[str, str]:
    default = _default(field) if preset is None else repr(getattr(preset, field.name))
    return {
        "name": name,
        "type": describe_type(option_types(cls)[name]),
        "default": default,
        "doc": option_docs(cls).get(field.name, ""),
    }


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "(required)"
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "(computed)" if default.takes_self else repr(default.factory())
    return repr(default)


def _hooks(cls: type[Any], *, wrapper: bool) -> list[str]:
    implementations = hook_implementations(cls, of_class=True)
    return sorted(name for name, marker in implementations.items() if bool(marker["wrapper"]) is wrapper)


def _first_sentence(cls: type[Any]) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    return text.split(". ")[0].rstrip(".") + "." if text else ""
