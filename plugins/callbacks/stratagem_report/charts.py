"""Charts as inline SVG that scales with the page, with labels as HTML text that does not; see templates/chart.html."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from attrs import field, frozen

from stratagem_pictures.scales import Scale
from stratagem_report.figures import labels, log_labels
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


def marks(scale: Scale, whole: bool = False) -> list[tuple[float, str]]:
    """Return position and label of the ticks of `scale`; with `whole`, of those at whole numbers."""
    values = [value for value in scale.ticks() if not whole or value == round(value)]
    texts = log_labels(values) if scale.logarithmic else labels(values)
    return [(scale.at(value), text) for value, text in zip(values, texts, strict=True)]


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
    axis: Scale
    scales: list[Scale]
    #: Lines at the steps where the run was resumed, as SVG paths.
    resumed: list[str] = field(factory=list)

    @property
    def span(self) -> list[float]:
        return [self.axis.low, self.axis.high]

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
        for value in scale.ticks():
            yield f"M0 {_y(scale.at(value))}H1000", "rule"
        for colour, (_, series) in enumerate(self.curves, 1):
            if any(count != 1 for count in series.counts):
                yield _band(series, scale, self.axis), f"band c{colour}"
        for colour, (_, series) in enumerate(self.curves, 1):
            yield from _line(series, scale, self.axis, colour)


def chart(
    title: str, curves: Sequence[tuple[str, Series]], span: tuple[float, float], unit: str = "",
    resumed: Iterable[int] = (), from_zero: bool = False,
) -> Chart:  # fmt: skip
    """Return a chart of the first `COLOURS` of `curves`, over the steps of `span`."""
    drawn = [(name, series.thinned(DRAWN)) for name, series in curves[:COLOURS]]
    axis = Scale(*span)
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


def _line(series: Series, scale: Scale, axis: Scale, colour: int) -> Iterator[tuple[str, str]]:
    points = _coordinates(series.steps, series.means, scale, axis)
    if points:
        yield "M" + "L".join(points), f"line c{colour}"
    if 0 < len(points) <= _DOTTED:
        yield "".join(f"M{point}h0" for point in points), f"dots c{colour}"
    if series.first_not_finite is not None:
        yield f"M{_x(axis.at(series.first_not_finite))} 1000v-40", "lost"


def _band(series: Series, scale: Scale, axis: Scale) -> str:
    above = _coordinates(series.steps, series.highs, scale, axis)
    below = _coordinates(series.steps, series.lows, scale, axis)
    return "M" + "L".join([*above, *reversed(below)]) + "Z"


def _coordinates(steps: Sequence[float], values: Sequence[float], scale: Scale, axis: Scale) -> list[str]:
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
