"""`Trainer`: fit, validate, test, predict. Written on `Run`; calls hooks and nothing else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.config.settings import Source, gather, remember_arguments
from stratagem.discovery import registry
from stratagem.distributed.standard_streams import open_standard_streams
from stratagem.errors import ConfigError, StratagemError
from stratagem.runtime.context import Context
from stratagem_trainer.api.callback_log import let_log
from stratagem_trainer.api.validators import read_accumulation, read_duration
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.events import Events
from stratagem_trainer.fit_state import FitState
from stratagem_trainer.hyperparameters import check_weights_only
from stratagem_trainer.interrupt import shorten_traceback, watch_uncaught
from stratagem_trainer.module import Module, original, overrides
from stratagem_trainer.module_checks import check, check_instance, check_signature, require
from stratagem_trainer.moved_methods import prepare_methods
from stratagem_trainer.progress import Position
from stratagem_trainer.settings import TrainerSettings, with_callbacks
from stratagem_trainer.sources import from_arguments, from_environment, from_file, program
from stratagem_trainer.view import View

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from contextlib import AbstractContextManager
    from typing import Literal

    from stratagem.api.kinds import Accelerator, CheckpointFormat, Environment, Launcher, Plugin, Precision, Strategy
    from stratagem.config.settings import NameOr
    from stratagem_trainer.api import Callback, Logger
    from stratagem_trainer.request import StageRequest


#: What each stage that measures calls on the module.
_STEPS = {"validate": "validation_step", "test": "test_step"}


class Trainer(View):
    """Trains a `Module` with plugins chosen by name; every argument is documented in `stratagem_trainer.settings`.

    Raises:
        ConfigError, PluginError: arguments that cannot work, alone or together; before any process starts.
    """

    @remember_arguments(TrainerSettings)
    def __init__(
        self,
        *,
        accelerator: NameOr[Accelerator] = "auto",
        devices: int | str | Sequence[int | str] = "auto",
        num_nodes: int = 1,
        strategy: NameOr[Strategy] | Sequence[NameOr[Strategy]] = "auto",
        precision: NameOr[Precision] | int | None = None,
        comm_hook: NameOr[Plugin] | Sequence[NameOr[Plugin]] | None = None,
        environment: NameOr[Environment] = "auto",
        launcher: NameOr[Launcher] | None = None,
        checkpoint: NameOr[CheckpointFormat] | None = None,
        activation_checkpointing: Collection[type | str] | Mapping[str, Any] | Callable[..., Any] | None = None,
        compile: bool | str | Mapping[str, Any] | None = None,  # noqa: A002 - torch's name for it
        plugins: Any = (),
        callbacks: NameOr[Callback] | Sequence[NameOr[Callback]] | None = (),
        logger: bool | NameOr[Logger] | Sequence[NameOr[Logger]] | None = True,
        lock: str | Path | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: timedelta | Mapping[str, float] | str | float | None = None,
        accumulate_grad_batches: int | dict[int, int] = 1,
        average_short_window: bool = True,
        loss_normalization: str | dict[str, Any] = "batches",
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = "norm",
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        val_check_interval: float | timedelta | Mapping[str, float] | str | None = 1.0,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 2,
        log_every_n_steps: int | None = 50,
        default_root_dir: str | Path | None = None,
        enable_progress_bar: bool | None = True,
        enable_checkpointing: bool | None = True,
        enable_model_summary: bool | None = None,
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = True,
        sync_batchnorm: bool = False,
        deterministic: bool | Literal["warn"] | None = False,
        float32_matmul_precision: Literal["highest", "high", "medium"] | None = None,
        checks: NameOr[Callback] | Sequence[NameOr[Callback]] | None = "finite",
        detect_anomaly: bool = False,
        fast_dev_run: bool | int = False,
        overfit_batches: float = 0,
        profiler: NameOr[Callback] | None = None,
        inference_mode: bool = True,
        barebones: bool = False,
    ) -> None:
        watch_uncaught()
        self._given: dict[str, Any]
        self._sources: Sequence[Source]
        self.settings: TrainerSettings = gather(TrainerSettings, self._given, _with_environment(self._sources))
        self._resolve()

    def _resolve(self) -> None:
        """Begin with the plugins that `settings` describe."""
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
        self._state = FitState(self.run, self.settings, self, max_time, accumulation)
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
        return cls.from_sources([from_file(path)], **arguments)

    @classmethod
    def from_sources(cls, sources: Sequence[Source], **arguments: Any) -> Trainer:
        """Make a trainer from `sources`, of which a later one overrides an earlier one, and `arguments` all of them.

        Environment variables override files.

        Raises:
            ConfigError: an unknown key, or a value that does not fit.
        """
        make: Callable[..., Trainer] = cls
        return make(sources=sources, **arguments)

    @classmethod
    def from_cli(cls, argv: Sequence[str] | None = None, **defaults: Any) -> Trainer:
        """Make a trainer from the command line: ``--strategy ddp --strategy.static_graph true --devices 2``.

        Args:
            argv: the words after the program's name; those of this process if not given.
            defaults: arguments that neither a file, nor the environment, nor the command line sets.

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
                return cls.from_sources([*files, line])
            from stratagem_trainer.command_line import cli_help

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
        if self._state.module is not None:
            let_log(self.callbacks, self._state.module)
        self._state.begin(Events(self._state))

    # --- What a user calls ---------------------------------------------------------------------------------------

    def fit(
        self, model: Module, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None, weights_only: bool | None = None,
    ) -> None:  # fmt: skip
        """Train `model`.

        Args:
            train_dataloaders: a DataLoader (or any iterable of batches). A dict or list of DataLoaders gives one batch
                of each for a step; see `CombinedLoader` for other rules.
            val_dataloaders: one or several; validated during training.
            datamodule: a `DataModule` instead of loaders. Without either, the module's own ``train_dataloader()``.
            ckpt_path: resume from this file, from ``"last"``, ``"best"`` or ``"hpc"`` (the newest that was saved on a
                signal). None begins at step 0. A job that its scheduler has started again continues from its own newest
                checkpoint.
            weights_only: None or True: code in a checkpoint is never run, here and in the methods below.

        A second call continues where the first one stopped; raise `max_epochs` for it to have something to do.

        Raises:
            ConfigError: the module or a loader lacks what training needs.
            CheckpointError: there is no such checkpoint, it is damaged, or it belongs to another model.
        """
        check_weights_only("fit", weights_only)
        model = original(model)
        check_instance(model, "fit")
        require(model, "training_step", "fit")
        check_signature(model)
        if not self.run.stack.strategy.makes_optimizer():
            require(model, "configure_optimizers", "fit")
        self._call("fit", model, train_dataloaders, datamodule, ckpt_path, val_dataloaders)

    def plan(
        self, model: Module, train_dataloaders: Any = None, datamodule: Any = None, **options: Any
    ) -> dict[str, Any]:
        """Return what `fit` needs on devices that are not here, as data: see docs/planner.md.

        Forked processes train for two optimizer steps, with tensors without values. This process, the model and the
        loaders stay as they are. The devices and nodes of the plan take the place of the Trainer's.

        Args:
            train_dataloaders, datamodule: as of `fit`.
            options: those of `stratagem plan`: ``devices=8`` of a node, ``nodes=2``, ``device="h100-sxm-80gb"``,
                ``device_file``, and ``assume={"train.py:30": 12}``.

        Returns:
            What ``stratagem plan --json`` writes, but for ``"script"``, the name of the model's class. Of each of
            ``plan["classes"]``, ranks that do the same: the bytes of one rank at the ``"peak"``, by category
            ``"at_peak"`` and at the ``"end"`` of a step, and ``"reserved"``; ``"flops"``, ``"work"`` and
            ``"collectives"`` of one step.

        Raises:
            ConfigError: the run refuses these devices, it cannot be planned, or this process has computed gradients.
            PluginError: stratagem-plan is not installed.
        """

        def train() -> None:
            self._resolve()
            self.fit(model, train_dataloaders, datamodule=datamodule)

        command = registry.find("command", "plan").load()
        planned: dict[str, Any] = command.of(self.settings, train, type(original(model)).__name__, options)
        return planned

    def validate(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None, verbose: bool = True, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Validate `model`, or the one trained last; return the metrics of each loader.

        With `verbose` and a progress bar they are printed, too.
        """
        check_weights_only("validate", weights_only)
        return self._measure("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None, verbose: bool = True, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Test `model`, or the one trained last; return the metrics of each loader.

        With `verbose` and a progress bar they are printed, too.
        """
        check_weights_only("test", weights_only)
        return self._measure("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self, model: Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: str | Path | None = None, return_predictions: bool | None = None, weights_only: bool | None = None,
    ) -> list[Any]:  # fmt: skip
        """Return what `predict_step` returned for each batch of this process's share; for several loaders, lists.

        Args:
            return_predictions: False keeps none of them and returns an empty list; a callback may write them.
        """
        check_weights_only("predict", weights_only)
        request, keep = (model, dataloaders, datamodule, ckpt_path), return_predictions is not False
        results = self._evaluate("predict", *request, keep_predictions=keep)
        if not keep:
            return []
        if self.settings.enable_progress_bar and not self.settings.barebones:
            whose = "" if self.world_size == 1 else f"; the others of {self.world_size} processes have their own"
            self.print(f"predict: returned the outputs of {sum(map(len, results))} batches{whose}")
        return results[0] if len(results) == 1 else results

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Build a module under the strategy's and the precision's contexts: ``with trainer.init_module(): ...``.

        With `empty_init` its parameters get no memory yet. What the model does to them meanwhile (a constructor, an
        initialization of its own, loaded weights) is done when they get some, with the same random numbers at every
        number of processes.
        """
        return self.run.init_context(bool(empty_init))

    def close(self) -> None:
        """Leave the process group and release the device; done at exit if you do not."""
        self.run.close()

    # --- Launching -----------------------------------------------------------------------------------------------

    def _measure(
        self, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None,
        verbose: bool,
    ) -> list[dict[str, float]]:  # fmt: skip
        results = self._evaluate(stage, model, loaders, datamodule, ckpt_path)
        if verbose and self.settings.enable_progress_bar and not self.settings.barebones:
            for number, metrics in enumerate(results):
                which = f"{stage} {number}" if len(results) > 1 else stage
                self.print(f"{which}: " + ("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()) or "-"))
        return results

    def _evaluate(
        self, stage: str, model: Module | None, loaders: Any, datamodule: Any, ckpt_path: str | Path | None,
        keep_predictions: bool = True,
    ) -> list[Any]:  # fmt: skip
        model = self._state.module if model is None else original(model)
        if model is None:
            raise ConfigError(f"{stage} got no model and none was trained before", expected="a model")
        check_instance(model, stage)
        if stage != "predict":
            require(model, _STEPS[stage], stage)
        results: list[Any] = self._call(stage, model, loaders, datamodule, ckpt_path, keep_predictions=keep_predictions)
        return results

    def _call(
        self, stage: str, model: Module, loaders: Any, datamodule: Any, ckpt_path: Any, val_loaders: Any = None,
        keep_predictions: bool = True,
    ) -> Any:  # fmt: skip
        # The launch, the loops, evaluation and checkpoints are imported by the first call.
        from stratagem.runtime.launching import launch
        from stratagem_trainer import trainer_state
        from stratagem_trainer.alternatives import tell_how_to_install
        from stratagem_trainer.first_states import begin_again
        from stratagem_trainer.request import StageRequest

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
        if stage != "fit" and loaders is None and datamodule is None and model is self._state.module:
            datamodule = self._state.datamodule  # of the call before
        state = self._state
        if stage == "fit" and model is not state.module and ckpt_path == "best":  # before its callback begins again
            ckpt_path = getattr(self.checkpoint_callback, "best_model_path", "") or ckpt_path
        request = StageRequest(stage, loaders, val_loaders, datamodule, ckpt_path, keep_predictions)
        if model is not state.module:
            state.worker_state = None
        if stage == "fit":
            if model is not state.module:
                state.position, state.train_batches, state.outcome.newest_checkpoint = Position(), None, None
            elif ckpt_path is None:
                with self.run.gathered_state():
                    held = trainer_state.dump_optimizers(state) if self.run.optimizers else None
                    request.worker_state = state.worker_state or held
        outer = model.__dict__.get("_fit")
        state.module, state.datamodule, self._call_at_work = model, datamodule, stage
        state.fn, state.status, state.ckpt_path = stage, "running", ckpt_path
        model.__dict__["_fit"] = state
        try:
            check(model, datamodule, self.run.stack, stage)
            if prepare_methods(self.run.stack.choices()):
                self.run.use_callbacks(self.run.stack.callbacks)
            self._use_callbacks_of(model)
            if stage == "fit":
                begin_again(self.run.stack, model)
            result = launch(self.run, functools.partial(self._main, request), model)
            state.status = "finished"
        except BaseException as error:
            state.status = "interrupted"
            if isinstance(error, StratagemError):
                tell_how_to_install(error)
            if isinstance(error, KeyboardInterrupt):
                shorten_traceback(error)
            raise
        finally:
            self._call_at_work = None
            if outer is not None and outer.trainer._call_at_work is not None:
                model.__dict__["_fit"] = outer  # this call was made inside a call of that trainer
        return result.unpack(state) if isinstance(result, trainer_state.WorkerResult) else result

    def _main(self, request: StageRequest, run: Context) -> Any:
        """Run `request` in this process, which is one of those that the launcher started."""
        from stratagem_trainer.stage_runner import StageRunner
        from stratagem_trainer.trainer_state import WorkerResult

        self._state.module.__dict__["_fit"], self._call_at_work = self._state, request.stage
        if isinstance(request.datamodule, DataModule):
            request.datamodule.trainer = self
        self._enter()
        try:
            result = StageRunner(self._state, request).work()
        except BaseException as error:
            self._state.events.emit("on_exception", exception=error)
            if callable(tell := getattr(request.datamodule, "on_exception", None)):
                tell(error)
            raise
        return WorkerResult.pack(self._state, result, request.stage == "fit") if run.is_worker else result

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

    # --- Travel to another process -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        sent = ("settings", "run", "_state", "_callbacks_of", "_own_callbacks")
        return {name: getattr(self, name) for name in sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The run may still be half unpickled; `_main` enters when all is there.
        self.__dict__.update(state, _call_at_work=None)


def _with_environment(sources: Sequence[Source]) -> list[Source]:
    """Put the environment where it belongs: over files, under a command line."""
    files = [source for source in sources if not source.text]
    return [*files, from_environment(), *(source for source in sources if source.text)]
