"""Compute which plugins can be combined: resolve all combinations of strategy, precision, comm hook and checkpoint.

The result of a cell comes from the resolver of runs: there is no second source of truth.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files

from attrs import frozen

from stratagem.api.capabilities import MULTI_PROCESS
from stratagem.config.settings import RunSettings, gather
from stratagem.discovery import registry
from stratagem.errors import StratagemError
from stratagem.stack.construction import make
from stratagem.stack.resolver import resolve

#: The kinds that are combined, in the order of the fields of a cell.
AXES = ("strategy", "precision", "comm_hook", "checkpoint")


@frozen
class Cell:
    """One combination of plugins."""

    strategy: str
    precision: str
    comm_hook: str | None
    checkpoint: str
    #: Number of processes: two if the strategy supports several on one machine.
    world_size: int
    #: Number of devices: two if the strategy supports more than one.
    devices: int
    #: Why the resolver refuses it; None if it does not.
    reason: str | None

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of a Run or Trainer for this combination."""
        return {name: getattr(self, name) for name in AXES} | {"devices": self.devices}


def cells(
    accelerator: str = "cpu", presets: bool = False, only: Callable[[registry.Entry], bool] = lambda _: True
) -> list[Cell]:
    """Return all combinations of the installed plugins, each with the result of the resolver. No process is started.

    Args:
        accelerator: the accelerator to resolve for.
        presets: include presets of strategies, such as those with another start method.
        only: leaves out plugins for which it returns False.
    """
    strategies = names("strategy", presets, only)
    hooks: list[str | None] = [None, *names("comm_hook", True, only)]
    found = []
    for strategy in strategies:
        world_size, devices = _sizes(strategy)
        for precision, hook, checkpoint in itertools.product(
            names("precision", True, only), hooks, names("checkpoint", True, only)
        ):
            chosen = {"strategy": strategy, "precision": precision, "comm_hook": hook, "checkpoint": checkpoint}
            reason = _refusal(chosen | {"accelerator": accelerator, "devices": devices})
            found.append(Cell(strategy, precision, hook, checkpoint, world_size, devices, reason))
    return found


def names(kind: str, presets: bool, only: Callable[[registry.Entry], bool]) -> list[str]:
    """Return the installed names of `kind`; of a plugin with several names, the longest."""
    found: dict[str, str] = {}
    for entry in sorted(registry.entries(kind), key=lambda entry: (-len(entry.name), entry.name)):
        if only(entry) and (presets or _is_class(entry)):
            found.setdefault(f"{entry.distribution}:{entry.value}", entry.name)
    return sorted(found.values())


def _is_class(entry: registry.Entry) -> bool:
    try:
        return isinstance(entry.load(), type)
    except StratagemError:
        return True  # broken: its cells have the reason


def _sizes(strategy: str) -> tuple[int, int]:
    """Return the numbers of processes and devices to try."""
    try:
        plugin = make(registry.find("strategy", strategy), {})
    except StratagemError:
        return 1, 1
    if not plugin.process_per_device:
        return 1, 2
    return (2, 2) if MULTI_PROCESS in plugin.capabilities.provides else (1, 1)


def _refusal(arguments: dict[str, object]) -> str | None:
    try:
        resolve(gather(RunSettings, arguments))
    except StratagemError as error:
        return str(error)
    return None


# --- Rendering ---------------------------------------------------------------------------------------------------


def render_markdown(table: Sequence[Cell]) -> str:
    """Return `table` as a Markdown table with a column for each precision, and the reasons below it.

    If all checkpoint formats have the same result, there is one row for "any" of them; if one format has the same
    result with all comm hooks, one row for "any" of these.
    """
    precisions, rows, reasons = _arrange(table)
    lines = [
        " | ".join(["| strategy", "comm hook", "checkpoint", *precisions]) + " |",
        "|---" * (3 + len(precisions)) + "|",
    ]
    results: dict[str, dict[str | None, dict[str, str]]] = {}
    for (strategy, hook, checkpoint), row in rows.items():
        words = " | ".join(_word(row[precision], reasons) for precision in precisions)
        results.setdefault(strategy, {}).setdefault(hook, {})[checkpoint] = words
    for strategy, by_hook in results.items():
        lines += [f"| {strategy} | {' | '.join(cells)} |" for cells in _joined(by_hook)]
    return "\n".join([*lines, "", summary(table), "", *(f"{n}. {reason}" for reason, n in reasons.items())]).rstrip()


def _joined(by_hook: dict[str | None, dict[str, str]]) -> list[tuple[str, str, str]]:
    """Return (comm hook, checkpoint, cells) of one strategy, with equal rows merged."""
    uniform = {hook: words for hook, each in by_hook.items() if len(words := set(each.values())) == 1}
    mixed = [each for hook, each in by_hook.items() if hook not in uniform]
    separate = {
        checkpoint: words
        for checkpoint, words in (mixed[0] if len(mixed) > 1 else {}).items()
        if all(each[checkpoint] == words and list(each.values()).count(words) == 1 for each in mixed)
    }
    found = []
    for hook, by_checkpoint in by_hook.items():
        rest = {checkpoint: words for checkpoint, words in by_checkpoint.items() if checkpoint not in separate}
        if hook in uniform:
            rest = {"any": uniform[hook].pop()}
        elif len(set(rest.values())) == 1:
            rest = {"any other": next(iter(rest.values()))}
        found += [(hook or "-", checkpoint, words) for checkpoint, words in rest.items()]
    others = "any of the others" if uniform else "any"
    return found + [(others, checkpoint, words) for checkpoint, words in separate.items()]


def render_html(table: Sequence[Cell]) -> str:
    """Return `table` as an HTML page that can be filtered; the reason of each "no" is a tooltip and in a list below."""
    precisions, rows, reasons = _arrange(table)
    head = "".join(f"<th>{html.escape(word)}</th>" for word in ("strategy", "comm hook", "checkpoint", *precisions))
    body = []
    for (strategy, hook, checkpoint), row in rows.items():
        words = (strategy, hook or "-", checkpoint)
        cells = [f"<td>{html.escape(word)}</td>" for word in words]
        for precision in precisions:
            reason = row[precision].reason
            title = f' title="{html.escape(reason)}"' if reason else ""
            cells.append(f'<td class="{"no" if reason else "yes"}"{title}>{_linked(row[precision], reasons)}</td>')
        keys = " ".join(f'data-{axis}="{html.escape(word)}"' for axis, word in zip(_FILTERS, words, strict=True))
        body.append(f"<tr {keys}>{''.join(cells)}</tr>")
    notes = "".join(f'<li id="reason-{n}">{html.escape(reason)}</li>' for reason, n in reasons.items())
    return (
        files("stratagem_devtools").joinpath("matrix.html").read_text(encoding="utf-8")
        .replace("@SUMMARY@", html.escape(summary(table)))
        .replace("@FILTERS@", "".join(map(_filter, _FILTERS, zip(*rows, strict=True))))
        .replace("@HEAD@", head).replace("@BODY@", "".join(body)).replace("@REASONS@", notes)
    )  # fmt: skip


#: What a row is filtered by.
_FILTERS = ("strategy", "hook", "checkpoint")


def _filter(name: str, values: Iterable[str | None]) -> str:
    """Return a select element that shows the rows with one of `values`."""
    choices = "".join(f"<option>{html.escape(value)}</option>" for value in dict.fromkeys(v or "-" for v in values))
    return f'<label>{name} <select name="{name}"><option value="">all</option>{choices}</select></label>'


def _linked(cell: Cell, reasons: dict[str, int]) -> str:
    """Return "yes", or "no" with a link to the reason."""
    if cell.reason is None:
        return "yes"
    number = reasons[cell.reason]
    return f'<a href="#reason-{number}">no ({number})</a>'


def summary(table: Sequence[Cell]) -> str:
    """Return how many combinations there are, and how many of them are refused."""
    refused = sum(cell.reason is not None for cell in table)
    return f"{len(table)} combinations: {len(table) - refused} work, {refused} are refused."


Rows = dict[tuple[str, str | None, str], dict[str, Cell]]


def _arrange(table: Iterable[Cell]) -> tuple[list[str], Rows, dict[str, int]]:
    precisions: dict[str, None] = {}
    rows: Rows = {}
    reasons: dict[str, int] = {}
    for cell in table:
        precisions[cell.precision] = None
        rows.setdefault((cell.strategy, cell.comm_hook, cell.checkpoint), {})[cell.precision] = cell
        if cell.reason is not None:
            reasons.setdefault(cell.reason, len(reasons) + 1)
    return list(precisions), rows, reasons


def _word(cell: Cell, reasons: dict[str, int]) -> str:
    return "yes" if cell.reason is None else f"no ({reasons[cell.reason]})"
