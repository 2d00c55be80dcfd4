"""`ModuleEvents`: the methods that a module may define to take part in events; here they do nothing.

They are called when the hook of the same name is (`stratagem.api.hooks.events`), after the plugins. A method may take
fewer of the arguments. A class between a module and this one may define them too: ``super().on_fit_start()`` works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ModuleEvents:
    """Methods that do nothing, to override."""

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
