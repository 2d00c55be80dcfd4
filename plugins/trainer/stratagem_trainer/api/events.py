"""Every event of a `Trainer`: its hook, and the methods of callbacks, loggers and modules with its name.

The hooks come in the order of a fit, then of the other calls. Where the loops call them:
`stratagem_trainer.events.Events.emit`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from stratagem.api.markers import hookspec
from stratagem_trainer.api.hook_methods import let_call_by_hand, mark_all

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from stratagem.api.context import RunContext
    from stratagem_trainer.api.trainer_view import TrainerView

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
    """Before an optimizer step; gradients are averaged and accumulated, not yet unscaled or clipped.

    In each evaluation of the model, if the optimizer evaluates it itself.
    """


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


_HOOKS: Final = {name: value for name, value in vars().items() if hasattr(value, "stratagem_spec")}

#: Methods of a module that are called when the hook of the same name is, without `trainer`, `module` and `run`.
EVENTS: Final = tuple(name for name in _HOOKS if name.startswith("on_"))


@cache
def arguments_of(hook: str) -> tuple[str, ...]:
    """Return the names of the arguments of `hook`, in order, with `run` last."""
    return tuple(inspect.signature(_HOOKS[hook]).parameters)


# --- Methods with these names ---------------------------------------------------------------------------------------


class CallbackEvents:
    """Methods that do nothing, to override; see the hooks of the same names."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.mark_methods()

    @classmethod
    def mark_methods(cls) -> bool:
        """Mark those of these methods that the class overrides as hooks; return whether one had no mark."""
        return mark_all(cls, CallbackEvents, arguments_of)

    def setup(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, stage): a fit, validation, test or prediction starts."""

    # --- Training --------------------------------------------------------------------------------------------------

    def on_fit_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): model, optimizers and loaders are ready."""

    def on_fit_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): training ended without an exception."""

    def on_sanity_check_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before the sanity check."""

    def on_sanity_check_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the sanity check."""

    def on_train_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before the first epoch."""

    def on_train_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last epoch."""

    def on_train_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before an epoch."""

    def on_train_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after an epoch and its validation."""

    def on_train_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx): before a batch is used."""

    def on_train_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx): after a batch."""

    def on_before_backward(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, loss): before backward."""

    def on_after_backward(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the gradients of a batch are accumulated."""

    def on_before_optimizer_step(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, optimizer): before an optimizer step; gradients are not clipped yet."""

    def on_before_zero_grad(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, optimizer): before gradients are zeroed."""

    # --- Evaluation ------------------------------------------------------------------------------------------------

    def on_validation_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before validation."""

    def on_validation_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_validation_start`."""

    def on_validation_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a validation batch is used."""

    def on_validation_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a validation batch."""

    def on_validation_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last validation batch."""

    def on_validation_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after validation."""

    def on_test_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before testing."""

    def on_test_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_test_start`."""

    def on_test_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a test batch is used."""

    def on_test_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a test batch."""

    def on_test_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last test batch."""

    def on_test_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after testing."""

    def on_predict_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): before predicting."""

    def on_predict_epoch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after `on_predict_start`."""

    def on_predict_batch_start(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, batch, batch_idx, dataloader_idx): before a batch is predicted."""

    def on_predict_batch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, outputs, batch, batch_idx, dataloader_idx): after a batch is predicted."""

    def on_predict_epoch_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after the last batch is predicted."""

    def on_predict_end(self, *_: Any, **__: Any) -> Any:
        """(trainer, module): after predicting."""

    # --- Checkpoints and errors ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, checkpoint): add to the checkpoint what is to be saved."""

    def on_load_checkpoint(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, checkpoint): take from the checkpoint what `on_save_checkpoint` added."""

    def on_exception(self, *_: Any, **__: Any) -> Any:
        """(trainer, module, exception): a call ends with an exception."""


class LoggerMethods:
    """What a logger writes. The methods may be called by hand within a run: rank 0 writes, other ranks do nothing."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.mark_methods()

    @classmethod
    def mark_methods(cls) -> bool:
        """As that of a callback; the methods may be called by hand."""
        found = mark_all(cls, LoggerMethods, arguments_of)
        let_call_by_hand(cls, LoggerMethods)
        return found

    def log_metrics(self, *_: Any, **__: Any) -> Any:
        """(metrics, step): write numbers by name. By hand, values may be tensors, and `step` is optional."""

    def log_hyperparams(self, *_: Any, **__: Any) -> Any:
        """(params): write hyper-parameters. By hand, a mapping, a namespace or a dataclass."""


class ModuleEvents:
    """The methods that a module may define to take part in events; here they do nothing.

    They are called when the hook of the same name is, after the plugins. A method may take fewer of the arguments. A
    class between a module and this one may define them too: ``super().on_fit_start()`` works.
    """

    def prepare_data(self) -> None:
        """Download and preprocess; called once on each node, before `setup`."""

    def setup(self, stage: str) -> None:
        """Get ready for "fit", "validate", "test" or "predict"; called in every process."""

    def teardown(self, stage: str) -> None:
        """Release what `setup` made; called in every process."""

    # --- Training --------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Model, optimizers and loaders are ready."""

    def on_fit_end(self) -> None:
        """Training ended without an exception."""

    def on_sanity_check_start(self) -> None:
        """Before the sanity check."""

    def on_sanity_check_end(self) -> None:
        """After the sanity check."""

    def on_train_start(self) -> None:
        """Before the first epoch."""

    def on_train_end(self) -> None:
        """After the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Before an epoch."""

    def on_train_epoch_end(self) -> None:
        """After an epoch and its validation, before its metrics are reduced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Before a batch is used; return -1 to skip the rest of the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch; `outputs` is what `training_step` returned."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before backward."""

    def on_after_backward(self) -> None:
        """After the gradients of a batch are accumulated."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Before an optimizer step; gradients are not clipped yet."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Before gradients are zeroed."""

    # --- Validation ------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Before validation."""

    def on_validation_epoch_start(self) -> None:
        """After `on_validation_start`."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch is used."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    def on_validation_epoch_end(self) -> None:
        """After the last validation batch: log values of the whole set here."""

    def on_validation_end(self) -> None:
        """After validation."""

    # --- Test ------------------------------------------------------------------------------------------------------

    def on_test_start(self) -> None:
        """Before testing."""

    def on_test_epoch_start(self) -> None:
        """After `on_test_start`."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch is used."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    def on_test_epoch_end(self) -> None:
        """After the last test batch: log values of the whole set here."""

    def on_test_end(self) -> None:
        """After testing."""

    # --- Prediction ------------------------------------------------------------------------------------------------

    def on_predict_start(self) -> None:
        """Before predicting."""

    def on_predict_epoch_start(self) -> None:
        """After `on_predict_start`."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a batch is predicted."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a batch is predicted; `outputs` are its predictions."""

    def on_predict_epoch_end(self) -> None:
        """After the last batch is predicted."""

    def on_predict_end(self) -> None:
        """After predicting."""

    # --- Checkpoints and errors ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to `checkpoint` what is to be saved besides the weights."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take from `checkpoint` what `on_save_checkpoint` added; its weights are loaded afterwards."""

    def on_exception(self, exception: BaseException) -> None:
        """A call ends with `exception`."""
