"""Metrics in ``metrics.csv``: a row for each step that logged something, a column for each metric."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

from attrs import define, field

from stratagem import Logger, hookimpl
from stratagem.options import at_least


@define(eq=False, kw_only=True)
class CSVLogger(Logger):
    """Writes ``<save_dir>/<name>/version_N/metrics.csv`` on rank 0; creates nothing before the first metric."""

    #: Parent of all logs; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Folder of this experiment.
    name: str = "stratagem_logs"
    #: Folder of this run; the next free ``version_N`` if not given. An existing one is appended to.
    version: int | str | None = None
    #: Rows to keep in memory: fewer lose less when the machine stops, more write less often.
    flush_every_n_steps: int = field(default=100, validator=at_least(1))

    _folder: Path | None = field(init=False, default=None)
    _columns: list[str] = field(init=False, factory=list)
    _rows: list[dict[str, Any]] = field(init=False, factory=list)
    _hparams: dict[str, Any] = field(init=False, factory=dict)

    @property
    def log_dir(self) -> Path | None:
        """Where the file is; None before the first metric."""
        return self._folder

    @hookimpl
    def log_hyperparams(self, params, run):
        self._hparams = params

    @hookimpl
    def log_metrics(self, metrics, step, run):
        if self._folder is None:
            self._open(run.settings.default_root_dir)
        row = {"step": step, **metrics}
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1].update(row)
        else:
            self._rows.append(row)
        if len(self._rows) > self.flush_every_n_steps:
            self._flush_finished()

    @hookimpl
    def on_validation_end(self):
        self._flush_finished()

    @hookimpl
    def on_fit_end(self):
        self.flush()

    @hookimpl
    def on_exception(self):
        self.flush()

    @hookimpl
    def teardown(self):
        self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if self._rows:
            self._write(self._rows)
            self._rows.clear()

    def _flush_finished(self) -> None:
        """Write all rows but the last, which may still grow."""
        if len(self._rows) > 1:
            self._write(self._rows[:-1])
            del self._rows[:-1]

    def _open(self, root: Path) -> None:
        parent = Path(self.save_dir or root) / self.name
        version = _next_version(parent) if self.version is None else self.version
        self._folder = parent / (f"version_{version}" if isinstance(version, int) else version)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._hparams:
            (self._folder / "hparams.json").write_text(json.dumps(self._hparams, indent=2, default=str) + "\n")
        if self._file.exists():
            with self._file.open(newline="") as file:
                self._columns = next(csv.reader(file), [])

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / "metrics.csv"

    def _write(self, rows: list[dict[str, Any]]) -> None:
        new = dict.fromkeys(name for row in rows for name in row if name not in self._columns)
        if new:
            first = ["epoch", "step"]
            self._columns = [*first, *(name for name in [*self._columns, *new] if name not in first)]
            self._rewrite()
        with self._file.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerows(rows)

    def _rewrite(self) -> None:
        """Give the rows written so far the new columns, in a file that replaces the old one at once."""
        earlier: list[dict[str, Any]] = []
        if self._file.exists():
            with self._file.open(newline="") as file:
                earlier = list(csv.DictReader(file))
        staged = self._file.with_suffix(".staged")
        with staged.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(earlier)
        os.replace(staged, self._file)


def _next_version(parent: Path) -> int:
    taken = [path.name.removeprefix("version_") for path in parent.glob("version_*")]
    return max((int(number) for number in taken if number.isdigit()), default=-1) + 1
