"""Compare a text over all ranks, by summing parts of its hash."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


# --- What each rank calls ----------------------------------------------------------------------------------------


def fingerprint(text: str) -> list[int]:
    """Return parts of a hash of `text` and their squares, to be summed over ranks; see [Note: comparing calls]."""
    code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    parts = [code >> shift & 0xFFFFF for shift in (0, 20, 40)]
    return [*parts, *(part * part for part in parts)]


def is_common(sums: Sequence[float], world_size: int) -> bool:
    """Whether all ranks have the same text, given the sums of their fingerprints."""
    parts, squares = [int(each) for each in sums[:3]], [int(each) for each in sums[3:6]]
    return all(world_size * square == part * part for part, square in zip(parts, squares, strict=True))
