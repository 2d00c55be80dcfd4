"""What the page of hooks shows beside its own text: signatures with types, and the plugins that implement each hook."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from pages.plugins import addresses, all_plugins, by_class
from pages.text import MissingTextError, anchor
from stratagem.discovery import registry
from stratagem.stack.plugins import hook_functions, hook_implementations, hook_specifications

#: Where a heading of any level begins.
_SECTIONS = re.compile(r"^(?=##)", re.MULTILINE)
_HEADING = re.compile(r"^### `(\w+)\(.*\)`$", re.MULTILINE)


def with_types(markdown: str, root: Path) -> str:
    """Return the page with a typed signature under each heading, and the list of plugins at the end of each section."""
    implemented = _implementations(root)
    documented = set(_HEADING.findall(markdown))
    if missing := set(hook_specifications()) - documented:
        raise MissingTextError(f"docs/hooks.md lacks {', '.join(sorted(missing))}; expected a section for each hook")

    beginning, *sections = _SECTIONS.split(markdown)
    return beginning + "".join(_complete(section, implemented) for section in sections)


def _complete(section: str, implemented: dict[str, list[str]]) -> str:
    """Return a section with its signature and its plugins, if it is that of a hook."""
    match = _HEADING.match(section)
    if match is None:
        return section
    name, text = match[1], section[match.end() :].strip()
    used = f"\n\nImplemented by {', '.join(implemented[name])}." if implemented.get(name) else ""
    return f"### `{name}` {{ #{anchor(name)} }}\n\n```python\n{_signature(name)}\n```\n\n{text}{used}\n\n"


def _signature(name: str) -> str:
    signature = inspect.signature(hook_functions()[name])
    text = f"def {name}{signature}".replace("'", "")
    if len(text) <= 90:
        return text
    inner = "".join(f"    {parameter},\n" for parameter in map(str, signature.parameters.values()))
    return f"def {name}(\n{inner}) -> {signature.return_annotation}".replace("'", "")


def _implementations(root: Path) -> dict[str, list[str]]:
    """Return links to the plugins that implement each hook, one for each class."""
    found: dict[str, list[str]] = {}
    plugins, pages = all_plugins(root), addresses(root)
    for kind in registry.kinds():
        for cls, listed in by_class([each for each in plugins if each.entry.kind == kind]).items():
            name = listed[0].entry.name
            for hook in hook_implementations(cls, of_class=True):
                found.setdefault(hook, []).append(f"[`{name}`]({pages[kind, name]})")
    return found
