"""The page: a header that says how it went, curves, and what was run."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from stratagem_report.charts import chart, quantity
from stratagem_report.facts import Facts, shown
from stratagem_report.figures import byte_unit, count, duration, number, rate
from stratagem_report.history import History, Series
from stratagem_report.markup import Html, join, tag

#: Stands where there is nothing to show.
_NOTHING = "\N{EN DASH}"
#: More charts than this make a page that nobody reads; the table has all metrics.
_CHARTS = 60


def render(facts: Facts) -> str:
    """Return the page about `facts`, complete in itself."""
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{facts.module}: {facts.history.outcome.get('status', '').lower()}"),
        tag("style", style),
    )
    body = tag("body", _header(facts), tag("main", *_sections(facts)), _footer(facts), tag("script", script))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _asset(name: str) -> Html:
    return Html((files("stratagem_report") / name).read_text(encoding="utf-8"))


def _sections(facts: Facts) -> list[Html]:
    history = facts.history
    return [
        _error(history.outcome),
        _metrics_table(history),
        *_charts(facts),
        _section("Hyper-parameters", _pairs(facts.hyper_parameters)) if facts.hyper_parameters else Html(),
        _configuration(facts),
        _plugins(facts.plugins),
        _section("Environment", _pairs(facts.versions)),
    ]


def _section(title: str, *content: object) -> Html:
    return tag("section", tag("h2", title), *content)


# --- Header ------------------------------------------------------------------------------------------------------


def _header(facts: Facts) -> Html:
    outcome = facts.history.outcome
    status = outcome.get("status", "Unknown")
    return tag(
        "header",
        tag("p", "Training report", class_="kicker"),
        tag("h1", facts.module),
        tag("p", tag("strong", status, class_=f"status {status.lower()}"), outcome.get("detail", ""), class_="outcome"),
        tag("dl", *(_tile(*tile) for tile in _tiles(facts)), class_="tiles"),
    )


def _tile(name: str, value: str, note: str) -> Html:
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note") if note else "")


def _tiles(facts: Facts) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each."""
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


def _error(outcome: dict[str, Any]) -> Html:
    if "error" not in outcome:
        return Html()
    frames = tag("ol", *(tag("li", tag("code", frame)) for frame in outcome["frames"]))
    details = tag("details", tag("summary", "Where it was raised"), frames) if outcome["frames"] else ""
    message = tag("pre", outcome["error"] or "(no message)")
    return tag("section", tag("h2", "Exception"), message, details, class_="error")


# --- Metrics -----------------------------------------------------------------------------------------------------


def _metrics_table(history: History) -> Html:
    if not (history.metrics or history.results):
        return _section("Final metrics", tag("p", "Nothing was logged.", class_="empty"))
    head = tag("tr", *(tag("th", title, scope="col") for title in ("Metric", "Last", "Lowest", "Highest", "Values")))
    rows = [_metric_row(name, series) for name, series in history.metrics.items()]
    rows += [
        tag("tr", tag("th", name, tag("small", "after training"), scope="row"), tag("td", number(value)),
            tag("td"), tag("td"), tag("td"))
        for name, value in history.results.items()
    ]  # fmt: skip
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="numbers")
    return _section("Final metrics", tag("div", table, class_="scroll"))


def _metric_row(name: str, series: Series) -> Html:
    return tag(
        "tr",
        tag("th", name, scope="row"),
        tag("td", number(series.last or 0.0), class_="last"),
        *(
            tag("td", number(extreme[0]), tag("small", f"step {count(extreme[1])}")) if extreme else tag("td", _NOTHING)
            for extreme in (series.least, series.most)
        ),
        tag("td", count(series.values_seen)),
    )


# --- Curves ------------------------------------------------------------------------------------------------------


def _charts(facts: Facts) -> list[Html]:
    history = facts.history
    span = (history.first_step, max(history.last_step, history.first_step + 1))
    groups = grouped(history.metrics)
    common = {"span": span, "resumed": history.resumed}
    metrics = [chart(title, curves, **common) for title, curves in list(groups.items())[:_CHARTS]]
    left_out = len(groups) - len(metrics)
    note = tag("p", f"{left_out} more are in the table.", class_="empty") if left_out else ""
    machine = [
        *([chart("Learning rate", _distinct(history.rates), **common)] if history.rates else []),
        *(
            chart(title, [(name, history.speed[name])], from_zero=True, unit=name, **common)
            for title, name in (("Optimizer steps", "steps/s"), ("Samples", "samples/s"))
            if name in history.speed
        ),
        *([_memory_chart(history, common)] if history.memory else []),
    ]
    return [
        _section("Metrics", tag("div", *metrics, class_="charts"), note) if metrics else Html(),
        _section("Training", tag("div", *machine, class_="charts")) if machine else Html(),
    ]


def grouped(metrics: dict[str, Series]) -> dict[str, list[tuple[str, Series]]]:
    """Return `metrics` by what they measure: training before validation, a lone one under its whole name."""
    groups: dict[str, list[tuple[str, Series]]] = {}
    for name, series in metrics.items():
        groups.setdefault(quantity(name), []).append((name, series))
    return {
        title if len(curves) > 1 else curves[0][0]: sorted(curves, key=lambda curve: curve[1].stage != "train")
        for title, curves in groups.items()
    }


def _distinct(rates: dict[str, Series]) -> list[tuple[str, Series]]:
    """Return the learning rates that differ, groups with the same one under one name."""
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, series in rates.items():
        alike.setdefault((*series.steps, *series.means), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more", rates[names[0]])
        for names in alike.values()
    ]


def _memory_chart(history: History, common: dict[str, Any]) -> Html:
    size, unit = byte_unit(max(series.most[0] for series in history.memory.values() if series.most is not None))
    curves = [(name, series.thinned(len(series), 1 / size)) for name, series in history.memory.items()]
    return chart("Memory of rank 0", curves, unit=unit, from_zero=True, **common)


# --- What was run ------------------------------------------------------------------------------------------------


def _pairs(pairs: list[tuple[str, str]]) -> Html:
    rows = (tag("tr", tag("th", name, scope="row"), tag("td", tag("code", value))) for name, value in pairs)
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll")


def _configuration(facts: Facts) -> Html:
    given = [row for row in facts.arguments if row[2] != "default"]
    defaults = [row for row in facts.arguments if row[2] == "default"]
    summary = tag("summary", f"{len(defaults)} arguments at their defaults")
    return _section(
        "Configuration",
        _options(given) if given else tag("p", "No argument was set.", class_="empty"),
        tag("details", summary, _options(defaults)) if defaults else "",
    )


def _options(rows: list[tuple[str, str, str]]) -> Html:
    head = tag("tr", *(tag("th", title, scope="col") for title in ("Argument", "Value", "Origin")))
    body = (
        tag("tr", tag("th", name, scope="row"), tag("td", tag("code", value)), tag("td", origin, class_="origin"))
        for name, value, origin in rows
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def _plugins(plugins: list[dict[str, Any]]) -> Html:
    head = tag("tr", *(tag("th", title, scope="col") for title in ("Kind", "Plugin", "Package", "Options", "Why")))
    table = tag("table", tag("thead", head), tag("tbody", *map(_plugin, plugins)), class_="plugins")
    return _section("Plugins", tag("div", table, class_="scroll"))


def _plugin(plugin: dict[str, Any]) -> Html:
    package = f"{plugin['distribution']} {plugin['version']}" if plugin["distribution"] else "no package"
    options = [
        tag("li", tag("code", f"{option['name']} = {shown('value', option['value'])}"), tag("small", option["origin"]))
        for option in plugin["options"]
    ]
    absorbed = tag("small", "applied by the strategy") if plugin["stands_down"] else ""
    return tag(
        "tr",
        tag("td", plugin["kind"].replace("_", " ")),
        tag("th", plugin["name"], absorbed, scope="row"),
        tag("td", package),
        tag("td", tag("ul", *options) if options else _NOTHING),
        tag("td", plugin["reason"], class_="origin"),
    )


def _footer(facts: Facts) -> Html:
    return tag("footer", join(["Written ", facts.written_at, " · ", tag("code", facts.folder)]))
