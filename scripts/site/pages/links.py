"""Links of `docs/` to files outside of it, which the site does not have."""

from __future__ import annotations

import re
from pathlib import Path

_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>\.\./[^)#\s]+)\)")


def without_sources(markdown: str, path: str, root: Path) -> str:
    """Return the page at `path` with links to files of the repository replaced by their paths."""

    def replace(match: re.Match[str]) -> str:
        target = (root / "docs" / path).parent / match["target"]
        resolved = target.resolve()
        if resolved.is_relative_to(root / "docs") or not resolved.exists():
            return match[0]
        name, text = resolved.relative_to(root).as_posix(), match["text"]
        return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"

    return _LINK.sub(replace, markdown)
