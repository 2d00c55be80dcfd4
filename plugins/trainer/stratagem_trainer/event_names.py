"""The events that a module may define as methods."""

from __future__ import annotations

#: Methods of a module that are called when the hook of the same name is, without `trainer`, `module` and `run`.
EVENTS = (
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_sanity_check_start", "on_sanity_check_end",
    "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end",
    "on_test_start", "on_test_epoch_start", "on_test_batch_start", "on_test_batch_end", "on_test_epoch_end",
    "on_test_end",
    "on_predict_start", "on_predict_epoch_start", "on_predict_batch_start", "on_predict_batch_end",
    "on_predict_epoch_end", "on_predict_end",
    "on_save_checkpoint", "on_load_checkpoint", "on_exception",
)  # fmt: skip
