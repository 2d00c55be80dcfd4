"""Charts as inline SVG that scales with the page, with labels as HTML text that does not; see templates/chart.html."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from attrs import field, frozen

from stratagem_report.figures import labels, log_labels, log_ticks, step_ticks, ticks
from stratagem_report.history import Series

#: Maximum number of points per curve: about one for every two pixels of a chart's width.
DRAWN = 320
#: Curves with at most this many points get a dot at each point.
_DOTTED = 40
#: Maximum number of curves in one chart, each with its colour.
COLOURS = 8
_SIDE = 1000.0

_STAGE = r"train(?:ing)?|val(?:id(?:ation)?)?|test"
_STAGE_FIRST = re.compile(rf"^(?:{_STAGE})[_/.\-: ]+(?=.)", re.IGNORECASE)
_STAGE_LAST = re.compile(rf"(?<=.)[_/.\-: ]+(?:{_STAGE})$", re.IGNORECASE)
_LOADER = re.compile(r"/dataloader_idx_\d+$")
_CADENCE = re.compile(r"(?<=.)_(?:step|epoch)$")


def quantity(name: str) -> str:
    """Return the name of a metric without its stage: "loss" for "train_loss_epoch" and "val/loss"."""
    bare = _CADENCE.sub("", _LOADER.sub("", name))
    return _STAGE_LAST.sub("", _STAGE_FIRST.sub("", bare))


@frozen
class Scale:
    """Map values to positions on the vertical axis, from 0 at the bottom to 1."""

    low: float
    high: float
    logarithmic: bool = False

    @property
    def kind(self) -> str:
        return "log" if self.logarithmic else "linear"

    def at(self, value: float) -> float:
        if self.logarithmic:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Return the ticks: position and label."""
        if self.logarithmic:
            values = log_ticks(self.low, self.high)
            return [(self.at(value), label) for value, label in zip(values, log_labels(values), strict=True)]
        values = ticks(self.low, self.high)
        return [(self.at(value), label) for value, label in zip(values, labels(values), strict=True)]


@frozen
class StepAxis:
    """Map steps to positions on the horizontal axis, from 0 at the left to 1."""

    first: float
    last: float

    def at(self, step: float) -> float:
        return (step - self.first) / (self.last - self.first)

    def ticks(self) -> list[tuple[float, str]]:
        values = step_ticks(self.first, self.last)
        return [(self.at(value), label) for value, label in zip(values, labels(values), strict=True)]


@frozen(kw_only=True)
class Chart:
    """The data of a chart: `curves` with their names, over the steps of `axis`."""

    title: str
    unit: str
    #: The drawn curves, with at most `DRAWN` points: means, with a band from minimum to maximum where points are
    #: merged.
    curves: list[tuple[str, Series]]
    #: Number of curves that are not drawn.
    left_out: int
    axis: StepAxis
    scales: list[Scale]
    #: Lines at the steps where the run was resumed, as SVG paths.
    resumed: list[str] = field(factory=list)

    @property
    def span(self) -> list[float]:
        return [self.axis.first, self.axis.last]

    @property
    def limits(self) -> list[list[float]]:
        return [[scale.low, scale.high] for scale in self.scales]

    @property
    def points(self) -> list[dict[str, object]]:
        return [_points(name, series) for name, series in self.curves]

    @property
    def description(self) -> str:
        return _description(self.title, self.curves)

    def paths(self, scale: Scale) -> Iterator[tuple[str, str]]:
        """Yield the SVG paths for `scale` with their CSS classes, from back to front."""
        for position, _ in scale.ticks():
            yield f"M0 {_y(position)}H1000", "rule"
        for colour, (_, series) in enumerate(self.curves, 1):
            if any(count != 1 for count in series.counts):
                yield _band(series, scale, self.axis), f"band c{colour}"
        for colour, (_, series) in enumerate(self.curves, 1):
            yield from _line(series, scale, self.axis, colour)


def chart(
    title: str,
    curves: Sequence[tuple[str, Series]],
    span: tuple[float, float],
    unit: str = "",
    resumed: Iterable[int] = (),
    from_zero: bool = False,
) -> Chart:
    """Return a chart of the first `COLOURS` of `curves`, over the steps of `span`."""
    drawn = [(name, series.thinned(DRAWN)) for name, series in curves[:COLOURS]]
    axis = StepAxis(*span)
    return Chart(
        title=title, unit=unit, curves=drawn, left_out=len(curves) - len(drawn), axis=axis,
        scales=_scales([series for _, series in drawn], from_zero),
        resumed=[f"M{_x(axis.at(step))} 0V1000" for step in resumed],
    )  # fmt: skip


def not_finite(series: Series) -> str:
    """Return how many values of `series` are not finite, and the step of the first."""
    times = "once" if series.not_finite == 1 else f"{series.not_finite:,} times"
    return f"NaN or infinite {times}, first at step {series.first_not_finite:,}"


# --- Scales ------------------------------------------------------------------------------------------------------


def _scales(curves: list[Series], from_zero: bool) -> list[Scale]:
    """Return a linear scale for `curves`, and a logarithmic one if all values are positive and differ enough."""
    lows = [low for series in curves for low in series.lows]
    low, high = min(lows, default=0.0), max((high for series in curves for high in series.highs), default=1.0)
    linear = _linear(0.0 if from_zero and low >= 0 else low, high)
    if from_zero or low <= 0 or high / low < 1.5:
        return [linear]
    margin = (high / low) ** 0.04
    return [linear, Scale(low / margin, high * margin, logarithmic=True)]


def _linear(low: float, high: float) -> Scale:
    if high - low <= abs(high) * 1e-9:
        margin = abs(high) * 0.05 or 1.0
        return Scale(0.0 if low == 0 else low - margin, high + margin)
    margin = (high - low) * 0.06
    return Scale(low if low == 0 else low - margin, high + margin)


# --- Drawing -----------------------------------------------------------------------------------------------------


def _line(series: Series, scale: Scale, axis: StepAxis, colour: int) -> Iterator[tuple[str, str]]:
    points = _coordinates(series.steps, series.means, scale, axis)
    if points:
        yield "M" + "L".join(points), f"line c{colour}"
    if 0 < len(points) <= _DOTTED:
        yield "".join(f"M{point}h0" for point in points), f"dots c{colour}"
    if series.first_not_finite is not None:
        yield f"M{_x(axis.at(series.first_not_finite))} 1000v-40", "lost"


def _band(series: Series, scale: Scale, axis: StepAxis) -> str:
    above = _coordinates(series.steps, series.highs, scale, axis)
    below = _coordinates(series.steps, series.lows, scale, axis)
    return "M" + "L".join([*above, *reversed(below)]) + "Z"


def _coordinates(steps: Sequence[float], values: Sequence[float], scale: Scale, axis: StepAxis) -> list[str]:
    return [f"{_x(axis.at(x))} {_y(scale.at(y))}" for x, y in zip(steps, values, strict=True)]


def _x(position: float) -> str:
    return f"{position * _SIDE:.1f}"


def _y(position: float) -> str:
    return f"{(1 - position) * _SIDE:.1f}"


# --- Tooltips and descriptions -----------------------------------------------------------------------------------


def _points(name: str, series: Series) -> dict[str, object]:
    """Return the data of the tooltip."""
    points: dict[str, object] = {"name": name, "x": _digits(series.steps, 9), "y": _digits(series.means)}
    if any(count > 1 for count in series.counts):
        points |= {"low": _digits(series.lows), "high": _digits(series.highs)}
    return points


def _digits(values: list[float], digits: int = 6) -> list[float | int]:
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _description(title: str, curves: list[tuple[str, Series]]) -> str:
    ends = [
        f"{name} from {series.means[0]:.4g} at step {series.steps[0]:,.0f} to {series.means[-1]:.4g} "
        f"at step {series.steps[-1]:,.0f}"
        for name, series in curves
        if len(series)
    ]
    return f"{title}: " + ("; ".join(ends) or "no finite value")
