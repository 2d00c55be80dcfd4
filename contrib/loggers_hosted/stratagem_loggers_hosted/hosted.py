"""What the loggers of this package share: one run on rank 0, which opens at the first entry."""

from __future__ import annotations

import contextlib
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path
from stratagem.errors import ConfigError, PluginError
from stratagem_trainer.api import Logger

if TYPE_CHECKING:
    from stratagem.api import RunContext


class NoOpRun:
    """Accepts any call and does nothing: the run on ranks other than 0, so that modules need not check the rank."""

    def __getattr__(self, name: str) -> NoOpRun:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NoOpRun:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        """Do nothing."""


@define(eq=False, kw_only=True)
class HostedLogger(Logger):
    """Log to one run of a client library on rank 0.

    The run ends when the trainer is closed, or with an exception; later metrics continue it.
    """

    #: The entry point's name, for messages.
    label: ClassVar[str]

    #: Project of the run; created if it does not exist.
    project: str = "stratagem_logs"
    #: Name of the run; by default the library generates one.
    name: str | None = None
    #: Tags of the run.
    tags: list[str] | None = None
    #: The `run_id` of an earlier run to continue; a new run if not given.
    version: str | None = None

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _run: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: Id of the run, once there is one.
    _id: str | None = field(init=False, default=None)
    #: Hyper-parameters that are not written yet.
    _hparams: dict[str, Any] = field(init=False, factory=dict)
    _place: str = field(init=False, default="")

    # --- What a library does differently ---------------------------------------------------------------------------

    @abstractmethod
    def library(self) -> Any:
        """Import the client library."""

    @abstractmethod
    def start(self, version: str | None) -> tuple[Any, str, str]:
        """Return the open run `version` or a new one, its id, and the folder that it writes, "" for none."""

    @abstractmethod
    def write_metrics(self, run: Any, metrics: dict[str, float], step: int) -> None:
        """Write numbers by name."""

    @abstractmethod
    def write_hyperparams(self, run: Any, params: dict[str, Any]) -> None:
        """Write plain values by name."""

    @abstractmethod
    def end(self, run: Any, failed: str) -> None:
        """End the run and wait until all is written; `failed` tells what ended training, "" if nothing failed."""

    # --- Hooks ---------------------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The run of the client library; on ranks other than 0 an object that does nothing."""
        if self._root is None:
            raise ConfigError(
                f"{self.label}.experiment was read outside a run", expected="a running trainer",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else NoOpRun()

    def written_files(self) -> dict[str, str]:
        """Return the folder of the run that is open."""
        return {self.label: self._place} if self._is_open and self._place else {}

    @property
    def run_id(self) -> str | None:
        """Id of the run, to continue it with ``version``; None before there is one."""
        return self._id

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        self._attach(run)

    @hookimpl
    def log_hyperparams(self, params: dict[str, Any], run: RunContext) -> None:
        self._attach(run)
        self._hparams = dict(params)
        if not run.owns_loop:  # else on_fit_start follows, where all ranks can fail together
            self._open()

    @hookimpl
    def on_fit_start(self, run: RunContext) -> None:
        self._attach(run)
        error = None
        if self._rank == 0:
            try:
                self._library()
                if self._hparams:
                    self._open()
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error, self._hparams = caught, {}
        run.collectives.fail_together(error)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
        self._attach(run)
        self.write_metrics(self._open(), metrics, step)

    @hookimpl
    def on_exception(self, exception: BaseException) -> None:
        try:
            self.close(failed=f"{type(exception).__name__}: {exception}")
        except Exception as error:  # noqa: BLE001 - must not hide the exception that ends the run
            warnings.warn(f"{self.label} run {self._id} may lack the last metrics ({error})", stacklevel=2)

    @hookimpl
    def teardown(self) -> None:
        self.close()

    # --- The run -------------------------------------------------------------------------------------------------

    def close(self, failed: str = "") -> None:
        """End the run; safe to call twice. A later metric continues it."""
        run = self._run if self._is_open else None
        self._run = None
        if run is not None:
            self.end(run, failed)

    @property
    def folder(self) -> Path:
        """``default_root_dir`` of the run, or the option `save_dir`."""
        assert self._root is not None
        return as_path(getattr(self, "save_dir", None) or self._root).absolute()

    @property
    def _is_open(self) -> bool:
        """Whether this process has a run. One from before a fork belongs to the parent."""
        return self._run is not None and self._pid == os.getpid()

    def _attach(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _library(self) -> Any:
        try:
            return self.library()
        except ImportError as error:
            raise PluginError(
                f"logger {self.label!r} cannot be used ({error})", expected="its client library",
                do=f'pip install "stratagem-loggers-hosted[{self.label}]"',
            ) from error  # fmt: skip

    def _open(self) -> Any:
        if not self._is_open:
            version = self.version if self._run is not None else self._id or self.version
            self._library()
            with self._explaining():
                self._run, self._id, self._place = self.start(version)
            self._pid = os.getpid()
        if self._hparams:
            self.write_hyperparams(self._run, self._hparams)
            self._hparams = {}
        return self._run

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ConfigError(
                f"logger {self.label!r} could not start a run ({reason})",
                expected="options, a login and a folder that the library can use",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open run out. A subclass names this method: every class of a plugin gets one otherwise."""
        names = [each.name for each in attrs.fields(type(self))]
        run_id = self._id if self._run is None else None  # an open run stays with its process
        return {name: getattr(self, name) for name in names} | {"_run": None, "_id": run_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
