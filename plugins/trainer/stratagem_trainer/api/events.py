"""Every event of a `Trainer`, stated once: from its method here come the hook and what callbacks and modules override.

The order is that of a fit, then of the other calls. Where the loops call them: `stratagem_trainer.events.Events.emit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from stratagem_trainer.hook_methods import HookMethods

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def event(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, whose type allows what overrides it to take other arguments."""
    return method


class EventMethods:
    """The events, as methods that do nothing: a `Module` inherits them.

    A module's method is called after the plugins unless an event says otherwise, and may take fewer of the arguments.
    A callback's methods, and the hooks of these names, get ``trainer: TrainerView, module: nn.Module`` before the
    arguments here and, by its name, ``run: RunContext``.
    """

    __slots__ = ()

    @event
    def setup(self, stage: str) -> None:
        """A fit, validation, test or prediction starts; the data is set up, the model may not be built yet.

        `stage` is "fit", "validate", "test" or "predict". The module's own ``setup(stage)`` is called after it, in
        every process.
        """

    @event
    def on_fit_start(self) -> None:
        """Model, optimizers and loaders are ready; a checkpoint to resume from has been applied."""

    @event
    def on_fit_end(self) -> None:
        """Training ended without an exception."""

    @event
    def on_sanity_check_start(self) -> None:
        """Before the sanity check, with ``trainer.sanity_checking`` set."""

    @event
    def on_sanity_check_end(self) -> None:
        """After the sanity check, whose metrics are cleared when this returns."""

    @event
    def on_train_start(self) -> None:
        """Before the first epoch, after the sanity check."""

    @event
    def on_train_end(self) -> None:
        """After the last epoch."""

    @event
    def on_train_epoch_start(self) -> None:
        """Before the epoch's first batch; ``trainer.current_epoch`` counts from 0."""

    @event
    def on_train_epoch_end(self) -> None:
        """After the epoch's last batch and validation: the module first, then its metrics are reduced, then callbacks.

        Also when training ends within an epoch (`max_steps`, `max_time`, `trainer.should_stop`):
        ``trainer.position.epoch_ended`` is then False, and the hook is called again when a resumed run ends the epoch.
        A metric that a callback logs here is reduced at once.
        """

    @event
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Before a batch is used; it is on the device. A module may return -1 to skip the rest of the epoch."""

    @event
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After a batch, including the optimizer's step if the batch closed an accumulation window.

        `outputs` is what `training_step` returned.
        """

    @event
    def on_before_backward(self, loss: Tensor) -> None:
        """Before backward; `loss` is divided by the number of accumulated batches, and not scaled yet."""

    @event
    def on_after_backward(self) -> None:
        """After the gradients of a batch are accumulated; they are not unscaled yet."""

    @event
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer step; gradients are averaged and accumulated, not yet unscaled or clipped.

        In each evaluation of the model, if the optimizer evaluates it itself.
        """

    @event
    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Before gradients are zeroed: after each step; before the next backward with a module's `optimizer_step`."""

    @event
    def on_validation_start(self) -> None:
        """Before validation, also in a sanity check (``trainer.sanity_checking``)."""

    @event
    def on_validation_epoch_start(self) -> None:
        """After `on_validation_start`, before the first batch."""

    @event
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a validation batch is used; it is on the device."""

    @event
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a validation batch."""

    @event
    def on_validation_epoch_end(self) -> None:
        """After the last validation batch, before its metrics are reduced: log values of the whole set here."""

    @event
    def on_validation_end(self) -> None:
        """After validation; its metrics are reduced, and in ``trainer.callback_metrics``."""

    @event
    def on_test_start(self) -> None:
        """Before testing."""

    @event
    def on_test_epoch_start(self) -> None:
        """After `on_test_start`, before the first batch."""

    @event
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a test batch is used; it is on the device."""

    @event
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a test batch."""

    @event
    def on_test_epoch_end(self) -> None:
        """After the last test batch, before its metrics are reduced: log values of the whole set here."""

    @event
    def on_test_end(self) -> None:
        """After testing; its metrics are reduced."""

    @event
    def on_predict_start(self) -> None:
        """Before predicting."""

    @event
    def on_predict_epoch_start(self) -> None:
        """After `on_predict_start`, before the first batch."""

    @event
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Before a predict batch is used; it is on the device."""

    @event
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """After a predict batch; `outputs` are its predictions."""

    @event
    def on_predict_epoch_end(self) -> None:
        """After the last predict batch."""

    @event
    def on_predict_end(self) -> None:
        """After predicting."""

    @event
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Before `checkpoint` is written: change it, or add values (tensors, numbers, strings, containers)."""

    @event
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint was read and verified; nothing has been applied yet. Take what `on_save_checkpoint` added."""

    @event
    def on_exception(self, exception: BaseException) -> None:
        """The loop ends with `exception` on this rank. The other ranks may not know it yet: call no collectives."""


class ModuleEvents(EventMethods):
    """The methods that a module may define to take part in events, and what is called before and after them."""

    def prepare_data(self) -> None:
        """Download and preprocess; called once on each node, before `setup`."""

    @event
    def teardown(self, stage: str) -> None:
        """Release what `setup` made; called in every process."""


class LogMethods:
    """What a logger writes, on rank 0 only. Its hooks also get ``run: RunContext``, by its name.

    Called by hand within a run, rank 0 writes and other ranks do nothing: values of `log_metrics` may then be tensors
    and `step` is optional; `log_hyperparams` takes a mapping, a namespace or a dataclass.
    """

    __slots__ = ()

    @event
    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Loggers, rank 0 only: the module's hyper-parameters (`Module.save_hyperparameters`), when a fit starts."""

    @event
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Loggers, rank 0 only: values at optimizer step `step`."""


# --- What comes from the methods ---------------------------------------------------------------------------------


class CallbackEvents(EventMethods, HookMethods, trainer="TrainerView", module="nn.Module"):
    """The methods of events with the arguments of their hooks; those that a class overrides need no mark."""

    __slots__ = ()


class LoggerMethods(LogMethods, HookMethods, by_hand=True):
    """The same for what a logger writes; the methods may be called by hand."""

    __slots__ = ()


_HOOKS: Final = CallbackEvents.hooks | LoggerMethods.hooks
globals().update(_HOOKS)  # the hooks of a kind are the attributes of a module

#: Methods of a module that are called when the hook of the same name is, without `trainer`, `module` and `run`.
EVENTS: Final = tuple(name for name in _HOOKS if name.startswith("on_"))


def arguments_of(hook: str) -> tuple[str, ...]:
    """Return the names of the arguments of `hook`, in order, with `run` last."""
    return tuple(_HOOKS[hook].__annotations__)[:-1]
