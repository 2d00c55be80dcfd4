"""`Trainer`: fit, validate, test, predict. Written on `Run`; calls hooks and nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.capabilities import ACCUMULATION
from stratagem.api.kinds import CheckpointFormat
from stratagem.api.lr_schedulers import LRSchedulerConfig
from stratagem.api.paths import as_path
from stratagem.api.validators import read_accumulation, read_duration
from stratagem.api.world import World
from stratagem.config.environment import from_environment
from stratagem.config.settings import TrainerSettings, gather, moved
from stratagem.config.sources import Source, from_arguments, from_file, program
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import ConfigError, StratagemError, nearest
from stratagem.runtime.context import Context
from stratagem.runtime.launching import launch
from stratagem.stack.resolver import with_callbacks
from stratagem.training import lightning_names, trainer_state
from stratagem.training.datamodule import DataModule
from stratagem.training.events import Events
from stratagem.training.fit_state import FitState
from stratagem.training.metric_log import log_metric
from stratagem.training.module import Module, original, overrides
from stratagem.training.optimizer_handle import OptimizerHandle
from stratagem.training.overrides import takes
from stratagem.training.progress import Position
from stratagem.training.stage_runner import StageRequest, StageRunner
from stratagem.training.trial import TrialStep, trial_steps

#: How long a rank that calls `save_checkpoint` waits for the others before it says that it is alone.
MEETING_S = 60.0

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from stratagem.api.context import TrainerView


def _remembering_what_was_given(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``__init__`` tell an argument that was given from one that has its default value."""

    @functools.wraps(init)
    def wrapper(self: Any, *, layers: Sequence[Source] = (), **arguments: Any) -> None:
        known = inspect.signature(init).parameters
        for name in arguments:
            if name not in known:
                raise ConfigError(f"Trainer has no argument {name!r}", expected="one of its arguments",
                                  do=moved(name) or nearest(name, known) or "see help(stratagem.Trainer)")  # fmt: skip
        self.given, self.layers = arguments, layers
        init(self, **arguments)

    return wrapper


def _of_state(name: str) -> Any:
    """Return a property of the trainer that is the attribute `name` of its `FitState`."""

    def get(trainer: Trainer) -> Any:
        return getattr(trainer.state, name)

    def put(trainer: Trainer, value: Any) -> None:
        setattr(trainer.state, name, value)

    return property(get, put)


class Trainer:
    """Trains a `Module` with plugins chosen by name; every argument is documented in `stratagem.config.settings`.

    Raises:
        ConfigError, PluginError: arguments that cannot work, alone or together; before any process starts.
    """

    @_remembering_what_was_given
    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        strategy: Any = "auto",
        precision: Any = None,
        comm_hook: Any = None,
        environment: Any = "auto",
        launcher: Any = None,
        checkpoint: Any = None,
        activation_checkpointing: Any = None,
        plugins: Any = (),
        callbacks: Any = (),
        logger: Any = True,
        lock: str | Path | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: timedelta | str | float | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        val_check_interval: float = 1.0,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        default_root_dir: str | Path | None = None,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool | None = None,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        deterministic: bool | str = False,
        float32_matmul_precision: str | None = None,
        detect_anomaly: bool = False,
        fast_dev_run: bool | int = False,
        overfit_batches: float = 0,
        profiler: Any = None,
        inference_mode: bool = True,
        barebones: bool = False,
    ) -> None:
        self.given: dict[str, Any]
        self.layers: Sequence[Source]
        self.settings: TrainerSettings = gather(TrainerSettings, self.given, _with_environment(self.layers))
        self.run = Context(self.settings)
        if self.settings.fast_dev_run:
            self.settings.max_epochs, self.settings.max_steps = 1, -1
        max_time = read_duration(self.settings.max_time, "max_time")
        if self.settings.max_epochs is None:
            unlimited = self.settings.max_steps != -1 or max_time is not None
            self.settings.max_epochs = -1 if unlimited else 1000
        self.run.progress = Position()
        accumulation = read_accumulation(self.settings.accumulate_grad_batches)
        #: How far training has come, what it works on, and what was logged.
        self.state = FitState(self.run, self.settings, self, max_time, accumulation)
        #: "fit", "validate", "test" or "predict" while that call is under way.
        self._call_at_work: str | None = None
        #: The module whose `configure_callbacks` was asked, and the callbacks without those that it brought.
        self._callbacks_of: Any = None
        self._own_callbacks: list[Any] | None = None
        self._enter()

    @classmethod
    def from_config(cls, path: str | Path, **arguments: Any) -> Trainer:
        """Make a trainer from a YAML or TOML file; environment variables and `arguments` override it.

        Raises:
            ConfigError: no such file, a broken one, an unknown key or a value that does not fit.
        """
        return cls(layers=[from_file(path)], **arguments)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Trainer:
        """Make a trainer from the command line: ``--strategy ddp --strategy.static_graph true --devices 2``.

        Args:
            argv: the words after the program's name; those of this process if not given.
            defaults: arguments for what neither a file, nor the environment, nor the command line says.

        ``--config run.yaml`` reads a file first, ``--help`` shows all arguments and the chosen plugins' options. A
        mistake ends the program with one sentence and exit code 1.
        """
        open_standard_streams()
        arguments = sys.argv[1:] if argv is None else argv
        try:
            line, config, wants_help = from_arguments(arguments)
            files = [Source("the script's defaults", dict(defaults))] if defaults else []
            files += [from_file(config)] if config is not None else []
            if not wants_help:
                return cls(layers=[*files, line])
            from stratagem.stack.describe import cli_help

            print(cli_help(gather(TrainerSettings, {}, _with_environment([*files, line]))))
        except StratagemError as error:
            print(f"{program()}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        raise SystemExit(0)

    def explain(self) -> str:
        """Return the resolved stack as a tree: plugins, packages, options and where they came from, hooks."""
        return self.run.explain()

    def _enter(self) -> None:
        """Begin a call in this process."""
        self.state.begin(Events(self.state))
        self._handles: list[OptimizerHandle] = []

    # --- What a user calls ---------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train `model`.

        Args:
            train_dataloaders: a DataLoader (or any iterable of batches).
            val_dataloaders: one or several; validated during training.
            datamodule: a `DataModule` instead of loaders. Without either, the module's own ``train_dataloader()``.
            ckpt_path: resume from this file, from ``"last"`` or from ``"best"``.

        A second call continues where the first one stopped; raise `max_epochs` for it to have something to do.

        Raises:
            ConfigError: the module or a loader lacks what training needs.
            CheckpointError: there is no such checkpoint, it is damaged, or it belongs to another model.
        """
        model = original(model)
        _require(model, "training_step", "fit")
        _check_signature(model)
        if not self.run.stack.strategy.makes_optimizer():
            _require(model, "configure_optimizers", "fit")
        self._call("fit", model, train_dataloaders, datamodule, ckpt_path, val_dataloaders)

    def validate(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Validate `model` (or the one trained last); return a dict of metrics for each loader."""
        return self._evaluate("validate", "validation_step", model, dataloaders, datamodule, ckpt_path)

    def test(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Test `model` (or the one trained last); return a dict of metrics for each loader."""
        return self._evaluate("test", "test_step", model, dataloaders, datamodule, ckpt_path)

    def predict(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return what `predict_step` returned for each batch of this process's share; for several loaders, lists."""
        results = self._evaluate("predict", "predict_step", model, dataloaders, datamodule, ckpt_path)
        return results[0] if len(results) == 1 else results

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write to `path` what resuming needs, or with `weights_only` what predicting needs. All ranks call it.

        `path` may be a URL such as ``s3://bucket/run/last.ckpt``.
        """
        if self.state.module is None:
            raise ConfigError("save_checkpoint was called before any module was given", do="call it in or after fit")
        self.run.collectives.barrier_with_timeout("save_checkpoint", MEETING_S)
        state = trainer_state.dump(self.state, weights_only)
        self.state.events.emit("on_save_checkpoint", checkpoint=state)
        self.run.ask("save_checkpoint", state=state, path=as_path(path))

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Build a module under the strategy's and the precision's contexts: ``with trainer.init_module(): ...``.

        With `empty_init` its parameters get no memory yet. What the model does to them meanwhile (a constructor, an
        initialization of its own, loaded weights) is done when they get some, with the same random numbers at every
        number of processes.
        """
        return self.run.init_context(bool(empty_init))

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0 alone."""
        self.run.print(*values, **options)

    def close(self) -> None:
        """Leave the process group and release the device; done at exit if you do not."""
        self.run.close()

    # --- What a user reads ---------------------------------------------------------------------------------------

    module, datamodule = _of_state("module"), _of_state("datamodule")
    callback_metrics, logged_metrics = _of_state("callback_metrics"), _of_state("logged_metrics")
    bar_metrics, position = _of_state("bar_metrics"), _of_state("position")
    should_stop, sanity_checking, fitting = _of_state("should_stop"), _of_state("sanity_checking"), _of_state("fitting")
    batch_size, num_training_batches = _of_state("batch_size"), _of_state("num_training_batches")
    num_val_batches, num_test_batches = _of_state("num_val_batches"), _of_state("num_test_batches")
    num_predict_batches = _of_state("num_predict_batches")

    @property
    def world(self) -> World:
        return self.run.place

    @property
    def is_global_zero(self) -> bool:
        return self.world.rank == 0

    @property
    def global_rank(self) -> int:
        return self.world.rank

    @property
    def local_rank(self) -> int:
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        return self.world.node_rank

    @property
    def world_size(self) -> int:
        """Processes of the run: those that take part now, or that a launch would start."""
        return self.run.world_size if self.run.world else self.run.num_processes * self.settings.num_nodes

    @property
    def current_epoch(self) -> int:
        """The epoch being trained, from 0; after training, the number of epochs trained."""
        return self.state.position.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps so far."""
        return self.state.position.global_step

    @property
    def max_epochs(self) -> int:
        assert self.settings.max_epochs is not None
        return self.settings.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int) -> None:
        self.settings.max_epochs = value

    @property
    def max_steps(self) -> int:
        return self.settings.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self.settings.max_steps = value

    @property
    def default_root_dir(self) -> Path:
        return self.settings.default_root_dir

    @property
    def fast_dev_run(self) -> bool:
        return bool(self.settings.fast_dev_run)

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        return self.run.checkpoint_format

    @property
    def callbacks(self) -> list[Any]:
        return [choice.plugin for choice in self.run.stack.callbacks]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that keeps checkpoints, or None."""
        return next((callback for callback in self.callbacks if hasattr(callback, "best_model_path")), None)

    @property
    def loggers(self) -> list[Any]:
        return [choice.plugin for choice in self.run.stack.loggers]

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return next(iter(self.loggers), None)

    @property
    def strategy(self) -> Any:
        """The strategy that answers: the innermost one."""
        return self.run.stack.strategy

    @property
    def precision(self) -> Any:
        return self.run.stack.precision.plugin

    @property
    def progress_bar_metrics(self) -> dict[str, Any]:
        """What a progress bar shows now: the loss, and what was logged with ``prog_bar=True``."""
        outputs = self.state.last_outputs
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        shown = {"loss": loss.detach()} if isinstance(loss, torch.Tensor) and loss.numel() == 1 else {}
        for name, value in self.state.book.step_values().items():
            if self.state.book.shown(name, "prog_bar"):
                shown[name] = value
        return shown | self.state.bar_metrics

    @property
    def effective_batch_size(self) -> int | None:
        """Samples behind one optimizer step, over all processes; None if the loader does not tell its batch size."""
        shards = self.run.mesh.num_data_shards
        return self.state.batch_size and self.state.batch_size * shards * self.accumulate_grad_batches

    @property
    def at_step_boundary(self) -> bool:
        """Whether no gradients are waiting for more batches before the next optimizer step."""
        return self.state.at_step_boundary

    @property
    def accumulate_grad_batches(self) -> int:
        """Over how many batches gradients accumulate in the current epoch."""
        return self.state.accumulate_grad_batches

    def schedule_accumulation(self, schedule: dict[int, int]) -> None:
        """Accumulate gradients over so many batches from each of these epochs on; from the next epoch that begins.

        Raises:
            ConfigError: no number for epoch 0, or the strategy cannot accumulate.
        """
        self.state.accumulation = read_accumulation(schedule, "the schedule")
        strategy = self.run.stack.strategies[-1]
        if (
            any(factor > 1 for factor in schedule.values())
            and ACCUMULATION not in strategy.plugin.capabilities.provides
        ):
            raise ConfigError(
                f"gradients are to accumulate by {schedule}, which {strategy} cannot",
                do="choose a strategy that provides 'accumulation' (`stratagem plugins show NAME`)",
            )

    @property
    def train_loader(self) -> Any:
        """The training loader of this process's share, during a fit."""
        assert self.state.feed is not None, "known during a fit"
        return self.state.feed.loader

    def replace_train_loader(self, loader: Any) -> None:
        """Train with `loader`, which is this process's share, from now on. Only while a fit starts."""
        assert self.state.use_loader is not None, "known during a fit"
        self.state.use_loader(loader)

    def leave_after_batch(self, action: Callable[[], Any]) -> None:
        """End the current batch for all callbacks, then call `action` once; it raises to end training."""
        self.state.on_leaving = action

    def trial_steps(self, who: str) -> AbstractContextManager[TrialStep]:
        """Make steps for a trial: ``with trainer.trial_steps("my callback") as step: loss = step(batch, number)``.

        Afterwards weights, optimizer, precision, random numbers and metrics are as before.

        Raises:
            ConfigError: the module steps by hand, has several optimizers, or one that belongs to an engine.
        """
        return trial_steps(self.state, who)

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        return self.run.lr_scheduler_configs

    @property
    def optimizers(self) -> list[Optimizer]:
        return self.run.optimizers

    @property
    def optimizer_handles(self) -> list[OptimizerHandle]:
        """The optimizers as `Module.optimizers` gives them: their steps go through the hooks."""
        if len(self._handles) != len(self.run.optimizers):
            self._handles = [OptimizerHandle(optimizer, self.step_by_hand) for optimizer in self.run.optimizers]
        return self._handles

    # --- Launching -----------------------------------------------------------------------------------------------

    def _evaluate(
        self, stage: str, step: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None
    ) -> list[Any]:
        model = self.state.module if model is None else original(model)
        if model is None:
            raise ConfigError(f"{stage} got no model and none was trained before", expected="a model")
        if stage != "predict":
            _require(model, step, stage)
        results: list[Any] = self._call(stage, model, loaders, datamodule, ckpt_path)
        return results

    def _call(
        self, stage: str, model: Module, loaders: Any, datamodule: Any, ckpt_path: Any, val_loaders: Any = None
    ) -> Any:
        if self._call_at_work is not None:
            raise ConfigError(
                f"trainer.{stage}() was called within trainer.{self._call_at_work}()", expected="one call at a time",
                do="call it afterwards, or use another Trainer",
            )  # fmt: skip
        model = original(model)
        if not isinstance(model, Module):
            raise ConfigError(f"{stage} got a {type(model).__name__}", expected="a stratagem.Module",
                              do="derive from it, or use stratagem.Run with a loop of your own")  # fmt: skip
        if isinstance(loaders, DataModule):
            loaders, datamodule = None, loaders
        if datamodule is not None and loaders is not None:
            raise ConfigError(f"{stage} got loaders and a datamodule", expected="one of the two")
        job = StageRequest(stage, loaders, val_loaders, datamodule, ckpt_path)
        state = self.state
        if model is not state.module:
            state.carried = None
        if stage == "fit":
            if model is not state.module:
                state.position, state.feed = Position(), None
            elif ckpt_path is None:
                with self.run.making_whole():
                    held = trainer_state.dump_optimizers(state) if self.run.optimizers else None
                    job.carried = state.carried or held
        outer = model.__dict__.get("_trainer")
        state.module, state.datamodule, self._call_at_work = model, datamodule, stage
        model.__dict__["_trainer"] = self
        try:
            lightning_names.check(model, datamodule, self.run.stack, stage)
            self._use_callbacks_of(model)
            home = launch(self.run, functools.partial(self._main, job))
        finally:
            self._call_at_work = None
            if outer is not None and outer._call_at_work is not None:
                model.__dict__["_trainer"] = outer  # whose call this one was made in
        return home.unpack(state) if isinstance(home, trainer_state.WorkerResult) else home

    def _main(self, job: StageRequest, run: Context) -> Any:
        """Do `job` in this process, one of those that the launcher started."""
        self.state.module.__dict__["_trainer"], self._call_at_work = self, job.stage
        if isinstance(job.datamodule, DataModule):
            job.datamodule.trainer = self
        self._enter()
        try:
            result = StageRunner(self.state, job).work()
        except BaseException as error:
            self.state.events.emit("on_exception", exception=error)
            if callable(tell := getattr(job.datamodule, "on_exception", None)):
                tell(error)
            raise
        return trainer_state.WorkerResult.pack(self.state, result, job.stage == "fit") if run.is_worker else result

    def _use_callbacks_of(self, model: Module) -> None:
        """Let the callbacks that `model` brings take part, until another model is given."""
        if self._callbacks_of is model:
            return
        if self._own_callbacks is not None:
            self.run.use_callbacks(self._own_callbacks)
        self._callbacks_of, self._own_callbacks = model, None
        brought = model.configure_callbacks() if overrides(model, "configure_callbacks") else None
        if brought:
            self._own_callbacks = self.run.stack.callbacks
            self.run.use_callbacks(with_callbacks(self.run.stack, self.settings, brought))

    def step_by_hand(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
        """Step `optimizer` for a module that optimizes by hand."""
        run = self.run
        self.state.events.emit("on_before_optimizer_step", optimizer=optimizer)
        stepped = run.step.optimizer_step(optimizer, _agreeing(closure, run) if closure is not None else None)
        self.state.position.global_step += 1
        self.state.position.skipped_steps += not stepped
        return stepped

    def log_metric(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Record what `Module.log` got."""
        log_metric(self.state, name, value, options)

    # --- Travel to another process -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {
            "given": self.given, "layers": self.layers, "settings": self.settings, "run": self.run,
            "state": self.state, "_callbacks_of": self._callbacks_of, "_own_callbacks": self._own_callbacks,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The run may still be half unpickled; `_main` enters when all is there.
        self.__dict__.update(state, _call_at_work=None, _handles=[])


def _with_environment(layers: Sequence[Source]) -> list[Source]:
    """Put the environment where it belongs: over files, under a command line."""
    files = [layer for layer in layers if not layer.text]
    return [*files, from_environment(), *(layer for layer in layers if layer.text)]


def _agreeing(closure: Callable[[], Any], run: Context) -> Callable[[], Any]:
    """Return `closure` with its loss averaged over ranks: the optimizer decides on it, and all must decide alike."""

    def averaged() -> Any:
        loss = closure()
        return run.collectives.all_reduce(loss.detach(), "mean") if isinstance(loss, torch.Tensor) else loss

    return averaged


def _check_signature(model: Any) -> None:
    """Refuse a training_step that wants more than a batch and its number."""
    step = getattr(model, "training_step", None)
    if step is None or takes(step, 1) or takes(step, 2):
        return
    signature = inspect.signature(step)
    if lightning_names.ARGUMENTS.keys() & signature.parameters.keys():
        return  # which are refused by name
    raise ConfigError(
        f"{type(model).__name__}.training_step takes {signature}", expected="(batch, batch_idx) or (batch)",
        do="give the others default values",
    )  # fmt: skip


def _require(model: Any, method: str, stage: str) -> None:
    if isinstance(model, Module) and not overrides(model, method):
        raise ConfigError(f"{type(model).__name__} has no {method}", expected=f"one, to {stage}", do="define it")


if TYPE_CHECKING:

    def _satisfies(trainer: Trainer) -> TrainerView:
        """Checked by mypy: a `Trainer` has all that event hooks use."""
        return trainer
