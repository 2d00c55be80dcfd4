"""Curves as inline SVG that stretches with the page, its labels as text that does not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

from attrs import frozen

from stratagem_report.figures import labels, log_labels, log_ticks, step_ticks, ticks
from stratagem_report.history import Series
from stratagem_report.markup import Html, join, tag

#: Buckets drawn for each curve: about one for every two pixels of a chart.
DRAWN = 320
#: A curve of so few points shows each as a dot.
_DOTTED = 40
#: Curves of one chart, and as many colours.
COLOURS = 8
_SIDE = 1000.0

_STAGE = r"train(?:ing)?|val(?:id(?:ation)?)?|test"
_STAGE_FIRST = re.compile(rf"^(?:{_STAGE})[_/.\-: ]+(?=.)", re.IGNORECASE)
_STAGE_LAST = re.compile(rf"(?<=.)[_/.\-: ]+(?:{_STAGE})$", re.IGNORECASE)
_LOADER = re.compile(r"/dataloader_idx_\d+$")
_CADENCE = re.compile(r"(?<=.)_(?:step|epoch)$")


def quantity(name: str) -> str:
    """Return what metric `name` measures, whichever stage logged it: "loss" for "train_loss_epoch" and "val/loss"."""
    bare = _CADENCE.sub("", _LOADER.sub("", name))
    return _STAGE_LAST.sub("", _STAGE_FIRST.sub("", bare))


@frozen
class Scale:
    """Where values lie on the vertical axis, from 0 at the bottom to 1."""

    low: float
    high: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            return (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[tuple[float, str]]:
        """Return ticks: their places and labels."""
        if self.logarithmic:
            values = log_ticks(self.low, self.high)
            return [(self.at(value), label) for value, label in zip(values, log_labels(values), strict=True)]
        values = ticks(self.low, self.high)
        return [(self.at(value), label) for value, label in zip(values, labels(values), strict=True)]


def chart(
    title: str,
    curves: Sequence[tuple[str, Series]],
    span: tuple[float, float],
    unit: str = "",
    resumed: Iterable[int] = (),
    from_zero: bool = False,
) -> Html:
    """Return a figure with `curves`, each with its name, over the steps of `span`.

    Curves that have more than `DRAWN` points are drawn as their means, in a band from their minima to their maxima.
    """
    drawn = [(name, series.thinned(DRAWN)) for name, series in curves[:COLOURS]]
    scales = _scales([series for _, series in drawn], from_zero)
    across = _Across(*span)
    plot = tag(
        "div",
        *(_axis(scale) for scale in scales),
        tag("svg", _rules(across, resumed), *(_drawing(drawn, scale, across) for scale in scales),
            viewBox="0 0 1000 1000", preserveAspectRatio="none", role="img", aria_label=_in_words(title, drawn)),
        tag("i", class_="cursor"),
        tag("div", class_="tip", role="status"),
        class_="plot",
    )  # fmt: skip
    return tag(
        "figure",
        tag("figcaption", tag("h3", title, tag("small", unit) if unit else ""), _switch() if len(scales) > 1 else ""),
        plot,
        tag("div", *(tag("span", label, style=_left(place)) for place, label in across.marks()), class_="steps"),
        _legend(drawn, len(curves) - len(drawn)),
        class_="chart",
        data_span=json.dumps(span),
        data_scales=json.dumps([[scale.low, scale.high] for scale in scales]),
        data_curves=json.dumps([_points(name, series) for name, series in drawn], separators=(",", ":")),
    )


@frozen
class _Across:
    """Where steps lie on the horizontal axis, from 0 at the left to 1."""

    first: float
    last: float

    def at(self, step: float) -> float:
        return (step - self.first) / (self.last - self.first)

    def marks(self) -> list[tuple[float, str]]:
        values = step_ticks(self.first, self.last)
        return [(self.at(value), label) for value, label in zip(values, labels(values), strict=True)]


# --- Scales ------------------------------------------------------------------------------------------------------


def _scales(curves: list[Series], from_zero: bool) -> list[Scale]:
    """Return a linear scale for `curves`, and where all values are above 0 and differ, a logarithmic one."""
    lows = [low for series in curves for low in series.lows]
    low, high = min(lows, default=0.0), max((high for series in curves for high in series.highs), default=1.0)
    linear = _linear(0.0 if from_zero and low >= 0 else low, high)
    if from_zero or low <= 0 or high / low < 1.5:
        return [linear]
    margin = (high / low) ** 0.04
    return [linear, Scale(low / margin, high * margin, logarithmic=True)]


def _linear(low: float, high: float) -> Scale:
    if high - low <= abs(high) * 1e-9:
        room = abs(high) * 0.05 or 1.0
        return Scale(0.0 if low == 0 else low - room, high + room)
    room = (high - low) * 0.06
    return Scale(low if low == 0 else low - room, high + room)


# --- Drawing -----------------------------------------------------------------------------------------------------


def _drawing(curves: list[tuple[str, Series]], scale: Scale, across: _Across) -> Html:
    kind = "log" if scale.logarithmic else "linear"
    rules = (tag("path", d=f"M0 {_down(place)}H1000", class_="rule") for place, _ in scale.marks())
    bands = (_band(series, scale, across, colour) for colour, (_, series) in enumerate(curves, 1))
    lines = (_line(series, scale, across, colour) for colour, (_, series) in enumerate(curves, 1))
    return tag("g", *rules, *bands, *lines, class_=kind)


def _line(series: Series, scale: Scale, across: _Across, colour: int) -> Html:
    places = [f"{_right(across.at(x))} {_down(scale.at(y))}" for x, y in zip(series.steps, series.means, strict=True)]
    line = tag("path", d="M" + "L".join(places), class_=f"line c{colour}") if places else Html()
    dots = "".join(f"M{place}h0" for place in places) if len(places) <= _DOTTED else ""
    lost = series.first_not_finite
    cross = tag("path", d=f"M{_right(across.at(lost))} 1000v-40", class_="lost") if lost is not None else Html()
    return join([line, tag("path", d=dots, class_=f"dots c{colour}") if dots else "", cross])


def _band(series: Series, scale: Scale, across: _Across, colour: int) -> Html:
    if all(count == 1 for count in series.counts):
        return Html()
    above = [f"{_right(across.at(x))} {_down(scale.at(y))}" for x, y in zip(series.steps, series.highs, strict=True)]
    below = [f"{_right(across.at(x))} {_down(scale.at(y))}" for x, y in zip(series.steps, series.lows, strict=True)]
    return tag("path", d="M" + "L".join([*above, *reversed(below)]) + "Z", class_=f"band c{colour}")


def _rules(across: _Across, resumed: Iterable[int]) -> Html:
    return join(tag("path", d=f"M{_right(across.at(step))} 0V1000", class_="resumed") for step in resumed)


def _axis(scale: Scale) -> Html:
    marks = (tag("span", label, style=f"bottom:{place * 100:.2f}%") for place, label in scale.marks())
    return tag("div", *marks, class_=f"values {'log' if scale.logarithmic else 'linear'}", aria_hidden="true")


def _right(place: float) -> str:
    return f"{place * _SIDE:.1f}"


def _down(place: float) -> str:
    return f"{(1 - place) * _SIDE:.1f}"


def _left(place: float) -> str:
    return f"left:{place * 100:.2f}%"


# --- Beside the drawing ------------------------------------------------------------------------------------------


def _switch() -> Html:
    return tag("label", tag("input", type="checkbox"), "log", class_="switch")


def _legend(curves: list[tuple[str, Series]], more: int) -> Html:
    keys = [
        tag("li", tag("i", class_=f"key c{colour}"), name, tag("em", _not_finite(series)) if series.not_finite else "")
        for colour, (name, series) in enumerate(curves, 1)
    ]
    return tag("ul", *keys, tag("li", f"and {more} more") if more > 0 else "", class_="legend")


def _not_finite(series: Series) -> str:
    times = "once" if series.not_finite == 1 else f"{series.not_finite:,} times"
    return f"NaN or infinite {times}, first at step {series.first_not_finite:,}"


def _points(name: str, series: Series) -> dict[str, object]:
    """Return what is shown under the pointer."""
    points: dict[str, object] = {"name": name, "x": _digits(series.steps, 9), "y": _digits(series.means)}
    if any(count > 1 for count in series.counts):
        points |= {"low": _digits(series.lows), "high": _digits(series.highs)}
    return points


def _digits(values: list[float], digits: int = 6) -> list[float | int]:
    rounded = (float(f"{value:.{digits}g}") for value in values)
    return [int(value) if value.is_integer() and abs(value) < 1e15 else value for value in rounded]


def _in_words(title: str, curves: list[tuple[str, Series]]) -> str:
    ends = [
        f"{name} from {series.means[0]:.4g} at step {series.steps[0]:,.0f} to {series.means[-1]:.4g} "
        f"at step {series.steps[-1]:,.0f}"
        for name, series in curves
        if len(series)
    ]
    return f"{title}: " + ("; ".join(ends) or "no finite value")
