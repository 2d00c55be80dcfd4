"""Scales of charts: where a value is drawn, and which round numbers have a label."""

from __future__ import annotations

import math

from attrs import frozen

_PREFIXES = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E")


@frozen
class Scale:
    """Map values from `low` to `high` to positions from `start` to `end`; values beyond are drawn at the end."""

    low: float
    high: float
    start: float = 0.0
    end: float = 1.0
    logarithmic: bool = False

    def at(self, value: float) -> float:
        """Return the position of `value`."""
        if self.logarithmic:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, part)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return about five round numbers."""
        return _log_ticks(self.low, self.high) if self.logarithmic else _ticks(self.low, self.high)


def number(value: float) -> str:
    """Return `value` with three digits, or more where it is 1,000 or larger."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def si(value: float, unit: str = "") -> str:
    """Return `value` with three digits and a decimal prefix: "8.07 GB"."""
    size = abs(float(f"{value:.3g}"))
    group = min(6, max(-3, math.floor(math.log10(size) / 3 + 1e-9))) if size else 0
    return f"{value / 1000.0**group:.3g} {_PREFIXES[group + 3]}{unit}".strip()


def _ticks(low: float, high: float) -> list[float]:
    step = _round_step((high - low) / 4)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten from `low` to `high`; if there are few, round numbers between them, too."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / 6))
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [d * 10.0**e for e in range(first, last + 1, every) for d in digits if low <= d * 10.0**e <= high]
        if len(found) >= 3 or every > 1:
            return found
    return found if len(found) >= 2 else [tick for tick in _ticks(low, high) if tick > 0]


def _round_step(step: float) -> float:
    if step <= 0 or not math.isfinite(step):
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * 0.999) * power
