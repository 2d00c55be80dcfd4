"""One call of fit, validate, test or predict in one process: from loaders to the loop."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.paths import as_path
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.errors import ConfigError
from stratagem.runtime import state_io
from stratagem_trainer import restarts, trainer_state
from stratagem_trainer.batches import ResumableBatches, agreed_size, end_workers
from stratagem_trainer.custom_step import forget_custom_methods, use_custom_methods
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.dynamo_import import import_dynamo
from stratagem_trainer.evaluation import evaluate
from stratagem_trainer.hyperparameters import logged_hyperparameters
from stratagem_trainer.loops import TrainLoop
from stratagem_trainer.metric_objects import gathered_once
from stratagem_trainer.module import BUILT, Module, build, overrides
from stratagem_trainer.module_checks import check, check_optimizers, check_schedulers
from stratagem_trainer.optimizer_handle import OptimizerHandle
from stratagem_trainer.optimizer_modes import check_modes, has_modes, in_mode, keep_training_weights, set_mode
from stratagem_trainer.optimizers import read
from stratagem_trainer.progress import LIGHTNING_VERSION
from stratagem_trainer.request import RequestLoaders, StageRequest, agree
from stratagem_trainer.token_loss import target_counts
from stratagem_trainer.uncompiled import keep_uncompiled

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem_trainer.fit_state import FitState

keep_uncompiled(
    Module, "log", "log_dict", "manual_backward", "optimizers", "clip_gradients", "toggle_optimizer",
    "untoggle_optimizer", "lr_schedulers", "print", "trainer", "current_epoch", "global_step", "logger", "loggers",
    "global_rank", "local_rank", "all_gather",
)  # fmt: skip
keep_uncompiled(OptimizerHandle, "step", "zero_grad")


class StageRunner:
    """Does a request in this process."""

    def __init__(self, state: FitState, request: StageRequest) -> None:
        self.state, self.run, self.settings, self.request = state, state.run, state.settings, request
        self.module: Module = state.module
        self.loaders = RequestLoaders(state, request)
        self.train_loader: Any = None
        self.val_loaders: list[Any] = []
        #: Batches of `train_loader` and `val_loaders` that an epoch has.
        self.lengths: list[float] = []
        #: The epoch that the loaders of a fit were made for.
        self.loaders_epoch = 0
        #: The checkpoint that the request begins with.
        self.read_from: Path | None = None

    def work(self) -> Any:
        """Do the request; return what the user's call returns."""
        agree(self.run.collectives, self._facts())
        self._build()
        check(self.module, self.request.datamodule, self.run.stack, self.request.stage)
        result = None
        use_custom_methods(self.state, self.request.datamodule)
        try:
            with gathered_once(self.module, self.run):
                if self.request.stage == "fit":
                    self._fit()
                else:
                    result = self._evaluate(self.request.stage)
        finally:
            forget_custom_methods(self.run)
            self._end_workers()
        for part in (self.module, self.request.datamodule):
            if part is not None and _defines(part, "teardown"):
                part.teardown(self.request.stage)
        return result

    def _end_workers(self) -> None:
        """End the processes of the loaders of this request."""
        batches = self.state.train_batches
        end_workers([*itertools.chain(*self.state.loaders.values()), batches and batches.loader])

    def _facts(self) -> dict[str, Any]:
        """Return what must be the same on all ranks."""
        request = self.request
        return {
            "the call": request.stage,
            "the module": type(self.module).__qualname__,
            "ckpt_path": None if request.ckpt_path is None else str(request.ckpt_path),
            "dataloaders": request.loaders is not None,
            "val_dataloaders": request.val_loaders is not None,
            "datamodule": None if request.datamodule is None else type(request.datamodule).__qualname__,
        }

    def _build(self) -> None:
        """Prepare data once per node, then build what does not exist yet."""
        run = self.run
        parts: list[Any] = [part for part in (self.request.datamodule, self.module) if part is not None]
        preparing = [part for part in parts if _defines(part, "prepare_data")]
        if preparing:
            error = None
            if run.place.local_rank == 0:
                try:
                    for part in preparing:
                        if getattr(part, "prepare_data_per_node", True) or run.is_global_zero:
                            part.prepare_data()
                except Exception as caught:  # noqa: BLE001 - raised on all ranks
                    error = caught
            run.collectives.fail_together(error)
        before = dict(self.module.named_parameters())
        if self.request.datamodule is not None and _defines(self.request.datamodule, "setup"):
            self.request.datamodule.setup(self.request.stage)
        run.hooks.hook.setup(trainer=self.state.trainer, module=self.module, stage=self.request.stage, run=run)
        # Parameters that must not be lost: trained ones, and those that a strategy has sharded.
        matter = self.module.__dict__.get(BUILT, False) or (run.shards_parameters and BUILT in self.module.__dict__)
        self.module.setup(self.request.stage)
        if run.is_worker and (added := dict(self.module.named_parameters()).keys() - before):
            raise ConfigError(
                f"setup made {min(added)!r}, which the process that launched this one lacks and would get back",
                expected="layers made in __init__ or configure_model", do='move it, or set launcher="subprocess"',
            )  # fmt: skip
        with run.init_context(empty=run.shards_parameters):
            build(self.module)
        self._check_kept(before if matter else {})

    def _check_kept(self, before: dict[str, torch.nn.Parameter]) -> None:
        """Refuse a `setup` that replaced parameters of `before`, unless a checkpoint has the values of all."""
        now = dict(self.module.named_parameters())
        lost = [name for name, each in before.items() if each.requires_grad and now.get(name, each) is not each]
        if lost and (self.request.ckpt_path is None or self.run.shards_parameters):
            raise ConfigError(
                f"{type(self.module).__name__}.setup({self.request.stage!r}) replaced {len(lost)} parameters of the "
                f"model that an earlier call trained or prepared, the first {lost[0]!r}",
                expected="layers that are built once",
                do="build them in configure_model, which is called once, or let setup return where they exist",
            )
        if lost:
            self.run.model = None  # it is wrapped again

    # --- Fit -----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        state, run, request = self.state, self.run, self.request
        resumed = self._read_checkpoint()
        run.manual = not self.module.automatic_optimization
        state.loaders, state.make_loaders = {}, self._make_fit_loaders
        import_dynamo()
        run.prepare(self.module, self._make_optimizers)
        self.module.__dict__[BUILT] = True
        check_modes(run)
        state.optimizer_mode = "eval"
        self._make_fit_loaders()
        earlier, state.make_loaders = state.train_batches, None
        counts = target_counts(self.settings.loss_normalization, run)
        train_batches = ResumableBatches(self.train_loader, state.num_training_batches, run, self.module, counts)
        if earlier is not None and resumed is None:
            train_batches.resume(earlier.state_dict(state.position), earlier.random_state(), state.position)
        state.train_batches, state.configure_again = train_batches, self.configure_again
        if resumed is not None:
            trainer_state.restore(state, resumed, self.read_from)
            resumed.clear()  # what is left of it would stay in memory as long as training
            if self.settings.enable_progress_bar and not self.settings.barebones:
                where = f"epoch {state.position.epoch}, step {state.position.global_step}"
                run.print(f"resumed from {self.read_from} ({where})", flush=True)
        elif request.worker_state is not None:
            trainer_state.restore_worker_state(state, request.worker_state)
        state.should_stop, state.outcome.reason, run.step.skipped_batches = False, "", 0
        if run.is_global_zero and (hparams := self._hyperparameters()):
            run.hooks.hook.log_hyperparams(params=hparams, run=run)
        state.events.emit("on_fit_start")
        if resumed is None:
            self._sanity_check()
        if state.num_training_batches:
            self._train(train_batches)
        run.saver.wait()
        state.events.emit("on_fit_end")

    def _train(self, train_batches: ResumableBatches) -> None:
        self.state.fitting = True
        try:
            with torch.autograd.set_detect_anomaly(self.settings.detect_anomaly):
                TrainLoop(self.state, train_batches, self.validate, self.reload_loaders).fit()
        except BaseException:
            if self.run.world_size == 1:  # others may not know of it
                set_mode(self.state, "eval")
            raise
        finally:
            self.state.fitting = False

    def _hyperparameters(self) -> dict[str, Any]:
        """Return those of the module and of the data module."""
        data = logged_hyperparameters(self.request.datamodule) if hasattr(self.request.datamodule, "hparams") else {}
        own = logged_hyperparameters(self.module)
        for name in own.keys() & data.keys():
            if own[name] is not data[name] and own[name] != data[name]:
                raise ConfigError(
                    f"hyper-parameter {name!r} is {own[name]!r} in {type(self.module).__name__} and {data[name]!r} in "
                    f"{type(self.request.datamodule).__name__}",
                    expected="the same value, or two names",
                    do="leave it out of one with save_hyperparameters(ignore=...)",
                )
        return data | own

    def _make_optimizers(self) -> list[Optimizer]:
        left_out = self.run.stack.strategy.makes_optimizer() and not overrides(self.module, "configure_optimizers")
        configured = None if left_out else self.module.configure_optimizers()
        optimizers, self.run.lr_scheduler_configs = read(configured)
        if overrides(self.module, "lr_scheduler_step"):
            for config in self.run.lr_scheduler_configs:
                config.custom_step = self.module.lr_scheduler_step
        check_optimizers(self.module, optimizers, self.run.stack)
        check_schedulers(optimizers, self.run.lr_scheduler_configs)
        for optimizer in filter(has_modes, optimizers):
            keep_training_weights(optimizer, self.run)
        return optimizers

    def configure_again(self, loader: Any) -> None:
        """Take what `configure_optimizers` returns now, but its optimizers; see `TrainerView.configure_again`."""
        if loader is not None:
            self.use_loader(loader)
        run, begins = self.run, not self.state.position.global_step
        states = [config.scheduler.state_dict() for config in run.lr_scheduler_configs]
        for optimizer, other in zip(run.made_optimizers, self._make_optimizers(), strict=True):
            for group, options in zip(optimizer.param_groups, other.param_groups, strict=True) if begins else ():
                group.update({key: value for key, value in options.items() if key != "params"})
            other.param_groups[:] = optimizer.param_groups  # a schedule may have kept the list, or the optimizer
            optimizer.param_groups = other.param_groups
            other.__dict__ = optimizer.__dict__
        for config, state in zip(run.lr_scheduler_configs, () if begins else states, strict=False):
            config.scheduler.load_state_dict(state)

    def _make_fit_loaders(self) -> None:
        """Make the loaders of a fit, once: `configure_optimizers` may ask how long training is. Collective."""
        if self.train_loader is None:
            if self.settings.reload_dataloaders_every_n_epochs and self.request.loaders is not None:
                raise ConfigError(
                    f"reload_dataloaders_every_n_epochs is {self.settings.reload_dataloaders_every_n_epochs} and fit "
                    "got a training loader, which cannot be made again",
                    expected="a datamodule, or a module, with train_dataloader",
                )
            self.train_loader, self.val_loaders = self.loaders.training(), self.loaders.validation()
            self.state.loaders = {"train": [self.train_loader], "validate": self.val_loaders}
            self._size_epochs(self.train_loader)

    def reload_loaders(self) -> None:
        """Make the loaders again, if the current epoch is to have others than the last, or ask their lengths again.

        Collective.
        """
        position, every = self.state.position, self.settings.reload_dataloaders_every_n_epochs
        epoch = position.epoch
        due = epoch - epoch % every if every else 0
        if due == self.loaders_epoch:
            self._follow_lengths()
            return
        # A run that resumes makes them as they were made in the epoch that was due, without random numbers of this one.
        before = random_state(self.run.devices) if due != epoch else None
        self.loaders_epoch, position.epoch = due, due
        try:
            self.train_loader = None
            self._end_workers()
            self._make_fit_loaders()
            self.use_loader(self.train_loader)
        finally:
            position.epoch = epoch
        if before is not None:
            restore_random_state(before, self.run.devices)

    def _follow_lengths(self) -> None:
        """Size epochs again if a loader has another length now on some rank: data sets grow, samplers select."""
        assert self.state.train_batches is not None
        loader = self.state.train_batches.loader
        if self.run.collectives.unchecked.any(self._lengths(loader) != self.lengths):
            self.use_loader(loader)

    def _lengths(self, *training: Any) -> list[float]:
        """Return how many batches of the `training` loader, and of those to validate on, are to be used."""
        option = "overfit_batches" if self.settings.overfit_batches else "limit_{}_batches"
        loaders = [*(("train", each) for each in training), *(("val", each) for each in self.val_loaders)]
        return [self.loaders.limited(option.format(word), each) for word, each in loaders]

    def use_loader(self, loader: Any) -> None:
        """Train with `loader`, this process's share, instead of the present one."""
        state = self.state
        self._size_epochs(loader)
        assert state.train_batches is not None
        end_workers([state.train_batches.loader])
        state.train_batches.use(loader, state.num_training_batches)

    def _size_epochs(self, loader: Any) -> None:
        """Find how many batches an epoch has, and how many lie between two validations."""
        state, settings = self.state, self.settings
        self.lengths = self._lengths(loader)
        size, *state.num_val_batches = self.lengths
        size = agreed_size(size, self.run, "training")
        if size == 0 and (settings.overfit_batches or settings.limit_train_batches != 0):
            raise ConfigError(
                "the training loader has no batches",
                expected="at least one for each process",
                do="check its data set, drop_last and limit_train_batches",
            )
        state.num_training_batches, state.batch_size = size, getattr(loader, "batch_size", None)
        across, interval = settings.check_val_every_n_epoch is None, settings.val_check_interval
        without = not isinstance(interval, float) and (settings.fast_dev_run or not any(state.num_val_batches))
        if without or state.validates_in_time:
            state.batches_between_validations = size  # in time, `ValidationClock` decides
        else:
            assert isinstance(interval, int | float), "a time was handled above"
            state.batches_between_validations = _validation_interval(interval, size, across)

    def _sanity_check(self) -> None:
        """Try validation before training; random state and metrics are as before afterwards."""
        state, steps = self.state, self.settings.num_sanity_val_steps
        if not self.val_loaders or steps == 0 or self.settings.fast_dev_run or self.settings.barebones:
            return
        before = random_state(self.run.devices)
        state.sanity_checking = True
        try:
            limits = [min(steps if steps > 0 else math.inf, limit) for limit in state.num_val_batches]
            state.events.emit("on_sanity_check_start")
            evaluate(state, "validate", self.val_loaders, limits)
            state.events.emit("on_sanity_check_end")
        finally:
            state.sanity_checking = False
        restore_random_state(before, self.run.devices)
        state.forget_metrics()

    def validate(self) -> None:
        """Validate, if this epoch does. Called by the training loop."""
        state = self.state
        every = self.settings.check_val_every_n_epoch or 1
        if self.val_loaders and (self.settings.fast_dev_run or (state.position.epoch + 1) % every == 0):
            if overrides(self.module, "on_validation_model_zero_grad") and state.at_step_boundary:
                self.module.on_validation_model_zero_grad()
            if (sizes := self._lengths()) != state.num_val_batches:
                end_workers(self.val_loaders)  # they have the data sets of before
                state.num_val_batches = sizes
            with in_mode(state, "eval"):
                evaluate(state, "validate", self.val_loaders, state.num_val_batches)

    # --- Validate, test, predict ---------------------------------------------------------------------------------

    def _evaluate(self, stage: str) -> list[Any]:
        state, run = self.state, self.run
        checkpoint = self._read_checkpoint()
        # A module that was wrapped for training is used as it is; another one is wrapped for evaluation.
        if run.model is None or run.module is not self.module:
            run.prepare(self.module, stage=stage)
        set_mode(state, "eval")  # an exception may have ended a fit in the other one
        if checkpoint is not None:
            strict, frozen = self.module.strict_loading, checkpoint.get("frozen")
            state_io.load_model(run, checkpoint["state_dict"], self.module, strict, self.read_from, frozen)
            checkpoint.clear()
        loaders = self.loaders.of_stage()
        word, limits = self.loaders.limits(loaders)
        setattr(state, f"num_{word}_batches", limits)
        state.loaders[stage] = loaders
        return evaluate(state, stage, loaders, limits, self.request.keep_predictions)

    # --- Checkpoints ---------------------------------------------------------------------------------------------

    def _read_checkpoint(self) -> dict[str, Any] | None:
        found = self._find_checkpoint()
        if found is None:
            return None
        self.read_from, state = found
        self.state.events.emit("on_load_checkpoint", checkpoint=state)
        lightnings = type(self.request.datamodule).__qualname__
        if LIGHTNING_VERSION in state and lightnings in state:
            state["datamodule"] = state.pop(lightnings)
        if "datamodule" in state and overrides(self.request.datamodule, "load_state_dict", DataModule):
            self.request.datamodule.load_state_dict(state["datamodule"])
        return dict(state)  # it is emptied while it is applied, and a callback may have kept the other

    def _find_checkpoint(self) -> tuple[Path, dict[str, Any]] | None:
        request, fit = self.request, self.state
        again = request.stage == "fit" and request.ckpt_path not in ("last", "hpc") and restarts.is_restarted(fit)
        if again and (own := restarts.read_own_checkpoint(fit, request.ckpt_path)) is not None:
            return own
        path = trainer_state.find(fit, request.ckpt_path)
        fit.ckpt_path = path and (request.ckpt_path if as_path(request.ckpt_path) == path else str(path))  # of "best"
        return None if path is None else (path, state_io.read_checkpoint(self.run, path))


def _defines(part: Any, method: str) -> bool:
    """Whether a module or a data module defines `method` itself."""
    return overrides(part, method, DataModule if isinstance(part, DataModule) else Module)


def _validation_interval(interval: float, epoch_size: float, across_epochs: bool = False) -> float:
    """Return after how many batches to validate; inf means at the end of an epoch of unknown length.

    Args:
        epoch_size: batches of an epoch; inf if unknown.
        across_epochs: batches are counted from the start of training, rather than of the epoch.
    """
    if interval == 0:
        raise ConfigError("val_check_interval is 0", expected="at least one batch, or a share above 0.0")
    if across_epochs:
        if isinstance(interval, float):
            raise ConfigError(
                f"val_check_interval is {interval} with check_val_every_n_epoch=None",
                expected="a whole number of batches, counted over epochs",
            )
        return interval
    if isinstance(interval, float):
        if math.isinf(epoch_size) and interval != 1.0:
            raise ConfigError(
                f"val_check_interval is {interval} and the training loader has no length",
                expected="a whole number of batches",
            )
        return math.inf if math.isinf(epoch_size) else max(1, int(epoch_size * interval))
    if interval > epoch_size:
        raise ConfigError(
            f"val_check_interval is {interval} and an epoch has {int(epoch_size)} batches",
            expected="at most that many",
            do="set check_val_every_n_epoch=None to count batches over epochs, or to n for each nth epoch",
        )
    return interval
