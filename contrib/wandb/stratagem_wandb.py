"""Log metrics, hyper-parameters and checkpoints to Weights & Biases, or to a folder for ``wandb sync``."""

from __future__ import annotations

import atexit
import functools
import os
import warnings
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path, is_remote
from stratagem.errors import ConfigError, PluginError
from stratagem_trainer.api import Logger

if TYPE_CHECKING:
    import wandb

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: The x axis of all charts.
STEP = "trainer/global_step"
#: Options that choose a run; if none is set, a run that is already open is used.
_RUN_OPTIONS = ("project", "name", "id", "save_dir", "tags", "group")


class NoOpRun:
    """Accepts any call and does nothing: the run on ranks other than 0, so that modules need not check the rank."""

    def __getattr__(self, name: str) -> NoOpRun:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NoOpRun:
        return self

    def __getitem__(self, _: Any) -> NoOpRun:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        """Do nothing."""

    def __setattr__(self, _: str, __: Any) -> None:
        """Do nothing."""


@define(eq=False, kw_only=True)
class WandbLogger(Logger):
    """Log to one wandb run on rank 0; start no run before the first entry.

    The run is finished when the trainer is closed, or marked as failed by an exception; later metrics continue it. A
    run that the program has opened is used if no option chooses another one; it is never finished here.
    """

    #: Project of the run; wandb's default if not given.
    project: str | None = None
    #: Name of the run; by default wandb generates one.
    name: str | None = None
    #: Id of an existing run to continue, when training is resumed; a new run if not given.
    id: str | None = None
    #: Folder for wandb's files; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Upload nothing: run ``wandb sync`` later. If False, the variable WANDB_MODE decides.
    offline: bool = False
    #: Tags of the run.
    tags: list[str] | None = None
    #: Group of the run: wandb shows runs of a group together.
    group: str | None = None
    #: True uploads the best checkpoint (the newest, without a monitor) when training ends; "all" each one that the
    #: callback keeps, once it is written, for which training waits. Sends whole files.
    log_model: bool | Literal["all"] = False

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _run: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: Whether the run was opened here, and must be finished here.
    _owned: bool = field(init=False, default=False)
    #: Id of the run, once there is one.
    _id: str | None = field(init=False, default=None)
    #: Hyper-parameters that are not written yet.
    _hparams: dict[str, Any] = field(init=False, factory=dict)
    #: The callback whose checkpoints are uploaded, while a fit runs.
    _checkpoints: Any = field(init=False, default=None)

    @property
    def experiment(self) -> wandb.Run | NoOpRun:
        """The wandb run, for images, tables and files; on ranks other than 0 an object that does nothing."""
        if self._root is None:
            raise ConfigError(
                "wandb.experiment was read outside a run", expected="a running trainer",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else NoOpRun()

    def written_files(self) -> dict[str, str]:
        """Return the folder of the run that is open."""
        return {"wandb": str(Path(self._run.dir).parent)} if self._is_open else {}

    @property
    def run_id(self) -> str | None:
        """Id of the wandb run, to continue it with ``id``; None before there is one."""
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
                self._begin(trainer)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
                self._hparams = {}
        run.collectives.fail_together(error)

    @hookimpl
    def log_metrics(self, metrics: dict[str, float], step: int, run: RunContext) -> None:
        self._attach(run)
        self._open().log({**metrics, STEP: step})

    @hookimpl(wrapper=True)
    def save_checkpoint(self, path: Path, run: RunContext) -> Generator[None, Any, Any]:
        answer = yield
        if self._checkpoints is not None and self.log_model == "all" and self._rank == 0:
            kept = {*self._checkpoints.best_k_models, self._checkpoints.last_model_path}
            if str(path) in kept:  # not those of a search for a learning rate
                run.saver.afterwards(functools.partial(self._log_checkpoint, self._checkpoints, str(path)))
        return answer

    @hookimpl
    def on_fit_end(self, trainer: TrainerView) -> None:
        self._checkpoints = None
        saved = trainer.checkpoint_callback
        if self.log_model is True and self._rank == 0:
            self._log_checkpoint(saved, saved.best_model_path or saved.last_model_path)

    @hookimpl
    def on_exception(self) -> None:
        self._checkpoints = None
        try:
            self.close(exit_code=1)
        except Exception as error:  # noqa: BLE001 - must not hide the exception that ends the run
            warnings.warn(f"wandb run {self._id} may lack the last metrics ({error})", stacklevel=2)

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        self.close()
        if run.is_worker and self._id is not None:
            # A process of wandb writes files after `finish` has returned. wandb waits for it at exit, but not in
            # processes that the multiprocessing module started, as this one may be.
            _wandb().teardown()

    # --- The run -------------------------------------------------------------------------------------------------

    def close(self, exit_code: int = 0) -> None:
        """Finish the run if it was opened here; safe to call twice. A later metric continues it."""
        run, owned = (self._run, self._owned) if self._is_open else (None, False)
        self._run = None
        if run is not None and owned:
            run.finish(exit_code=exit_code)

    @property
    def _is_open(self) -> bool:
        """Whether this process has a run. One from before a fork belongs to the parent."""
        return self._run is not None and self._pid == os.getpid()

    def _attach(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _begin(self, trainer: TrainerView) -> None:
        """Check on rank 0, before training, that everything can be logged."""
        _wandb()
        _check_writable(self._folder, self._option)
        if self.log_model and trainer.checkpoint_callback is None:
            raise ConfigError(
                f"wandb.log_model is {self.log_model!r} and no callback saves checkpoints",
                expected="a callback that does",
                do="add the callback model_checkpoint, or set log_model to False",
            )  # fmt: skip
        if self._hparams:
            self._open()

    def _open(self) -> wandb.Run:
        if not self._is_open:
            if self._run is not None:  # from before a fork: only one process may write to a wandb run
                self._id = None
            self._run = self._join() or self._start()
            self._pid, self._id = os.getpid(), self._run.id
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        if self._hparams:
            self._run.config.update(_plain(self._hparams), allow_val_change=True)
            self._hparams = {}
        run: wandb.Run = self._run
        return run

    def _join(self) -> Any:
        """Return the run that the program has open, unless options choose another one."""
        active = _wandb().run
        chosen = self._id is not None or any(getattr(self, option) is not None for option in _RUN_OPTIONS)
        # A run of the parent process would drop everything that the child logs.
        if active is None or chosen or getattr(active, "_init_pid", os.getpid()) != os.getpid():
            return None
        self._owned = False
        return active

    def _start(self) -> Any:
        package, run_id = _wandb(), self._id or self.id
        self._make_folder()
        try:
            run = package.init(
                project=self.project, name=self.name, id=run_id, dir=str(self._folder), tags=self.tags,
                group=self.group, mode="offline" if self.offline else None,
                resume="allow" if run_id is not None else None,
                reinit="create_new" if package.run is not None else None,
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                f"wandb could not start a run ({_first_line(error)})",
                expected="an id that no open run has" if self.offline else "a login, and a server that can be reached",
                do="change wandb.id" if self.offline else "run `wandb login`, or set wandb.offline to True",
            ) from error
        self._owned = True
        atexit.register(_release_at_exit, weakref.ref(self))
        return run

    def _log_checkpoint(self, callback: Any, path: str) -> None:
        if not path:
            warnings.warn("wandb.log_model is True and no checkpoint was kept: none is uploaded", stacklevel=2)
            return
        run, checkpoint = self._open(), as_path(path)
        best = path == callback.best_model_path or self.log_model is True
        saved = callback.state_dict()
        score = saved["best_k_models"].get(path, saved["best_model_score"] if best else None)
        score = None if callback.monitor is None else score
        metadata = {"path": str(path)} | ({} if score is None else {callback.monitor: float(score)})
        artifact = _wandb().Artifact(f"model-{run.id}", type="model", metadata=metadata)
        if is_remote(checkpoint):
            artifact.add_reference(str(path))
        elif checkpoint.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        run.log_artifact(artifact, aliases=["latest", "best"] if best else ["latest"])

    # --- The folder ----------------------------------------------------------------------------------------------

    @property
    def _option(self) -> str:
        return "default_root_dir" if self.save_dir is None else "wandb.save_dir"

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return as_path(self._root if self.save_dir is None else self.save_dir)

    def _make_folder(self) -> None:
        """Create the folder: if wandb cannot, it uses a temporary one without an error."""
        _check_writable(self._folder, self._option)
        try:
            (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _not_writable(self._folder, self._option, error.strerror or str(error)) from error

    # --- Pickling ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = [each.name for each in attrs.fields(type(self))]
        run_id = self._id if self._run is None else None  # an open run stays with its process
        return {name: getattr(self, name) for name in names} | {"_run": None, "_id": run_id, "_checkpoints": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _release_at_exit(reference: weakref.ref[WandbLogger]) -> None:
    """Leave the open run to wandb, which finishes it at exit with the exit code of the program."""
    logger = reference()
    if logger is not None:
        logger._run = None


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise PluginError(
            f"logger 'wandb' cannot be used ({error})", expected="the package wandb", do="pip install wandb"
        ) from error
    return wandb


def _check_writable(folder: Path, option: str) -> None:
    """Raise if `folder` cannot be written; do not create it."""
    if is_remote(folder):
        raise _not_writable(folder, option, "wandb needs a local folder")
    try:
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    except OSError as error:
        raise _not_writable(folder, option, error.strerror or str(error)) from error
    if not existing.is_dir():
        raise _not_writable(folder, option, f"{existing} is a file")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise _not_writable(folder, option, f"no permission to write to {existing}")


def _not_writable(folder: Path, option: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{option} is {str(folder)!r}, which cannot be written ({reason})",
        expected="a local folder that can be written", do=f"change {option}",
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """Return `value` with items that wandb cannot write converted to text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
