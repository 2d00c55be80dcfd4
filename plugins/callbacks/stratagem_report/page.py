"""Render the page: header with the outcome, curves, configuration. The HTML is in templates/."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from stratagem.api.options import redact
from stratagem_pictures import style
from stratagem_report.charts import Chart, chart, marks, not_finite, quantity
from stratagem_report.facts import TIME, Facts, shown
from stratagem_report.figures import byte_unit, count, duration, number, rate
from stratagem_report.history import History, Series
from stratagem_report.pictures import MeshPicture, TimelinePicture

if TYPE_CHECKING:
    from jinja2 import Environment

#: Maximum number of charts of metrics; the table has all metrics.
_CHARTS = 60
#: Above the title of a page with curves alone, and on no page that a run writes.
KICKER = "Curves from metrics.csv"


def render(facts: Facts) -> str:
    """Return the self-contained page for `facts`."""
    history, layout = facts.history, facts.layout
    return _page(
        "page.html", history, facts=facts, outcome=history.outcome, written_at=facts.written_at, folder=facts.folder,
        tiles=_tiles(facts), machine=_machine(history, _drawing(history)),
        mesh=None if layout is None else MeshPicture(layout),
        timeline=None if layout is None or layout.timeline is None else TimelinePicture(layout.timeline),
    )  # fmt: skip


def render_curves(history: History, title: str, detail: str, folder: str) -> str:
    """Return a self-contained page with the metrics of `history`, and `detail` below its `title`."""
    written_at = time.strftime(TIME)
    return _page(
        "curves.html", history, title=title, detail=detail, folder=folder, written_at=written_at, kicker=KICKER
    )


def _page(template: str, history: History, **values: Any) -> str:
    from markupsafe import Markup

    script, css = _read("page.js"), style("palette") + _read("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    groups, draw = without_copies(grouped(history.metrics)), _drawing(history)
    page = _environment().get_template(template)
    return page.render(
        history=history,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        script=Markup(script),  # noqa: S704 - a file of this package
        style=Markup(css),  # noqa: S704 - files of ours
        metrics=[draw(title, curves) for title, curves in groups[:_CHARTS]],
        metrics_left_out=len(groups[_CHARTS:]),
        **values,
    )


def _drawing(history: History) -> Callable[..., Chart]:
    """Return `chart` for the steps of `history`."""
    span = (history.first_step, max(history.last_step, history.first_step + 1))
    return functools.partial(chart, span=span, resumed=history.resumed)


@functools.cache
def _environment() -> Environment:
    """Return the jinja2 environment: it escapes all values, and removes passwords from URLs."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FunctionLoader(_template), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else redact("text", str(value)),
    )  # fmt: skip
    environment.filters.update(
        count=count, number=number, not_finite=not_finite, marks=marks,
        kind=lambda scale: "log" if scale.logarithmic else "linear",
        shown=lambda value: shown("value", value),
        json=lambda value: json.dumps(value, separators=(",", ":")),
        percent=lambda position: f"{position * 100:.2f}%",
    )  # fmt: skip
    return environment


def _template(name: str) -> str:
    """Return a template without indentation and line breaks, which a browser would show as spaces."""
    return "".join(line.strip() for line in _read(f"templates/{name}").splitlines())


def _read(name: str) -> str:
    return (files("stratagem_report") / name).read_text(encoding="utf-8")


# --- Header ------------------------------------------------------------------------------------------------------


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each tile."""
    history = facts.history
    epochs_of = f"of {count(facts.max_epochs)}" if facts.max_epochs is not None else ""
    steps_of = f"of {count(facts.max_steps)}" if facts.max_steps >= 0 else ""
    skipped = f"{count(facts.skipped_steps)} skipped by the loss scale" if facts.skipped_steps else ""
    resumed = f"resumed at step {', '.join(map(count, history.resumed[-3:]))}" if history.resumed else ""
    return [
        ("Duration", duration(history.seconds), f"{duration(history.train_seconds)} of it training"),
        ("Epochs", count(facts.epochs), epochs_of),
        ("Optimizer steps", count(facts.steps), "; ".join(filter(None, [steps_of, skipped, resumed]))),
        *_speed_tile(facts),
        *_memory_tile(history),
        ("Device", facts.device, ""),
        ("Processes", count(facts.world_size), ""),
    ]


def _speed_tile(facts: Facts) -> list[tuple[str, str, str]]:
    history = facts.history
    if not (history.steps and history.train_seconds):
        return []
    speed = history.steps / history.train_seconds
    samples = facts.batch_size and f"{rate(speed * facts.batch_size)} samples/s"
    return [("Throughput", f"{rate(speed)} steps/s", samples or "")]


def _memory_tile(history: History) -> list[tuple[str, str, str]]:
    peaks = {name: series.most[0] for name, series in history.memory.items() if series.most is not None}
    if not peaks:
        return []
    name = max(peaks, key=lambda each: (each.startswith("device"), peaks[each]))
    size, unit = byte_unit(peaks[name])
    return [("Peak memory", f"{peaks[name] / size:.1f} {unit}", name)]


# --- Curves ------------------------------------------------------------------------------------------------------


def _machine(history: History, draw: Callable[..., Chart]) -> list[Chart]:
    """Return the charts of learning rates, speed and memory."""
    logged = any(name.startswith("lr-") for name in history.metrics)  # by the callback learning_rate_monitor
    charts = [draw("Learning rate", _distinct(history.rates))] if history.rates and not logged else []
    # Samples and steps per second are the same curve.
    for title, name in (("Samples", "samples/s"), ("Optimizer steps", "steps/s")):
        if name in history.speed:
            charts.append(draw(title, [(name, history.speed[name])], from_zero=True, unit=name))
            break
    return [*charts, _memory_chart(history, draw)] if history.memory else charts


def grouped(metrics: dict[str, Series]) -> dict[str, list[tuple[str, Series]]]:
    """Return `metrics` grouped without their stage, training first; a single metric keeps its full name."""
    groups: dict[str, list[tuple[str, Series]]] = {}
    for name, series in metrics.items():
        groups.setdefault(quantity(name), []).append((name, series))
    return {
        title if len(curves) > 1 else curves[0][0]: sorted(curves, key=lambda curve: curve[1].stage != "train")
        for title, curves in groups.items()
    }


def without_copies(groups: dict[str, list[tuple[str, Series]]]) -> list[tuple[str, list[tuple[str, Series]]]]:
    """Return `groups` without those that have exactly the curves of an earlier one."""
    seen: dict[tuple[tuple[float, ...], ...], str] = {}
    for title, curves in groups.items():
        seen.setdefault(tuple((*series.steps, *series.means) for _, series in curves), title)
    return [(title, groups[title]) for title in seen.values()]


def _distinct(rates: dict[str, Series]) -> list[tuple[str, Series]]:
    """Return the distinct learning rates; parameter groups with the same one are merged."""
    same: dict[tuple[float, ...], list[str]] = {}
    for name, series in rates.items():
        same.setdefault((*series.steps, *series.means), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", rates[names[0]])
        for names in same.values()
    ]


def _memory_chart(history: History, draw: Callable[..., Chart]) -> Chart:
    size, unit = byte_unit(max(series.most[0] for series in history.memory.values() if series.most is not None))
    curves = [(name, series.thinned(len(series), 1 / size)) for name, series in history.memory.items()]
    return draw("Memory of rank 0", curves, unit=unit, from_zero=True)
