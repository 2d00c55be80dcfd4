"""`CallView`: what a trainer tells of its settings and of the call that is under way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem_trainer.api import TrainerState

if TYPE_CHECKING:
    from stratagem.runtime.context import Context
    from stratagem_trainer.fit_state import FitState
    from stratagem_trainer.settings import TrainerSettings


def _of_settings(name: str) -> Any:
    """Return a property that is the argument `name` of the trainer."""
    return property(lambda view: getattr(view.settings, name))


def _limit(name: str, overfits: bool = False) -> Any:
    """Return a property that is the limit `name` as it applies: a number of batches, or a part of all."""

    def get(view: CallView) -> float:
        settings = view.settings
        limit = (overfits and settings.overfit_batches) or getattr(settings, name)
        return int(settings.fast_dev_run) or (1.0 if limit is None else limit)

    return property(get)


def _is_stage(*stages: str) -> Any:
    """Return a property that tells whether one of `stages` is under way."""
    return property(lambda view: view.state.stage in stages)


class CallView:
    """Settings, loaders, and which call is under way."""

    settings: TrainerSettings
    run: Context
    _state: FitState

    limit_train_batches = _limit("limit_train_batches", overfits=True)
    limit_val_batches = _limit("limit_val_batches", overfits=True)
    limit_test_batches, limit_predict_batches = _limit("limit_test_batches"), _limit("limit_predict_batches")
    num_sanity_val_steps, overfit_batches = _of_settings("num_sanity_val_steps"), _of_settings("overfit_batches")
    val_check_interval = _of_settings("val_check_interval")
    check_val_every_n_epoch = _of_settings("check_val_every_n_epoch")
    log_every_n_steps = _of_settings("log_every_n_steps")
    gradient_clip_val = _of_settings("gradient_clip_val")
    gradient_clip_algorithm = _of_settings("gradient_clip_algorithm")
    min_epochs, min_steps = _of_settings("min_epochs"), _of_settings("min_steps")

    def __getattr__(self, name: str) -> Any:
        """Say what to use where `name` is an attribute of other trainers."""
        hint = moved_names("trainer_attributes").get(name, "")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}" + (f"; {hint}" if hint else ""))

    # --- The call --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> TrainerState:
        """Which call is under way or was the last one, and how it stands."""
        state = self._state
        running = state.status == "running"
        stage = "sanity_check" if state.sanity_checking else self.run.stage
        return TrainerState(state.fn, state.status, stage if running else None)

    training = _is_stage("train")
    validating = _is_stage("validate")
    testing = _is_stage("test")
    predicting = _is_stage("predict")
    evaluating = _is_stage("validate", "test", "sanity_check")

    @property
    def interrupted(self) -> bool:
        """Whether the last call ended with an error or a signal."""
        return self._state.status == "interrupted"

    @property
    def ckpt_path(self) -> str | Path | None:
        """What the call that is under way, or the last one, read: `ckpt_path` as it was given, the path for a name."""
        return self._state.ckpt_path

    # --- The model and its loaders ---------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The module that is trained or evaluated, without what the strategy wraps around it (`run.model`)."""
        return self._state.module

    #: The same, under Lightning's name.
    lightning_module = model

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Batches of each validation loader that the sanity check uses."""
        steps = self.settings.num_sanity_val_steps
        return [min(steps if steps >= 0 else math.inf, size) for size in self._state.num_val_batches]

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that is being trained, or was trained last, is the last one of the epoch."""
        state, position = self._state, self._state.position
        return state.trains_last_batch or position.epoch_done or position.batches_done >= state.num_training_batches > 0

    @property
    def train_dataloader(self) -> Any:
        """The training loader, which yields this rank's part of the data; None before a fit."""
        batches = self._state.train_batches
        starts = self._state.make_loaders is not None
        return self._loaders_of("train") if starts or batches is None else batches.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or the list of them, which yield this rank's part of the data; None without any."""
        return self._loaders_of("validate")

    @property
    def test_dataloaders(self) -> Any:
        """The loader, or the list of them, of `test`; None before one."""
        return self._loaders_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The loader, or the list of them, of `predict`; None before one."""
        return self._loaders_of("predict")

    def _loaders_of(self, stage: str) -> Any:
        loaders = self._state.loaders.get(stage) or [None]
        return loaders[0] if len(loaders) == 1 else loaders

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps of the whole fit, for schedules: ``configure_optimizers`` may use it. inf without a limit.

        Reading it there makes the loaders, which is collective: all ranks read it.

        Raises:
            ConfigError: read before a fit has started.
        """
        state, settings = self._state, self.settings
        if state.make_loaders is not None:
            state.make_loaders()
        if not state.num_training_batches and self._loaders_of("train") is None:
            raise ConfigError(
                "trainer.estimated_stepping_batches was read before a fit", expected="a training loader",
                do="read it in configure_optimizers, or in a hook of the fit",
            )  # fmt: skip
        epochs, batches, steps = settings.max_epochs or 0, state.num_training_batches, math.inf
        if epochs >= 0 and math.isfinite(batches):
            steps = sum(math.ceil(batches / state.accumulation_in(epoch)) for epoch in range(epochs))
        return min(steps, settings.max_steps) if settings.max_steps >= 0 else steps

    # --- The machine -----------------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Any:
        return self.run.stack.accelerator.plugin

    @property
    def num_nodes(self) -> int:
        return self.run.stack.num_nodes

    @property
    def num_devices(self) -> int:
        """Devices that the run uses on each node."""
        return len(self.device_ids)

    @property
    def device_ids(self) -> list[int]:
        """Numbers of the devices that the run uses on each node."""
        return list(self.run.stack.devices)

    @property
    def log_dir(self) -> str:
        """The folder that the first logger writes to, once rank 0 has written something; else `default_root_dir`."""
        folder = next((getattr(choice.plugin, "log_dir", None) for choice in self.run.stack.loggers), None)
        return str(self.settings.default_root_dir if folder is None else folder)
