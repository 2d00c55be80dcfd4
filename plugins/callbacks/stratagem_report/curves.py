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

    A version that begins after the first step of the one before it resumes it; another one begins another run. One
    without steps has results of a validation or a test.

    Raises:
        ConfigError: a file has no steps.
    """
    drawn: list[str] = []
    earlier: list[str] = []
    rows: dict[int, dict[str, float]] = {}
    history = History()
    for path in paths:
        first, new = _rows(path)
        if not first:
            history.results |= new.get(0, {})
        elif first <= max(1, min(rows, default=first)):
            earlier, drawn, rows, history = earlier + drawn, [], new, History()
        else:  # from a checkpoint, after which the fit before it may have made more steps
            new.pop(0, None)  # of a validation before the fit
            history.resumed, history.results = [*(step for step in history.resumed if step < first - 1), first - 1], {}
            rows = {step: values for step, values in rows.items() if step < first}
            rows |= {step: rows.get(step, {}) | values for step, values in new.items()}
        drawn.append(path.parent.name)
    history.first_step = max(min(rows, default=1) - 1, 0)
    for step in sorted(rows):
        for name, value in rows[step].items():
            history.put("metrics", name, step, value, "validate" if name.startswith(_EVALUATION) else "train")
    sources = f"drawn: {', '.join(drawn)}"
    sources += f"; resumed at step {', '.join(map(count, history.resumed))}" if history.resumed else ""
    return history, sources + (f"; not drawn, earlier runs: {', '.join(earlier)}" if earlier else "")


def _rows(path: Path) -> tuple[int, dict[int, dict[str, float]]]:
    """Return the first step of the fit (0 if there was none) and the values of each step.

    A last line that a run is still writing is left out. A row without an epoch is not of a step: callbacks log before
    the first one, at the step of the checkpoint.
    """
    rows: dict[int, dict[str, float]] = {}
    first = 0
    with path.open(newline="") as file:
        lines = csv.DictReader(line for line in file if line.endswith("\n"))
        if "step" not in (lines.fieldnames or ()):
            raise ConfigError(f"{path} has no column 'step'", expected="a file of the logger csv", do="pass another")
        try:
            for line in lines:
                step, epoch = int(line.pop("step")), line.pop("epoch", "")
                first = first or (step if epoch else 0)
                rows.setdefault(step, {}).update({name: float(text) for name, text in line.items() if text})
        except ValueError as error:
            said = f"{path} has text among its numbers ({error})"
            raise ConfigError(said, expected="a file of the logger csv", do="pass another") from None
    return first or min(filter(None, rows), default=0), rows
