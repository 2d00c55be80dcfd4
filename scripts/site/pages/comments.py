"""Let griffe take the `#:` comments above an attribute for its docstring, as the descriptions of options do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Reads ``#:`` comments."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Set the docstring of `attr`, if it has none."""
        if attr.docstring is not None or attr.lineno is None or not isinstance(attr.filepath, Path):
            return
        text: list[str] = []
        lines = attr.lines_collection[attr.filepath]
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            text.insert(0, line.strip().removeprefix("#:").strip())
        if text:
            attr.docstring = griffe.Docstring(" ".join(text), parent=attr)
