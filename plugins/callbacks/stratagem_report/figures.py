"""Format numbers, and label the ticks of an axis."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def number(value: float) -> str:
    """Return `value` with four decimals, or with an exponent if it is too small or too large for that."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    return f"{value:,.4f}" if value == 0 or 1e-3 <= size < 1e5 else f"{value:.4e}"


def count(value: float) -> str:
    """Return an integer with thousands separators."""
    return f"{round(value):,}"


def rate(value: float) -> str:
    """Return a rate with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in its two or three largest units."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = timedelta(seconds=round(seconds))
    hours, rest = divmod(whole.seconds, 3600)
    minutes, left = divmod(rest, 60)
    if whole.days:
        return f"{whole.days} d {hours} h {minutes:02} min"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"


def byte_unit(most: float) -> tuple[int, str]:
    """Return size and name of the unit for values up to `most` bytes."""
    return next(((size, name) for size, name in _BYTES if most >= size), (1, "B"))


def labels(values: list[float]) -> list[str]:
    """Return distinct tick labels in one notation."""
    if not values:
        return []
    largest = max(abs(value) for value in values)
    gap = min((b - a for a, b in itertools.pairwise(values)), default=largest) or 1.0
    if largest and (largest < 1e-3 or largest >= 1e15):
        digits = max(0, math.floor(math.log10(largest)) - _magnitude(gap))
        return [f"{value:.{min(digits, 6)}e}" if value else "0" for value in values]
    scale, prefix = next(((size, name) for size, name in _PREFIXES if largest >= size * 10), (1.0, ""))
    decimals = max(0, -_magnitude(gap / scale))
    return [f"{value / scale:,.{decimals}f}{prefix if value else ''}" for value in values]


def log_labels(values: list[float]) -> list[str]:
    """Return tick labels for orders of magnitude, each in its own notation."""
    short = [f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") for value in values]
    return [f"{value:g}" if 1e-3 <= value < 1e5 else text for value, text in zip(values, short, strict=True)]


def _magnitude(gap: float) -> int:
    """Return the power of ten of the last digit that is needed to distinguish numbers `gap` apart."""
    power = math.floor(math.log10(gap) + 1e-9)
    leading = gap / 10.0**power
    return power if abs(leading - round(leading)) < 1e-6 else power - 1
