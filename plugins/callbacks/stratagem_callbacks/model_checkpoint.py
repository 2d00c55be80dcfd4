"""Keep the best or the last checkpoints of a run."""

from __future__ import annotations

import functools
import math
import os
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import as_path, is_remote
from stratagem.api.readback import as_numbers
from stratagem.api.validators import at_least, not_empty
from stratagem.errors import ConfigError
from stratagem_callbacks.decisions import acts_after_epoch
from stratagem_callbacks.kept_files import free_version, link_to, remove, within
from stratagem_callbacks.occupied import occupy, vacate
from stratagem_callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from stratagem_trainer.api import Callback
from stratagem_trainer.api.monitored import monitored
from stratagem_trainer.api.published import shown
from stratagem_trainer.api.validators import at_least_or_unlimited, duration_or_text, read_duration

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem_trainer.api import TrainerView

_FILENAME = "{epoch}-{step}"


def _name_or_default(value: Any) -> Any:
    return _FILENAME if value is None else value


def _or_false(value: Any) -> Any:
    return False if value is None else value


@define(eq=False, kw_only=True)
class ModelCheckpoint(Callback):
    """Save after each epoch (or validation, or every n steps), and keep the `save_top_k` best by `monitor`.

    The metric must be equal on all ranks: log it with ``sync_dist=True``. Without `monitor` the newest checkpoint is
    kept. Only files of this run, and files of the run that it resumes in the same folder, are deleted or overwritten.
    """

    positional: ClassVar[tuple[str, ...]] = ("dirpath", "filename", "monitor", "verbose", "save_last", "save_top_k")
    roles: ClassVar[frozenset[str]] = frozenset({"best-checkpoint", "checkpoint-folder"})

    #: Folder of the checkpoints, or a URL such as ``s3://bucket/run``; ``<default_root_dir>/checkpoints`` if not given.
    _dirpath: Path | None = field(default=None, alias="dirpath")
    #: File name, with metrics in braces and their formats: ``"{epoch:02d}-{val_loss:.2f}"``.
    filename: str | None = field(default=_FILENAME, converter=_name_or_default, validator=not_empty)
    #: Metric to compare by, or "epoch" or "step".
    monitor: str | None = field(default=None, validator=not_empty)
    #: "min" if smaller values of `monitor` are better, "max" if larger ones are.
    mode: Literal["min", "max"] = "min"
    #: Number of checkpoints to keep: -1 all, 0 none; without `monitor`, 1 keeps the newest.
    save_top_k: int = field(default=1, validator=at_least_or_unlimited(0))
    #: Also save the newest as ``last``, to resume from when the best is old. "link" makes ``last`` a symbolic link to
    #: the newest of the checkpoints that are kept, which takes no space.
    save_last: bool | Literal["link"] | None = field(default=False, converter=_or_false)
    #: Print each checkpoint that is saved, on rank 0.
    verbose: bool = False
    #: Save every n epochs.
    every_n_epochs: int | None = field(default=None, validator=at_least(1))
    #: Save every n optimizer steps instead of epochs.
    every_n_train_steps: int | None = field(default=None, validator=at_least(1))
    #: Save each time that this much time has passed, instead of epochs: seconds, a timedelta, or "DD:HH:MM:SS".
    train_time_interval: timedelta | str | None = field(default=None, validator=duration_or_text)
    #: Save when an exception ends training, too, as the callback `on_exception_checkpoint` does.
    save_on_exception: bool = False
    #: Leave out optimizers and all other state that only resuming needs.
    save_weights_only: bool = False
    #: Leave out frozen parameters, such as those of a base model with adapters; loading needs a model that has them.
    save_trainable_only: bool = False
    #: Save at the end of the training epoch rather than after validation. By default at the end of the epoch, unless
    #: `val_check_interval` or `check_val_every_n_epoch` validate at other times than once an epoch.
    save_on_train_epoch_end: bool | None = None
    #: Write ``val_loss=0.31`` rather than ``0.31`` into names.
    auto_insert_metric_name: bool = True
    #: Add ``-v1``, ``-v2`` to the name of an existing file rather than overwrite it.
    enable_version_counter: bool = True

    #: Path of the best checkpoint so far; the newest without a monitor.
    best_model_path: str = field(init=False, default="")
    _best_model_score: float | None = field(init=False, default=None)
    #: Path of the ``last`` checkpoint.
    last_model_path: str = field(init=False, default="")
    _best_k_models: dict[str, float] = field(init=False, factory=dict)
    _current_score: float | None = field(init=False, default=None)
    #: When a checkpoint is due next, on the clock of this process.
    _next_save: float = field(init=False, default=math.inf)
    _last_step: int = field(init=False, default=-1)
    _validated_step: int = field(init=False, default=-1)
    best_model_score = shown("_best_model_score", "Its value of `monitor`: a float32 tensor.")
    best_k_models = shown("_best_k_models", "Value of `monitor` by path, of the kept checkpoints.")
    current_score = shown("_current_score", "Value of `monitor` when a checkpoint was last due.")
    #: The folder of `_best_k_models`; "" before the first fit.
    _folder: str = field(init=False, default="")
    _occupied: Path | None = field(init=False, default=None)
    _guard: OnExceptionCheckpoint = field(init=False)

    def _used_folder(self) -> Path | None:
        """Folder of the checkpoints: the option, else that of the last fit; None before one."""
        return self._dirpath or (as_path(self._folder) if self._folder else None)

    dirpath = property(_used_folder, lambda self, path: setattr(self, "_dirpath", path))

    def __attrs_post_init__(self) -> None:
        intervals = ("every_n_epochs", "every_n_train_steps", "train_time_interval")
        given = [f"{name}={getattr(self, name)}" for name in intervals if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"model_checkpoint has {' and '.join(given)}", expected="one of them")
        if self.save_last == "link" and self.save_top_k == 0:
            raise ConfigError(
                'model_checkpoint.save_last is "link" with save_top_k=0', expected="a checkpoint to link to",
                do="set save_last=True, or keep one",
            )  # fmt: skip
        self._guard = OnExceptionCheckpoint(dirpath=self._dirpath)
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise ConfigError(
                f"model_checkpoint.save_top_k is {self.save_top_k} without a monitor",
                expected="-1, 0 or 1, or a monitor",
                do='add monitor="val_loss"',
            )

    def folder(self, trainer: TrainerView) -> Path:
        """Return the folder of the checkpoints."""
        return as_path(self._dirpath) if self._dirpath is not None else Path(trainer.default_root_dir) / "checkpoints"

    @hookimpl
    def on_fit_start(self, trainer: TrainerView) -> None:
        self._forget_other_folder(self.folder(trainer))
        if trainer.fast_dev_run or (self.save_top_k == 0 and not self.save_last):
            return
        error = None
        if trainer.is_global_zero:
            try:
                self._check_links(trainer)
                occupy(self.folder(trainer))
                self._occupied = self.folder(trainer)
            except ConfigError as caught:
                error = caught
        trainer.run.collectives.fail_together(error)

    def _forget_other_folder(self, folder: Path) -> None:
        """Forget checkpoints in another folder: this run must not delete them, nor compare with them."""
        here = str(folder) if is_remote(folder) else os.path.realpath(folder)
        if self._folder != here:
            self._best_k_models, self.last_model_path = {}, ""
        else:
            # Paths relative to the folder as this run names it.
            kept = {within(folder, path): score for path, score in self._best_k_models.items()}
            self._best_k_models = {path: score for path, score in kept.items() if path}
            self.last_model_path = within(folder, self.last_model_path)
        self._folder = here

    def _check_links(self, trainer: TrainerView) -> None:
        if self.save_last == "link" and is_remote(self.folder(trainer)):
            raise ConfigError(
                f'model_checkpoint.save_last is "link", and the folder is {str(self.folder(trainer))!r}',
                expected="a folder of a file system, which can hold links", do="set save_last=True",
            )  # fmt: skip

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst checkpoint that is kept; "" before there is one."""
        return self._worst() if self._best_k_models else ""

    @property
    def kth_value(self) -> Tensor | None:
        """Its value of `monitor`."""
        return self.best_k_models[self._worst()] if self._best_k_models and self.monitor is not None else None

    @hookimpl
    def on_fit_end(self) -> None:
        self._vacate()

    @hookimpl
    def on_train_start(self) -> None:
        self._start_interval()
        self._guard.on_train_start()

    @hookimpl
    def setup(self, trainer: TrainerView, stage: str) -> None:
        self._guard.setup(trainer, stage)

    @hookimpl
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._guard.on_save_checkpoint(checkpoint)

    @hookimpl
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._guard.on_load_checkpoint(checkpoint)

    @property
    def saved_on_exception(self) -> bool:
        """Whether the last fit ended with an exception and was saved."""
        return self._guard.saved_on_exception

    @hookimpl
    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        if self.save_on_exception and not trainer.fast_dev_run:
            self._guard.on_exception(trainer, exception)
        self._vacate()

    def written_files(self) -> dict[str, str]:
        """Return the best checkpoint with its metric, and the last one."""
        files = {}
        if self.best_model_path:
            score = self._best_model_score
            title = "checkpoint" if score is None else f"best checkpoint ({self.monitor} {score:.4g})"
            files[title] = self.best_model_path
        if self.last_model_path and self.last_model_path != self.best_model_path:
            files["last checkpoint"] = self.last_model_path
        return files

    def _vacate(self) -> None:
        if self._occupied is not None:
            vacate(self._occupied)
            self._occupied = None

    # --- When ----------------------------------------------------------------------------------------------------

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        step = trainer.global_step
        if self.train_time_interval is not None and trainer.run.collectives.unchecked.any(
            time.monotonic() >= self._next_save
        ):
            if step != self._last_step:
                self._save(trainer)
            self._start_interval()
        if self.every_n_train_steps is None:
            return
        if step != self._last_step and step % self.every_n_train_steps == 0 and step:
            self._save(trainer)

    def _start_interval(self) -> None:
        interval = read_duration(self.train_time_interval, "model_checkpoint.train_time_interval")
        self._next_save = math.inf if interval is None else time.monotonic() + interval.total_seconds()

    @hookimpl(trylast=True)
    def on_validation_end(self, trainer: TrainerView) -> None:
        self._validated_step = trainer.global_step
        if trainer.fitting and not acts_after_epoch(trainer, self.save_on_train_epoch_end):
            self._save_if_due(trainer)

    @hookimpl(trylast=True)
    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        # In an epoch that was cut short `monitor` may be logged later, or have been measured before.
        measured = not any(trainer.num_val_batches) or self._validated_step == trainer.global_step
        known = self.monitor in (None, "epoch", "step", *(trainer.callback_metrics if measured else ()))
        if acts_after_epoch(trainer, self.save_on_train_epoch_end) and (known or trainer.position.epoch_ended):
            self._save_if_due(trainer)

    @hookimpl(trylast=True)
    def on_train_end(self, trainer: TrainerView) -> None:
        """Save the final state if training ended within an epoch, and ``last`` if it is older."""
        newest = self.monitor is None and self._saves_by_epoch and (self.save_top_k != 0 or self.save_last)
        within = trainer.position.batches_done and not trainer.position.epoch_ended
        if trainer.global_step not in (0, self._last_step):
            if newest and within:
                self._save(trainer)
            elif self.save_last and self.save_last != "link" and not trainer.fast_dev_run:
                path = self._path_of_last(trainer) if trainer.is_global_zero else None
                self.last_model_path = trainer.run.collectives.broadcast_object(path)
                self._write(trainer, self.last_model_path)
        self._guard.on_train_end()

    def _save_if_due(self, trainer: TrainerView) -> None:
        due = (trainer.current_epoch + 1) % (self.every_n_epochs or 1) == 0
        if self._saves_by_epoch and due and trainer.global_step != self._last_step:
            self._save(trainer)

    @property
    def _saves_by_epoch(self) -> bool:
        return self.every_n_train_steps is None and self.train_time_interval is None

    # --- What ----------------------------------------------------------------------------------------------------

    def _save(self, trainer: TrainerView) -> None:
        if trainer.fast_dev_run:
            return
        self._last_step = trainer.global_step
        self._current_score = score = self._score(trainer)
        plan = trainer.run.collectives.broadcast_object(self._plan(trainer, score) if trainer.is_global_zero else None)
        if isinstance(plan, ConfigError):
            raise plan
        path, score, obsolete, last = plan
        self.last_model_path = last or self.last_model_path
        if path:
            self._record(path, score, obsolete)
            self._write(trainer, path)
        if last and self.save_last != "link":
            self._write(trainer, last)
        if trainer.is_global_zero:
            if last and self.save_last == "link":
                link = functools.partial(link_to, trainer.run.format_of, as_path(last), as_path(path))
                trainer.run.saver.afterwards(link)
            if self.verbose and (path or last):
                trainer.print(self._said_of(trainer, score, path or last))
            for old in obsolete:  # deleted only after the new one is written
                trainer.run.saver.afterwards(functools.partial(remove, trainer.run.format_of, as_path(old)))

    def _score(self, trainer: TrainerView) -> float | None:
        counts = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if self.monitor in counts and self.monitor not in trainer.callback_metrics:
            return float(counts[self.monitor])
        if self.monitor is None:
            return None
        after_epoch = acts_after_epoch(trainer, self.save_on_train_epoch_end)
        do = "" if after_epoch else ", or set save_on_train_epoch_end=True if the end of the epoch logs it"
        return monitored(trainer, "model_checkpoint", self.monitor, do=do)

    def _said_of(self, trainer: TrainerView, score: float | None, path: str) -> str:
        value = "" if score is None else f", {self.monitor} {score:.5g}"
        return f"epoch {trainer.current_epoch}, step {trainer.global_step}{value}: saving {path}"

    def _write(self, trainer: TrainerView, path: str) -> None:
        trainer.save_checkpoint(
            path, weights_only=self.save_weights_only, **({"trainable_only": True} if self.save_trainable_only else {})
        )

    def _plan(
        self, trainer: TrainerView, score: float | None
    ) -> tuple[str, float | None, list[str], str] | ConfigError:
        """Return path, score, paths to delete afterwards and path of ``last``, on rank 0; a path of "" is not saved."""
        last = self._path_of_last(trainer) if self.save_last else ""
        if self.save_top_k == 0 or not self._is_better(score):
            return "", score, [], "" if self.save_last == "link" else last
        obsolete = []
        if self.monitor is None:
            obsolete = list(self._best_k_models) if self.save_top_k == 1 else []
        elif 0 < self.save_top_k <= len(self._best_k_models):
            obsolete = [self._worst()]
        try:
            path = self._path(trainer, obsolete)
        except ConfigError as error:
            return error
        return path, score, [old for old in obsolete if old != path], last

    def _is_better(self, score: float | None) -> bool:
        if self.monitor is None or self.save_top_k == -1 or len(self._best_k_models) < self.save_top_k:
            return True
        return self._sort_key(score) < self._sort_key(self._best_k_models[self._worst()])

    def _record(self, path: str, score: float | None, obsolete: list[str]) -> None:
        for old in obsolete:
            self._best_k_models.pop(old, None)
        self._best_k_models[path] = math.nan if score is None else score
        if self.monitor is None:
            self.best_model_path, self._best_model_score = path, None
        else:
            self.best_model_path = min(self._best_k_models, key=lambda kept: self._sort_key(self._best_k_models[kept]))
            self._best_model_score = self._best_k_models[self.best_model_path]

    def _worst(self) -> str:
        return max(self._best_k_models, key=lambda path: self._sort_key(self._best_k_models[path]))

    def _sort_key(self, score: float | None) -> float:
        if score is None or math.isnan(score):
            return math.inf
        return score if self.mode == "min" else -score

    # --- Names ---------------------------------------------------------------------------------------------------

    def _path(self, trainer: TrainerView, obsolete: list[str]) -> str:
        """Return a path to save to that overwrites no checkpoint that is kept."""
        values = as_numbers(trainer.published.exact)
        values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        name = self._format(values)
        suffix = trainer.run.checkpoint_format.suffix
        path = self.folder(trainer) / f"{name}{suffix}"
        mine = obsolete if self.monitor is not None else self._best_k_models
        return str(free_version(path, suffix, mine) if self.enable_version_counter else path)

    def _path_of_last(self, trainer: TrainerView) -> str:
        """Return the path of ``last``: that of this run, or a free one."""
        folder, form = self.folder(trainer), trainer.run.checkpoint_format
        path = folder / f"last{form.suffix}"
        mine = as_path(self.last_model_path) if self.last_model_path else None
        if mine is not None and mine.name.endswith(form.suffix) and (form.recognises(mine) or not mine.exists()):
            return str(mine)
        return str(free_version(path, form.suffix) if self.enable_version_counter else path)

    def _format(self, values: dict[str, Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            name, form = match[1], match[2] or ""
            if name not in values:
                warnings.warn(
                    f"model_checkpoint.filename names {name!r}, which was not logged: 0 is used", stacklevel=2
                )
            try:
                text = format(values.get(name, 0), form)
            except ValueError:
                text = format(int(values.get(name, 0)), form)
            return f"{name}={text}".replace("/", "_") if self.auto_insert_metric_name else text

        try:
            return re.sub(r"\{([^}:]+)(?::([^}]*))?\}", fill, self.filename or _FILENAME)
        except ValueError as error:
            raise ConfigError(
                f"model_checkpoint.filename is {self.filename!r} ({error})", expected="formats that fit numbers"
            ) from error

    # --- State ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the kept checkpoints, and the best one."""
        names = ("best_model_path", "_best_model_score", "last_model_path", "_last_step", "_folder")
        rule = {"monitor": self.monitor, "mode": self.mode, "save_top_k": self.save_top_k}
        kept = {"best_k_models": dict(self._best_k_models)}
        return {name.lstrip("_"): getattr(self, name) for name in names} | kept | rule

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the kept checkpoints that still exist, if this run has the same rules for keeping them."""
        same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        keeps_fewer = self.save_top_k != -1 and not 0 <= state["save_top_k"] <= self.save_top_k
        kept = {} if keeps_fewer or not same else state["best_k_models"]
        self._best_k_models = {path: score for path, score in kept.items() if as_path(path).exists()}
        self.best_model_path, self._best_model_score = state["best_model_path"], state["best_model_score"]
        self.last_model_path, self._last_step = state["last_model_path"], state["last_step"]
        self._folder = state["folder"]
