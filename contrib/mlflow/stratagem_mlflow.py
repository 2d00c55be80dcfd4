"""Metrics and hyper-parameters in MLflow: on a server, or in a local store that needs none."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs
from attrs import define, field

from stratagem.api import Logger, hookimpl
from stratagem.api.redaction import redact
from stratagem.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from stratagem.api import RunContext

#: What MLflow takes at most: characters of a name and of a parameter's value, entries of one request.
MAX_NAME, MAX_PARAM, MAX_PARAMS, MAX_METRICS = 250, 6000, 100, 1000


class Absent:
    """Stands for the client on other ranks than 0: takes any call and does nothing, so that a module need not ask."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Absent:
        return self


@define(eq=False, kw_only=True)
class MLflowLogger(Logger):
    """Logs to one MLflow run, on rank 0; creates nothing before there is something to log.

    The run is FINISHED when training ends, FAILED by an exception and KILLED by Ctrl-C. What is logged later is added.
    """

    #: Which experiment the run is part of; made if there is none of this name.
    experiment_name: str = "stratagem_logs"
    #: What the run is called; MLflow makes up something if not given.
    run_name: str | None = None
    #: The run's identity: one that exists is continued, which a resumed training wants. A new one if not given.
    id: str | None = None
    #: Where runs are kept: a server for many to see, a database for no server. By default what MLflow itself was told,
    #: or else ``mlflow.db`` in ``default_root_dir``.
    tracking_uri: str | None = None
    #: Words and values to find the run by.
    tags: dict[str, str] | None = None

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _client: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: Identity of the run, once there is one.
    _id: str | None = field(init=False, default=None)
    #: As MLflow knows it; None before there is a run.
    _status: str | None = field(init=False, default=None)
    #: Not yet written.
    _hparams: dict[str, Any] = field(init=False, factory=dict)
    #: How MLflow can call each metric.
    _names: dict[str, str] = field(init=False, factory=dict)

    @property
    def experiment(self) -> MlflowClient | Absent:
        """The client, to be used with `run_id`; on other ranks than 0 something that does nothing."""
        if self._root is None:
            raise ConfigError(
                "mlflow.experiment was asked for outside a run", expected="a trainer at work",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else Absent()

    @property
    def run_id(self) -> str | None:
        """Identity of the MLflow run, to continue it with ``id``; None before there is one."""
        return self._id

    # --- Hooks ---------------------------------------------------------------------------------------------------

    @hookimpl
    def prepare_module(self, run: RunContext) -> None:
        self._meet(run)

    @hookimpl
    def log_hyperparams(self, params: dict[str, Any], run: RunContext) -> None:
        self._meet(run)
        self._hparams = dict(params)
        if not run.owns_loop:  # else on_fit_start follows, where all ranks can fail together
            self._open()

    @hookimpl
    def on_fit_start(self, run: RunContext) -> None:
        self._meet(run)
        error = None
        if self._rank == 0:
            try:
                self._begin()
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
                self._hparams = {}
        run.collectives.fail_together(error)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
        self._meet(run)
        client = self._open()
        from mlflow.entities import Metric

        assert self._id is not None, "an open run has one"
        now = int(time.time() * 1000)
        values = [Metric(self._name(name), float(value), now, step) for name, value in metrics.items()]
        for some in _portions(values, MAX_METRICS):
            client.log_batch(self._id, metrics=some)

    @hookimpl
    def on_fit_end(self) -> None:
        self._end("FINISHED")

    @hookimpl
    def on_exception(self, exception: BaseException) -> None:
        try:
            self._end("KILLED" if isinstance(exception, KeyboardInterrupt) else "FAILED", even_if_ended=True)
            self.close()
        except Exception as error:  # noqa: BLE001 - must not hide the exception that brought us here
            warnings.warn(f"MLflow run {self._id} was not marked as failed ({_first_line(error)})", stacklevel=2)

    @hookimpl
    def teardown(self) -> None:
        self.close()

    # --- The run -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the run and let go of the store; safe to call twice. A later metric is added to the same run."""
        try:
            self._end("FINISHED")
        finally:
            client = self._client if self._is_open else None
            self._client = None
            _let_go(client, connections_are_ours=True)

    @property
    def _is_open(self) -> bool:
        """Whether this process has a client; one from before a fork has the parent's connections."""
        return self._client is not None and self._pid == os.getpid()

    def _meet(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _begin(self) -> None:
        """Find out on rank 0, before training, whether it can be logged."""
        _mlflow()
        uri = self._uri()
        if uri is None:
            self._refuse_unwritable()
        elif uri.startswith(("http://", "https://", "databricks")):
            with self._explaining(uri):
                self._connect(uri).get_experiment_by_name(self.experiment_name)
        if self._hparams or self._status is not None:
            self._open()
            self._set_status("RUNNING")

    def _end(self, status: str, even_if_ended: bool = False) -> None:
        if self._is_open and (self._status == "RUNNING" or (self._status is not None and even_if_ended)):
            self._set_status(status)

    def _set_status(self, status: str) -> None:
        if status == self._status:
            return
        if status == "RUNNING":
            self._client.update_run(self._id, status=status)
        else:
            self._client.set_terminated(self._id, status)
        self._status = status

    def _open(self) -> MlflowClient:
        if not self._is_open:
            _let_go(self._client, connections_are_ours=False)
            uri = self._uri()
            if uri is None:
                self._make_folder()
            with self._explaining(uri):
                client = self._connect(uri)
                if self._status is None:
                    self._choose_run(client, local=uri is None)
            self._client, self._pid = client, os.getpid()
        if self._hparams:
            self._log_params(self._hparams)
            self._hparams = {}
        opened: MlflowClient = self._client
        return opened

    def _choose_run(self, client: MlflowClient, local: bool) -> None:
        if self.id is None:
            from mlflow.tracking.context.registry import resolve_tags

            experiment = self._experiment_id(client, local)
            run = client.create_run(experiment, tags=resolve_tags(self.tags), run_name=self.run_name)
            self._id = run.info.run_id
        else:
            client.update_run(self.id, status="RUNNING", name=self.run_name)
            for name, value in (self.tags or {}).items():
                client.set_tag(self.id, name, value)
            self._id = self.id
        self._status = "RUNNING"

    def _experiment_id(self, client: MlflowClient, local: bool) -> str:
        found = client.get_experiment_by_name(self.experiment_name)
        if found is None:
            # MLflow would keep artifacts of a local store in whatever folder the program runs in.
            artifacts = self._folder.joinpath("mlartifacts", quote(self.experiment_name, safe="")) if local else None
            with contextlib.suppress(_mlflow().MlflowException):  # another run may have made it meanwhile
                return client.create_experiment(self.experiment_name, None if artifacts is None else artifacts.as_uri())
            found = client.get_experiment_by_name(self.experiment_name)
        if found is None or found.lifecycle_stage != "active":
            raise ConfigError(
                f"mlflow.experiment_name is {self.experiment_name!r}, which "
                + ("cannot be made" if found is None else "was deleted"),
                expected="an experiment to add a run to", do="restore it, or choose another name",
            )  # fmt: skip
        identity: str = found.experiment_id
        return identity

    # --- The store -----------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return self._root.absolute()

    def _uri(self) -> str | None:
        """Return which store was asked for; None for the local one."""
        if self.tracking_uri is not None:
            return self.tracking_uri
        tracking = _mlflow().tracking
        uri: str | None = tracking.get_tracking_uri() if tracking.is_tracking_uri_set() else None
        return uri

    def _connect(self, uri: str | None) -> MlflowClient:
        if uri is None:  # quote no more than has to be: MLflow makes a folder of the quoted name as well
            uri = f"sqlite:///{quote(str(self._folder / 'mlflow.db'), safe='/ #')}"
        client: MlflowClient = _mlflow().tracking.MlflowClient(uri)
        return client

    @contextlib.contextmanager
    def _explaining(self, uri: str | None) -> Iterator[None]:
        """Turn what MLflow says against the store or the run into a sentence with the options that chose them."""
        try:
            yield
        except _mlflow().MlflowException as error:
            option = "mlflow.tracking_uri" if self.tracking_uri is not None else "MLflow's tracking URI"
            store = "the store in default_root_dir" if uri is None else f"{option}, {redact('uri', uri)!r},"
            if self.id is not None:
                store += f" with mlflow.id {self.id!r}"
            raise ConfigError(
                f"{store} cannot be used ({_first_line(error)})", expected="a store that MLflow can open",
                do="change it, or leave tracking_uri and id unset",
            ) from error  # fmt: skip

    def _refuse_unwritable(self) -> None:
        """Raise if the folder of the local store can be told to be beyond reach, without creating it."""
        try:
            existing = next(each for each in (self._folder, *self._folder.parents) if each.exists())
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error
        if not existing.is_dir():
            raise self._unwritable(f"{existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._unwritable(f"no permission to write to {existing}")

    def _make_folder(self) -> None:
        """Make sure that the database can be written: MLflow would try again and again for minutes."""
        self._refuse_unwritable()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "mlflow.db").open("ab").close()
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error

    def _unwritable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"default_root_dir is {str(self._root)!r}, where mlflow.db cannot be written ({reason})",
            expected="a folder to log to", do="change default_root_dir, or set mlflow.tracking_uri",
        )  # fmt: skip

    # --- What MLflow takes ---------------------------------------------------------------------------------------

    def _log_params(self, hparams: dict[str, Any]) -> None:
        """Log what the run does not have; MLflow keeps the first value of a parameter forever."""
        from mlflow.entities import Param

        params = {_clean(name): _cut(name, value) for name, value in _flat(hparams)}
        kept = self._client.get_run(self._id).data.params
        changed = [name for name, value in params.items() if kept.get(name, value) != value]
        if changed:
            name = changed[0]
            warnings.warn(
                f"MLflow run {self._id} keeps its first value of {', '.join(changed)} "
                f"({name} stays {kept[name]}, not {params[name]}): start another run for other hyper-parameters",
                stacklevel=2,
            )
        fresh = [Param(name, value) for name, value in params.items() if name not in kept]
        for some in _portions(fresh, MAX_PARAMS):
            self._client.log_batch(self._id, params=some)

    def _name(self, name: str) -> str:
        """Return a name that MLflow takes for metric `name`, different from those of all others."""
        if name not in self._names:
            clean = base = _clean(name)
            for number in itertools.count(2):
                if clean not in self._names.values():
                    break
                clean = f"{base[: MAX_NAME - 8]}_{number}"
            if clean != name:
                warnings.warn(f"MLflow cannot call a metric {name!r}: it is {clean!r} there", stacklevel=2)
            self._names[name] = clean
        return self._names[name]

    # --- Travel to another process -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = [each.name for each in attrs.fields(type(self))]
        return {name: getattr(self, name) for name in names} | {"_client": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _mlflow() -> Any:
    try:
        import mlflow
    except ImportError as error:
        raise PluginError(
            f"logger 'mlflow' cannot be used ({error})", expected="the package mlflow-skinny (or mlflow)",
            do="pip install mlflow-skinny sqlalchemy alembic",
        ) from error  # fmt: skip
    return mlflow


def _let_go(client: Any, connections_are_ours: bool) -> None:
    """Close the connections of a SQL store, or forget a parent's without closing them."""
    engine = getattr(getattr(getattr(client, "_tracking_client", None), "store", None), "engine", None)
    if engine is not None:
        engine.dispose(close=connections_are_ours)


def _portions(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


def _flat(params: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield hyper-parameters as text, with the names of nested ones joined."""
    for name, value in params.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", str(value)


def _cut(name: str, value: str) -> str:
    if len(value) > MAX_PARAM:
        warnings.warn(
            f"hyper-parameter {name!r} has {len(value)} characters: MLflow keeps the first {MAX_PARAM}", stacklevel=2
        )
    return value[:MAX_PARAM]


def _clean(name: str) -> str:
    """Replace the characters that MLflow refuses, and what it would take for a path that leads elsewhere."""
    allowed = re.sub(r"[^/\w.\- ]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "_"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")
