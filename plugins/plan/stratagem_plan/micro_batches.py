"""Sizes of batches: those that leave a step's samples as they are, and the largest one that fits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Sequence

from attrs import evolve

from stratagem.errors import ConfigError
from stratagem_plan.script import PlannedScript

#: No batch is searched that has more samples.
MOST = 2**20


def divisors(samples: int) -> list[int]:
    """Return the sizes of batches that `samples` divide into, in ascending order."""
    return [size for size in range(1, samples + 1) if samples % size == 0]


def divided(script: PlannedScript, samples: int, micro_batch: int) -> PlannedScript:
    """Return `script`, whose ranks read `samples` in a step, with batches of this size.

    Raises:
        ConfigError: the samples do not divide into such batches.
    """
    sizes = divisors(samples)
    if micro_batch not in sizes:
        raise ConfigError(
            f"--micro-batch is {micro_batch}, and a rank reads {samples} samples for a step",
            expected=f"one of {', '.join(map(str, sizes))}" if sizes else "batches with a tensor that has dimensions",
        )
    return evolve(script, micro_batch=micro_batch, accumulate=samples // micro_batch)


def largest(sizes: Sequence[int], limit: float, first: int, base: float) -> Generator[int, float, int | None]:
    """Find the largest size whose peak is within `limit`: yields a size to plan, and is sent its peak.

    Peaks grow about linearly, so a line through two of them tells which size to plan next. The search ends when a size
    fits that was planned and the next larger one does not; it returns None if none fits.

    Args:
        sizes: In ascending order.
        first: Position of the size to begin with.
        base: About as many bytes would be needed without any sample.
    """
    low, high, peaks = -1, len(sizes), dict[int, float]()
    position = first
    while high - low > 1:
        size = sizes[position]
        peaks[size] = yield size
        low, high = (position, high) if peaks[size] <= limit else (low, position)
        expected = _crossing(peaks if len(peaks) > 1 else {0: base} | peaks, limit)
        position = min(max(bisect_right(sizes, expected) - 1, low + 1), high - 1)
    return sizes[low] if low >= 0 else None


def _crossing(peaks: dict[int, float], limit: float) -> float:
    """Return the size at which the line through the two peaks nearest to `limit` reaches it."""
    one, other = sorted(sorted(peaks, key=lambda size: abs(peaks[size] - limit))[:2])
    slope = (peaks[other] - peaks[one]) / (other - one)
    if slope <= 0:
        return 2.0 * other if peaks[other] <= limit else 0.0
    return one + (limit - peaks[one]) / slope
