"""Hooks for events, which callbacks and loggers implement, and for the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.api.markers import hookspec

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.context import RunContext
    from stratagem.api.trainer_view import TrainerView

# --- Events ------------------------------------------------------------------------------------------------------
# For callbacks, loggers and other plugins. A Module may define a method of the same name (without `trainer`,
# `module` and `run`); it is called after the plugins.


@hookspec
def setup(trainer: TrainerView, module: nn.Module, stage: str, run: RunContext) -> None:
    """A fit, validation, test or prediction starts; the data is set up, the model may not be built yet.

    `stage` is "fit", "validate", "test" or "predict". The module's own ``setup(stage)`` is called after it.
    """


@hookspec
def on_fit_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Model, optimizers and loaders are ready; a checkpoint to resume from has been applied."""


@hookspec
def on_fit_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Training ended without an exception."""


@hookspec
def on_sanity_check_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before the sanity check, with ``trainer.sanity_checking`` set."""


@hookspec
def on_sanity_check_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the sanity check, whose metrics are cleared when this returns."""


@hookspec
def on_train_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before the first epoch, after the sanity check."""


@hookspec
def on_train_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the last epoch."""


@hookspec
def on_train_epoch_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before the epoch's first batch; ``trainer.current_epoch`` counts from 0."""


@hookspec
def on_train_epoch_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the epoch's last batch and its validation; the epoch's metrics are reduced.

    Also when training ends within an epoch (`max_steps`, `max_time`, `trainer.should_stop`):
    ``trainer.position.epoch_ended`` is then False, and the hook is called again when a resumed run ends the epoch. A
    metric that is logged here is reduced at once.
    """


@hookspec
def on_train_batch_start(trainer: TrainerView, module: nn.Module, batch: Any, batch_idx: int, run: RunContext) -> None:
    """Before a batch is used; it is on the device. The module's method may return -1 to skip the rest of the epoch."""


@hookspec
def on_train_batch_end(
    trainer: TrainerView, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, run: RunContext
) -> None:
    """After a batch, including the optimizer's step if the batch closed an accumulation window."""


@hookspec
def on_before_backward(trainer: TrainerView, module: nn.Module, loss: Tensor, run: RunContext) -> None:
    """Before backward; `loss` is divided by the number of accumulated batches, and not scaled yet."""


@hookspec
def on_after_backward(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the gradients of a batch are accumulated; they are not unscaled yet."""


@hookspec
def on_before_optimizer_step(trainer: TrainerView, module: nn.Module, optimizer: Optimizer, run: RunContext) -> None:
    """Before an optimizer step; gradients are averaged and accumulated, not yet unscaled or clipped."""


@hookspec
def on_before_zero_grad(trainer: TrainerView, module: nn.Module, optimizer: Optimizer, run: RunContext) -> None:
    """Before gradients are zeroed: after each step; before the next backward if the module defines `optimizer_step`."""


@hookspec
def on_validation_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before validation, also in a sanity check (``trainer.sanity_checking``)."""


@hookspec
def on_validation_epoch_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After `on_validation_start`, before the first batch."""


@hookspec
def on_validation_batch_start(
    trainer: TrainerView, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int, run: RunContext
) -> None:
    """Before a validation batch is used; it is on the device."""


@hookspec
def on_validation_batch_end(
    trainer: TrainerView,
    module: nn.Module,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int,
    run: RunContext,
) -> None:
    """After a validation batch."""


@hookspec
def on_validation_epoch_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the last validation batch, before its metrics are reduced: log values of the whole set here."""


@hookspec
def on_validation_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After validation; its metrics are reduced, and in ``trainer.callback_metrics``."""


@hookspec
def on_test_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before testing."""


@hookspec
def on_test_epoch_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After `on_test_start`, before the first batch."""


@hookspec
def on_test_batch_start(
    trainer: TrainerView, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int, run: RunContext
) -> None:
    """Before a test batch is used; it is on the device."""


@hookspec
def on_test_batch_end(
    trainer: TrainerView,
    module: nn.Module,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int,
    run: RunContext,
) -> None:
    """After a test batch."""


@hookspec
def on_test_epoch_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the last test batch, before its metrics are reduced."""


@hookspec
def on_test_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After testing; its metrics are reduced."""


@hookspec
def on_predict_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """Before predicting."""


@hookspec
def on_predict_epoch_start(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After `on_predict_start`, before the first batch."""


@hookspec
def on_predict_batch_start(
    trainer: TrainerView, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int, run: RunContext
) -> None:
    """Before a predict batch is used; it is on the device."""


@hookspec
def on_predict_batch_end(
    trainer: TrainerView,
    module: nn.Module,
    outputs: Any,
    batch: Any,
    batch_idx: int,
    dataloader_idx: int,
    run: RunContext,
) -> None:
    """After a predict batch."""


@hookspec
def on_predict_epoch_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After the last predict batch."""


@hookspec
def on_predict_end(trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
    """After predicting."""


@hookspec
def on_save_checkpoint(trainer: TrainerView, module: nn.Module, checkpoint: dict[str, Any], run: RunContext) -> None:
    """Before `checkpoint` is written: change it, or add values (tensors, numbers, strings, containers)."""


@hookspec
def on_load_checkpoint(trainer: TrainerView, module: nn.Module, checkpoint: dict[str, Any], run: RunContext) -> None:
    """A checkpoint was read and verified; nothing has been applied yet."""


@hookspec
def on_exception(trainer: TrainerView, module: nn.Module, exception: BaseException, run: RunContext) -> None:
    """The loop ends with `exception` on this rank. The other ranks may not know it yet: call no collectives."""


@hookspec
def log_hyperparams(params: dict[str, Any], run: RunContext) -> None:
    """Loggers, rank 0 only: the module's hyper-parameters (`Module.save_hyperparameters`), when a fit starts."""


@hookspec
def log_metrics(metrics: dict[str, float], step: int, run: RunContext) -> None:
    """Loggers, rank 0 only: values at optimizer step `step`."""


# --- The end -----------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def explain_error(error: BaseException, run: RunContext) -> BaseException:
    """Answer: the error to raise in place of `error`, which ends the run on this rank. Default: `error`.

    Called once for each error, after `on_exception`. Other ranks may be gone: no collectives here.
    """


@hookspec
def teardown(run: RunContext) -> None:
    """All act: release what this process holds; the processes are still connected. Must be safe to call twice."""
