"""Record the curves and totals of a run in bounded memory.

[Note: buckets]
A curve has at most `LIMIT` buckets. A bucket covers ``width`` steps and has the minimum, mean and maximum of their
values; at first ``width`` is 1. When there are too many buckets, ``width`` doubles and adjacent buckets are merged, so
that all parts of a run have the same resolution.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from attrs import asdict, define, field

#: Maximum buckets of one curve: more make checkpoints larger, and screens have fewer pixels.
LIMIT = 2000
#: Larger values count as infinite: their differences would overflow.
_HUGE = 1e300


@define(eq=False)
class Series:
    """One curve over optimizer steps; see [Note: buckets]."""

    #: The stage that logged it: "train" or "validate".
    stage: str = "train"
    width: int = 1
    #: Mean step of each bucket.
    steps: list[float] = field(factory=list)
    lows: list[float] = field(factory=list)
    means: list[float] = field(factory=list)
    highs: list[float] = field(factory=list)
    counts: list[int] = field(factory=list)
    #: The last value, which may be NaN; None before the first.
    last: float | None = None
    #: Minimum and maximum, each with its step.
    least: tuple[float, int] | None = None
    most: tuple[float, int] | None = None
    #: Number of values that were NaN or infinite, and the step of the first.
    not_finite: int = 0
    first_not_finite: int | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def values_seen(self) -> int:
        return sum(self.counts) + self.not_finite

    def add(self, step: int, value: float) -> None:
        """Add `value` at `step`, which must not be before the last one."""
        self.last = value
        if not abs(value) < _HUGE:
            self.not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
            return
        if self.least is None or value < self.least[0]:
            self.least = (value, step)
        if self.most is None or value > self.most[0]:
            self.most = (value, step)
        self._append(step, value, value, value, 1)
        if len(self) > LIMIT:
            self._coarsen(LIMIT * 3 // 4)

    def thinned(self, limit: int, factor: float = 1.0) -> Series:
        """Return a copy with at most `limit` buckets, and values multiplied by a positive `factor`."""
        copy = Series(
            self.stage, self.width, list(self.steps), [v * factor for v in self.lows], [v * factor for v in self.means],
            [v * factor for v in self.highs], list(self.counts), not_finite=self.not_finite,
            first_not_finite=self.first_not_finite,
        )  # fmt: skip
        copy._coarsen(limit)
        return copy

    def _append(self, step: float, low: float, mean: float, high: float, count: int) -> None:
        """Add a bucket at the end, or merge it into the last one if both cover the same steps."""
        if not self.steps or self.steps[-1] // self.width != step // self.width:
            for values, value in zip(self._columns(), (step, low, mean, high, count), strict=True):
                values.append(value)
            return
        total = self.counts[-1] + count
        self.steps[-1] += (step - self.steps[-1]) * count / total
        self.means[-1] += (mean - self.means[-1]) * count / total
        self.lows[-1], self.highs[-1] = min(self.lows[-1], low), max(self.highs[-1], high)
        self.counts[-1] = total

    def _coarsen(self, limit: int) -> None:
        while len(self) > limit:
            buckets = list(zip(*self._columns(), strict=True))
            self.width *= 2
            for values in self._columns():
                values.clear()
            for bucket in buckets:
                self._append(*bucket)

    def _columns(self) -> tuple[list[Any], ...]:
        return self.steps, self.lows, self.means, self.highs, self.counts

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, and the buckets as one tensor with five rows."""
        names = ("stage", "width", "last", "not_finite", "first_not_finite")
        with torch.inference_mode(False):
            buckets = torch.tensor(self._columns(), dtype=torch.float64, device="cpu")
        extremes = {"least": self.least and list(self.least), "most": self.most and list(self.most)}
        return {name: getattr(self, name) for name in names} | extremes | {"buckets": buckets}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Series:
        """Restore a series from its `state_dict`."""
        state = dict(state)
        steps, lows, means, highs, counts = state.pop("buckets").tolist()
        for name in ("least", "most"):
            state[name] = state[name] and (state[name][0], int(state[name][1]))
        columns = {"steps": steps, "lows": lows, "means": means, "highs": highs, "counts": [int(c) for c in counts]}
        return cls(**state, **columns)


_CURVES = ("metrics", "rates", "speed", "memory")


@define(eq=False)
class History:
    """All curves and totals of a run, including the fits that it was resumed from."""

    #: Logged metrics by name.
    metrics: dict[str, Series] = field(factory=dict)
    #: Learning rates by parameter group.
    rates: dict[str, Series] = field(factory=dict)
    #: "steps/s" and "samples/s".
    speed: dict[str, Series] = field(factory=dict)
    #: Bytes, by kind of memory.
    memory: dict[str, Series] = field(factory=dict)
    #: Results of validation and test after training, by name.
    results: dict[str, float] = field(factory=dict)
    #: Seconds of all fits, and those spent in training.
    seconds: float = 0.0
    train_seconds: float = 0.0
    #: Optimizer steps and batches of those seconds.
    steps: int = 0
    batches: int = 0
    #: First step of the record, and steps at which the run was resumed.
    first_step: int = 0
    resumed: list[int] = field(factory=list)
    #: How the last fit ended: "status", "detail", and for an exception "error" and "frames".
    outcome: dict[str, Any] = field(factory=dict)

    def put(self, curves: str, name: str, step: int, value: float, stage: str = "train") -> None:
        """Add a value to the curve `name`; create the curve if needed."""
        known: dict[str, Series] = getattr(self, curves)
        if name not in known:
            known[name] = Series(stage)
        known[name].add(step, value)

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, curves) for curves in _CURVES)

    @property
    def last_step(self) -> int:
        """The last step of any curve."""
        ends = [series.steps[-1] for curves in _CURVES for series in getattr(self, curves).values() if len(series)]
        return math.ceil(max(ends, default=self.first_step))

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        curves = {name: {key: each.state_dict() for key, each in getattr(self, name).items()} for name in _CURVES}
        return asdict(self, filter=lambda field, _: field.name not in _CURVES) | curves

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Restore a history from its `state_dict`."""
        curves = {name: {key: Series.from_state(each) for key, each in state[name].items()} for name in _CURVES}
        rest: dict[str, Any] = {name: value for name, value in state.items() if name not in _CURVES}
        return cls(**copy.deepcopy(rest) | curves)
