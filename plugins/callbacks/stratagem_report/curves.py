"""Read the curves of a run from what the logger `csv` wrote: a version for each fit, also for one that resumes."""

from __future__ import annotations

import csv
from pathlib import Path

from stratagem.errors import ConfigError
from stratagem_report.figures import count
from stratagem_report.history import History

_EVALUATION = ("val_", "val/", "test_", "test/")


def files(folder: Path) -> list[Path]:
    """Return the files of all versions in `folder`, which may also be one file, in the order of their numbers.

    Raises:
        ConfigError: there are none, or those of several loggers.
    """
    if folder.is_file():
        return [folder]
    found = (list(folder.glob(pattern)) for pattern in ("metrics.csv", "*/metrics.csv", "*/*/metrics.csv"))
    paths: list[Path] = next(filter(None, found), [])
    loggers = sorted({str(path.parents[1]) for path in paths})
    if len(loggers) != 1:
        raise ConfigError(
            f"{folder} has {'metrics of ' + ', '.join(loggers) if loggers else 'no metrics.csv'}",
            expected="the folder of one run, of its logger or of a version, or a metrics.csv",
            do="pass the default_root_dir of a run, or the folder of its logger",
        )  # fmt: skip
    return sorted(paths, key=lambda path: path.parent.name.removeprefix("version_").zfill(9))


def joined(paths: list[Path]) -> tuple[History, str]:
    """Return the last run of `paths`, and in words which of them it is from.

    A version that begins after the first step of the one before it resumes it; another one begins another run.

    Raises:
        ConfigError: a file has no steps.
    """
    drawn: list[str] = []
    earlier: list[str] = []
    resumed: list[int] = []
    rows: dict[int, dict[str, float]] = {}
    for path in paths:
        if not (new := _rows(path)):
            continue
        first = next(iter(new))
        if first <= max(1, min(rows, default=first)):
            earlier, drawn, resumed, rows = earlier + drawn, [], [], {}
        else:  # from a checkpoint, after which the fit before it may have made more steps
            resumed = [*(step for step in resumed if step < first - 1), first - 1]
            rows = {step: values for step, values in rows.items() if step < first}
        rows |= new
        drawn.append(path.parent.name)
    history = History(first_step=max(min(rows, default=1) - 1, 0), resumed=resumed)
    for step in sorted(rows):
        for name, value in rows[step].items():
            history.put("metrics", name, step, value, "validate" if name.startswith(_EVALUATION) else "train")
    sources = f"drawn: {', '.join(drawn)}"
    sources += f"; resumed at step {', '.join(map(count, resumed))}" if resumed else ""
    return history, sources + (f"; not drawn, earlier runs: {', '.join(earlier)}" if earlier else "")


def _rows(path: Path) -> dict[int, dict[str, float]]:
    """Return the values of each step, without a last line that a run is still writing."""
    rows: dict[int, dict[str, float]] = {}
    with path.open(newline="") as file:
        lines = csv.DictReader(line for line in file if line.endswith("\n"))
        if "step" not in (lines.fieldnames or ()):
            raise ConfigError(f"{path} has no column 'step'", expected="a file of the logger csv", do="pass another")
        for line in lines:
            values = {name: float(text) for name, text in line.items() if text and name not in ("epoch", "step")}
            rows.setdefault(int(line["step"]), {}).update(values)
    return rows
