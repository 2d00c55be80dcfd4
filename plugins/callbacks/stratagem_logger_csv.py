"""Log metrics to ``metrics.csv``: one row for each step that logged something, one column for each metric."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import is_remote, replace_text
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_log_folders import destination, make, why_not_writable
from stratagem_trainer.api import Logger

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class CSVLogger(Logger):
    """Write ``<save_dir>/<name>/version_N/metrics.csv`` on rank 0; create no folder before the first metric."""

    positional: ClassVar[tuple[str, ...]] = ("save_dir", "name", "version")

    #: Root folder of all logs; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Folder of this experiment; "" leaves this level out.
    name: str = "stratagem_logs"
    #: Folder of this run; the next free ``version_N`` if not given. An existing one is appended to.
    version: int | str | None = field(default=None, validator=at_least(0))
    #: Rows to buffer in memory: fewer lose less if the process is killed, more write less often.
    flush_every_n_steps: int = field(default=100, validator=at_least(1))

    _folder: Path | None = field(init=False, default=None)
    _columns: list[str] = field(init=False, factory=list)
    _rows: list[dict[str, Any]] = field(init=False, factory=list)
    _hparams: dict[str, Any] = field(init=False, factory=dict)

    @property
    def log_dir(self) -> Path | None:
        """The folder of the file; None before the first metric."""
        return self._folder

    def written_files(self) -> dict[str, str]:
        """Return the file."""
        return {} if self._folder is None else {"metrics": str(self._file)}

    @property
    def experiment(self) -> CSVLogger:
        """The logger itself: `log_metrics` and `save` are all there is."""
        return self

    def save(self) -> None:
        """Write buffered rows to the file."""
        self.flush()

    @hookimpl
    def log_hyperparams(self, params: dict[str, Any], run: RunContext) -> None:
        self._hparams = {**self._hparams, **params}
        if self._folder is not None:
            self._write_hparams(self._folder)

    @hookimpl
    def on_fit_start(self, run: RunContext) -> None:
        error = None
        if run.is_global_zero:
            try:
                self._check_writable(destination(self, run.settings.default_root_dir))
            except ConfigError as caught:
                error = caught
        run.collectives.fail_together(error)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
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
    def on_validation_end(self) -> None:
        self._flush_finished()

    @hookimpl
    def on_fit_end(self) -> None:
        self.flush()

    on_exception = teardown = on_fit_end

    def flush(self) -> None:
        """Write buffered rows to the file."""
        if self._rows:
            self._write(self._rows)
            self._rows.clear()

    def _flush_finished(self) -> None:
        """Write all rows but the last, which may still get columns."""
        if len(self._rows) > 1:
            self._write(self._rows[:-1])
            del self._rows[:-1]

    def _open(self, root: Path) -> None:
        folder = destination(self, root)
        self._check_writable(folder)
        try:
            folder = make(self, root)
            self._write_hparams(folder)
        except OSError as error:
            raise self._not_writable(folder, error.strerror or str(error)) from error
        self._folder = folder
        if self._file.exists():
            with self._file.open(newline="") as file:
                self._columns = next(csv.reader(file), [])

    def _write_hparams(self, folder: Path) -> None:
        if self._hparams:
            (folder / "hparams.json").write_text(json.dumps(self._hparams, indent=2, default=str) + "\n")

    def _check_writable(self, folder: Path) -> None:
        """Raise if `folder` cannot be written; do not create it."""
        reason = "files at a URL cannot be appended to" if is_remote(folder) else why_not_writable(folder)
        if reason:
            raise self._not_writable(folder, reason)

    def _not_writable(self, folder: Path, reason: str) -> ConfigError:
        option = "default_root_dir" if self.save_dir is None else "csv.save_dir"
        return ConfigError(
            f"{option} leads to {str(folder)!r}, which cannot be written ({reason})",
            expected="a local folder that can be written", do=f"change {option}, or set logger to False",
        )  # fmt: skip

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
        """Add the new columns to the rows written so far; replaces the file atomically."""
        earlier: list[dict[str, Any]] = []
        if self._file.exists():
            with self._file.open(newline="") as file:
                earlier = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(earlier)
        replace_text(self._file, text.getvalue())
