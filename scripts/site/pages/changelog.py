"""The page of changes: those of the next version from `docs/changes`, then CHANGELOG.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def page(root: Path) -> str:
    """Return the page."""
    specification = importlib.util.spec_from_file_location("changelog", root / "scripts" / "changelog.py")
    assert specification is not None
    assert specification.loader is not None
    changelog = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(changelog)
    parts = ["# Changes\n"]
    if paths := changelog.fragments(root):
        parts += ["## Not released yet\n", changelog.by_kind(paths)]
    released = root / "CHANGELOG.md"
    parts += [released.read_text().removeprefix(changelog.TITLE)] if released.exists() else []
    return "\n".join(parts)
