"""Words of messages."""

from __future__ import annotations

from typing import Any


def few(items: list[Any], limit: int = 4) -> str:
    """Return the first `limit` of `items` as text, and how many there are more."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return f"{', '.join(map(str, items[:limit]))}{more}"
