"""Log metrics and hyper-parameters to MLflow: to a server, or to a local SQLite store."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import attrs
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.options import redact
from stratagem.api.paths import as_path, is_remote
from stratagem.errors import ConfigError, PluginError
from stratagem_trainer.api import Logger

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: Limits of MLflow: characters of a name and of a parameter value, entries of one request.
MAX_NAME, MAX_PARAM, MAX_PARAMS, MAX_METRICS = 250, 6000, 100, 1000


class NoOpClient:
    """Accepts any call and does nothing: the client on ranks other than 0, so that modules need not check the rank."""

    def __getattr__(self, name: str) -> NoOpClient:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NoOpClient:
        return self


@define(eq=False, kw_only=True)
class MLflowLogger(Logger):
    """Log to one MLflow run on rank 0; create no run before the first entry.

    The run is FINISHED when training ends, FAILED by an exception and KILLED by Ctrl-C. Later metrics are added to it.
    """

    #: Name of the experiment; created if it does not exist.
    experiment_name: str = "stratagem_logs"
    #: Name of the run; by default MLflow generates one.
    run_name: str | None = None
    #: Id of an existing run to continue, when training is resumed; a new run if not given.
    id: str | None = None
    #: URI of the server or database. By default the one set for MLflow, else ``mlflow.db`` in ``default_root_dir``.
    tracking_uri: str | None = None
    #: Tags of the run.
    tags: dict[str, str] | None = None
    #: True uploads the best checkpoint (the newest, without a monitor) as an artifact when training ends; "all" each
    #: one that the callback keeps, once it is written, for which training waits. Sends whole files.
    log_model: bool | Literal["all"] = False

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _client: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: Id of the run, once there is one.
    _id: str | None = field(init=False, default=None)
    #: Status of the run in MLflow; None before there is a run.
    _status: str | None = field(init=False, default=None)
    #: Hyper-parameters that are not written yet.
    _hparams: dict[str, Any] = field(init=False, factory=dict)
    #: Name in MLflow of each metric.
    _names: dict[str, str] = field(init=False, factory=dict)
    #: The callback whose checkpoints are uploaded, while a fit runs.
    _checkpoints: Any = field(init=False, default=None)

    @property
    def experiment(self) -> MlflowClient | NoOpClient:
        """The client, to use with `run_id`; on ranks other than 0 an object that does nothing."""
        if self._root is None:
            raise ConfigError(
                "mlflow.experiment was read outside a run", expected="a running trainer",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else NoOpClient()

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, to continue it with ``id``; None before there is one."""
        return self._id

    # --- Hooks ---------------------------------------------------------------------------------------------------

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
    def on_fit_start(self, trainer: TrainerView, run: RunContext) -> None:
        self._attach(run)
        self._checkpoints = trainer.checkpoint_callback
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
        self._attach(run)
        client = self._open()
        from mlflow.entities import Metric

        assert self._id is not None, "set by _open"
        now = int(time.time() * 1000)
        values = [Metric(self._name(name), float(value), now, step) for name, value in metrics.items()]
        for batch in _batches(values, MAX_METRICS):
            client.log_batch(self._id, metrics=batch)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, path: Path, run: RunContext) -> Generator[None, Any, Any]:
        answer = yield
        if self._checkpoints is not None and self.log_model == "all" and self._rank == 0:
            kept = {*self._checkpoints.best_k_models, self._checkpoints.last_model_path}
            if str(path) in kept:  # not those of a search for a learning rate
                run.saver.afterwards(functools.partial(self._log_checkpoint, str(path)))
        return answer

    @hookimpl
    def on_fit_end(self, trainer: TrainerView) -> None:
        saved, self._checkpoints = trainer.checkpoint_callback, None
        if self.log_model is True and self._rank == 0:
            self._log_checkpoint(saved.best_model_path or saved.last_model_path)
        self._end("FINISHED")

    @hookimpl
    def on_exception(self, exception: BaseException) -> None:
        self._checkpoints = None
        try:
            self._end("KILLED" if isinstance(exception, KeyboardInterrupt) else "FAILED", even_if_ended=True)
            self.close()
        except Exception as error:  # noqa: BLE001 - must not hide the exception that ends the run
            warnings.warn(f"MLflow run {self._id} was not marked as failed ({_first_line(error)})", stacklevel=2)

    @hookimpl
    def teardown(self) -> None:
        self.close()

    # --- The run -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the run and close the connections; safe to call twice. A later metric is added to the same run."""
        try:
            self._end("FINISHED")
        finally:
            client = self._client if self._is_open else None
            self._client = None
            _dispose(client, close=True)

    @property
    def _is_open(self) -> bool:
        """Whether this process has a client. One from before a fork has connections of the parent."""
        return self._client is not None and self._pid == os.getpid()

    def _attach(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _begin(self) -> None:
        """Check on rank 0, before training, that everything can be logged."""
        _mlflow()
        if self.log_model and self._checkpoints is None:
            raise ConfigError(
                f"mlflow.log_model is {self.log_model!r} and no callback saves checkpoints",
                expected="a callback that does", do="add the callback model_checkpoint, or set log_model to False",
            )  # fmt: skip
        uri = self._uri()
        if uri is None:
            self._check_writable()
        elif uri.startswith(("http://", "https://", "databricks")):
            with self._explaining(uri):
                self._connect(uri).get_experiment_by_name(self.experiment_name)
        if self._hparams or self._status is not None:
            self._open()
            self._set_status("RUNNING")

    def _log_checkpoint(self, path: str) -> None:
        """Upload to ``checkpoints/`` of the run; a file of the same name is replaced."""
        if not path or is_remote(as_path(path)):
            warnings.warn(f"mlflow.log_model: no local checkpoint was kept ({path!r}): none is uploaded", stacklevel=2)
            return
        client = self._open()
        assert self._id is not None, "set by _open"
        if as_path(path).is_dir():
            client.log_artifacts(self._id, path, f"checkpoints/{as_path(path).name}")
        else:
            client.log_artifact(self._id, path, "checkpoints")

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
            _dispose(self._client, close=False)
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
            # By default MLflow would put artifacts of a local store into the working directory.
            artifacts = self._folder.joinpath("mlartifacts", quote(self.experiment_name, safe="")) if local else None
            with contextlib.suppress(_mlflow().MlflowException):  # another run may have created it meanwhile
                return client.create_experiment(self.experiment_name, None if artifacts is None else artifacts.as_uri())  # type: ignore[no-any-return]
            found = client.get_experiment_by_name(self.experiment_name)
        if found is None or found.lifecycle_stage != "active":
            raise ConfigError(
                f"mlflow.experiment_name is {self.experiment_name!r}, which "
                + ("cannot be created" if found is None else "was deleted"),
                expected="an active experiment", do="restore it, or choose another name",
            )  # fmt: skip
        experiment_id: str = found.experiment_id
        return experiment_id

    # --- The store -----------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return self._root.absolute()

    def _uri(self) -> str | None:
        """Return the URI of the chosen store; None for the local one."""
        if self.tracking_uri is not None:
            return self.tracking_uri
        tracking = _mlflow().tracking
        uri: str | None = tracking.get_tracking_uri() if tracking.is_tracking_uri_set() else None
        return uri

    def _connect(self, uri: str | None) -> MlflowClient:
        if uri is None:  # quote as little as possible: MLflow also creates a folder with the quoted name
            uri = f"sqlite:///{quote(str(self._folder / 'mlflow.db'), safe='/ #')}"
        client: MlflowClient = _mlflow().tracking.MlflowClient(uri)
        return client

    @contextlib.contextmanager
    def _explaining(self, uri: str | None) -> Iterator[None]:
        """Turn errors of MLflow about the store or the run into ConfigErrors that name the options."""
        try:
            yield
        except _mlflow().MlflowException as error:
            option = "mlflow.tracking_uri" if self.tracking_uri is not None else "MLflow's tracking URI"
            store = "the store in default_root_dir" if uri is None else f"{option}, {redact('uri', uri)!r},"
            if self.id is not None:
                store += f" with mlflow.id {self.id!r}"
            raise ConfigError(
                f"{store} cannot be used ({_first_line(error)})", expected="a store that MLflow can use",
                do="change it, or leave tracking_uri and id unset",
            ) from error  # fmt: skip

    def _check_writable(self) -> None:
        """Raise if the folder of the local store cannot be written; do not create it."""
        try:
            existing = next(each for each in (self._folder, *self._folder.parents) if each.exists())
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from error
        if not existing.is_dir():
            raise self._not_writable(f"{existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise self._not_writable(f"no permission to write to {existing}")

    def _make_folder(self) -> None:
        """Create the folder and the database file: MLflow would retry for minutes if they cannot be written."""
        self._check_writable()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / "mlflow.db").open("ab").close()
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from error

    def _not_writable(self, reason: str) -> ConfigError:
        return ConfigError(
            f"default_root_dir is {str(self._root)!r}, where mlflow.db cannot be written ({reason})",
            expected="a folder that can be written", do="change default_root_dir, or set mlflow.tracking_uri",
        )  # fmt: skip

    # --- Limits of MLflow ----------------------------------------------------------------------------------------

    def _log_params(self, hparams: dict[str, Any]) -> None:
        """Log parameters that the run does not have; MLflow never changes the value of a parameter."""
        from mlflow.entities import Param

        params = {_clean(name): _cut(name, value) for name, value in _flat(hparams)}
        kept = self._client.get_run(self._id).data.params
        changed = [name for name, value in params.items() if kept.get(name, value) != value]
        if changed:
            name = changed[0]
            warnings.warn(
                f"MLflow run {self._id} keeps its first value of {', '.join(changed)} "
                f"({name} stays {kept[name]}, not {params[name]}): start another run to log other values",
                stacklevel=2,
            )
        fresh = [Param(name, value) for name, value in params.items() if name not in kept]
        for batch in _batches(fresh, MAX_PARAMS):
            self._client.log_batch(self._id, params=batch)

    def _name(self, name: str) -> str:
        """Return a unique name for metric `name` that MLflow accepts."""
        if name not in self._names:
            clean = base = _clean(name)
            for number in itertools.count(2):
                if clean not in self._names.values():
                    break
                clean = f"{base[: MAX_NAME - 8]}_{number}"
            if clean != name:
                warnings.warn(f"MLflow does not accept metric name {name!r}: it is logged as {clean!r}", stacklevel=2)
            self._names[name] = clean
        return self._names[name]

    # --- Pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = [each.name for each in attrs.fields(type(self))]
        return {name: getattr(self, name) for name in names} | {"_client": None, "_checkpoints": None}

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


def _dispose(client: Any, close: bool) -> None:
    """Close the connections of a SQL store; with `close=False`, drop those of a parent process without closing them."""
    engine = getattr(getattr(getattr(client, "_tracking_client", None), "store", None), "engine", None)
    if engine is not None:
        engine.dispose(close=close)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[begin : begin + size] for begin in range(0, len(items), size))


def _flat(params: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and values as text; nested names are joined with "/"."""
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
    """Replace characters that MLflow refuses, and path components that lead out of a folder."""
    allowed = re.sub(r"[^/\w.\- ]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "_"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")
