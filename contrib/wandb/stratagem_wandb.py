"""Metrics, hyper-parameters and checkpoints at Weights & Biases, or in a folder to be sent there later."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, field

from stratagem.api import Logger, hookimpl
from stratagem.api.paths import as_path, is_remote
from stratagem.errors import ConfigError, PluginError

if TYPE_CHECKING:
    import wandb

    from stratagem.api import RunContext, TrainerView

#: The x axis of all charts.
STEP = "trainer/global_step"
#: Options that choose a run; where none is set, one that is open already will do.
_CHOOSING = ("project", "name", "id", "save_dir", "tags", "group")


class Absent:
    """Stands for the run on other ranks than 0: takes any call and does nothing, so that a module need not ask."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Absent:
        return self

    def __getitem__(self, _: Any) -> Absent:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        """Keep nothing."""

    def __setattr__(self, _: str, __: Any) -> None:
        """Keep nothing."""


@define(eq=False, kw_only=True)
class WandbLogger(Logger):
    """Logs to one wandb run, on rank 0; starts nothing before there is something to log.

    The run is finished when the trainer is closed, or marked as failed by an exception; what is logged later continues
    it. A run that the program opened itself is joined if no option chooses another, and never finished.
    """

    #: Project of the run; wandb's own default if not given.
    project: str | None = None
    #: What the run is called; wandb makes up something if not given.
    name: str | None = None
    #: The run's identity: one that exists is continued, which a resumed training wants. A new one if not given.
    id: str | None = None
    #: Parent of wandb's own folder; ``default_root_dir`` if not given.
    save_dir: Path | None = None
    #: Send nothing: ``wandb sync`` does it later. Otherwise the variable WANDB_MODE decides.
    offline: bool = False
    #: Words to find the run by.
    tags: list[str] | None = None
    #: Runs with the same group are shown as one.
    group: str | None = None
    #: Upload the best checkpoint (the newest, without a monitor) when training ends; costs its size over the network.
    log_model: bool = False

    _root: Path | None = field(init=False, default=None)
    _rank: int = field(init=False, default=0)
    _run: Any = field(init=False, default=None)
    _pid: int = field(init=False, default=0)
    #: The run was opened here, and is to be finished here.
    _owned: bool = field(init=False, default=False)
    #: Identity of the run, once there is one.
    _id: str | None = field(init=False, default=None)
    #: Not yet written.
    _hparams: dict[str, Any] = field(init=False, factory=dict)

    @property
    def experiment(self) -> wandb.Run | Absent:
        """The wandb run, for what is not a number; on other ranks than 0 something that does nothing."""
        if self._root is None:
            raise ConfigError(
                "wandb.experiment was asked for outside a run", expected="a trainer at work",
                do="use it in the module's methods or in a callback",
            )  # fmt: skip
        return self._open() if self._rank == 0 else Absent()

    @property
    def run_id(self) -> str | None:
        """Identity of the wandb run, to continue it with ``id``; None before there is one."""
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
    def on_fit_start(self, trainer: TrainerView, run: RunContext) -> None:
        self._meet(run)
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
        self._meet(run)
        self._open().log({**metrics, STEP: step})

    @hookimpl
    def on_fit_end(self, trainer: TrainerView) -> None:
        if self.log_model and self._rank == 0:
            self._log_checkpoint(trainer.checkpoint_callback)

    @hookimpl
    def on_exception(self) -> None:
        try:
            self.close(exit_code=1)
        except Exception as error:  # noqa: BLE001 - must not hide the exception that brought us here
            warnings.warn(f"wandb run {self._id} may lack the last metrics ({error})", stacklevel=2)

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        self.close()
        if run.is_worker and self._id is not None:
            # Files are written by a process of wandb's own, after `finish` returned. It is waited for at exit, but not
            # in processes of the multiprocessing module, which is how this one may have been started.
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
        """Whether this process has a run; one from before a fork belongs to the parent."""
        return self._run is not None and self._pid == os.getpid()

    def _meet(self, run: RunContext) -> None:
        self._root, self._rank = run.settings.default_root_dir, run.rank

    def _begin(self, trainer: TrainerView) -> None:
        """Find out on rank 0, before training, whether it can be logged."""
        _wandb()
        _refuse_unwritable(self._folder, self._option)
        if self.log_model and trainer.checkpoint_callback is None:
            raise ConfigError(
                "wandb.log_model is True and no callback keeps checkpoints", expected="one to take the best from",
                do="add the callback model_checkpoint, or set log_model to False",
            )  # fmt: skip
        if self._hparams:
            self._open()

    def _open(self) -> wandb.Run:
        if not self._is_open:
            if self._run is not None:  # before a fork: wandb lets no two processes write to one run
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
        """Return the run that the program itself has open, if it is what the options ask for."""
        active = _wandb().run
        chosen = self._id is not None or any(getattr(self, option) is not None for option in _CHOOSING)
        # What a parent had open before a fork drops everything that the child logs.
        if active is None or chosen or getattr(active, "_init_pid", os.getpid()) != os.getpid():
            return None
        self._owned = False
        return active

    def _start(self) -> Any:
        package, identity = _wandb(), self._id or self.id
        self._make_folder()
        try:
            run = package.init(
                project=self.project, name=self.name, id=identity, dir=str(self._folder), tags=self.tags,
                group=self.group, mode="offline" if self.offline else None,
                resume="allow" if identity is not None else None,
                reinit="create_new" if package.run is not None else None,
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                f"wandb could not start a run ({_first_line(error)})",
                expected="an id that no open run has" if self.offline else "a login and a server to reach",
                do="change wandb.id" if self.offline else "run `wandb login`, or set wandb.offline to True",
            ) from error
        self._owned = True
        atexit.register(_leave_to_wandb, weakref.ref(self))
        return run

    def _log_checkpoint(self, callback: Any) -> None:
        path = callback.best_model_path or callback.last_model_path
        if not path:
            warnings.warn("wandb.log_model is True and no checkpoint was kept: none is uploaded", stacklevel=2)
            return
        run, checkpoint = self._open(), as_path(path)
        score = callback.best_model_score
        metadata = {"path": str(path)} | ({} if score is None else {callback.monitor: float(score)})
        artifact = _wandb().Artifact(f"model-{run.id}", type="model", metadata=metadata)
        if is_remote(checkpoint):
            artifact.add_reference(str(path))
        elif checkpoint.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        run.log_artifact(artifact, aliases=["latest", "best"])

    # --- The folder ----------------------------------------------------------------------------------------------

    @property
    def _option(self) -> str:
        return "default_root_dir" if self.save_dir is None else "wandb.save_dir"

    @property
    def _folder(self) -> Path:
        assert self._root is not None
        return as_path(self._root if self.save_dir is None else self.save_dir)

    def _make_folder(self) -> None:
        """Make the folder ourselves: wandb would go to a temporary one where it cannot write."""
        _refuse_unwritable(self._folder, self._option)
        try:
            (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._folder, self._option, error.strerror or str(error)) from error

    # --- Travel to another process -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        names = [each.name for each in attrs.fields(type(self))]
        identity = self._id if self._run is None else None  # an open run stays with its process
        return {name: getattr(self, name) for name in names} | {"_run": None, "_id": identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def _leave_to_wandb(reference: weakref.ref[WandbLogger]) -> None:
    """At exit wandb finishes what is open, with the program's exit code, and before the run is torn down."""
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


def _refuse_unwritable(folder: Path, option: str) -> None:
    """Raise if `folder` can be told to be beyond reach, without creating it."""
    if is_remote(folder):
        raise _unwritable(folder, option, "wandb keeps its files on this machine")
    try:
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    except OSError as error:
        raise _unwritable(folder, option, error.strerror or str(error)) from error
    if not existing.is_dir():
        raise _unwritable(folder, option, f"{existing} is a file")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise _unwritable(folder, option, f"no permission to write to {existing}")


def _unwritable(folder: Path, option: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{option} is {str(folder)!r}, which cannot be written ({reason})",
        expected="a folder of this machine to log to", do=f"change {option}",
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """Return `value` with what wandb cannot write in it replaced by its text."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
