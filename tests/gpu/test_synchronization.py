"""On a GPU, too, a training step only queues work: CUDA raises where the host would wait for it."""

from __future__ import annotations

import warnings

import pytest
import torch
from on_device import Fused

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

pytestmark = pytest.mark.gpu

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cuda"}
#: Batches in which engines lay out their buckets, optimizers make their state, and cuBLAS its handles.
WARM_UP = 4
#: Batches after these.
STEPS = 8
HOOKS = {
    "allreduce": {}, "fp16_compress": {}, "bf16_compress": {}, "int8": {}, "topk": {}, "one_bit": {"start_iter": 2},
    "powersgd": {"start_powerSGD_iter": 2, "min_compression_rate": 1}, "batched_powersgd": {"start_powerSGD_iter": 2},
}  # fmt: skip


class Strict(sg.Callback):
    """Sets CUDA's synchronization debug mode for the batches after the first ones; the end of an epoch reads its metrics."""

    def __init__(self, mode):
        self.mode = mode

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        if batch_idx + 1 == WARM_UP:
            torch.cuda.set_sync_debug_mode(self.mode)
        if batch_idx + 1 == WARM_UP + STEPS:
            torch.cuda.set_sync_debug_mode("default")


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 1.0 * batch_idx, sync_dist=True)
        return loss


def fit(module, mode="error", **arguments):
    """Train some batches after the first ones in the debug mode `mode`."""
    trainer = sg.Trainer(**({"max_epochs": 1, "devices": 1} | QUIET | arguments), callbacks=[Strict(mode)])
    try:
        trainer.fit(module, joined_batches(WARM_UP + STEPS, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_sharded", "fsdp"])
def test_a_step_waits_for_nothing(strategy, precision):
    fit(Net(), strategy=strategy, precision=precision)
    fit(Net(), strategy=strategy, precision=precision, gradient_clip_val=0.5)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_step_with_a_comm_hook_waits_for_nothing(hook):
    fit(Fused(), strategy="ddp", comm_hook={"name": hook, **HOOKS[hook]})


def test_logging_and_the_progress_bar_wait_for_nothing(capsys):
    progress = {"name": "progress", "refresh_every_s": 1e-6, "line_every_s": 1e-6}
    arguments = QUIET | {"accelerator": "cuda", "strategy": "single_device", "devices": 1, "max_epochs": 1}
    arguments |= {"enable_progress_bar": True, "logger": "csv", "log_every_n_steps": 1000}
    trainer = sg.Trainer(**arguments, callbacks=[progress, Strict("error")])
    try:
        trainer.fit(Logs(), joined_batches(WARM_UP + STEPS, 16))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_sharded", "fsdp"])
def test_a_step_with_a_loss_scale_waits_for_one_number(strategy):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Net(), "warn", strategy=strategy, precision={"name": "16-mixed", "init_scale": 16.0})

    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) <= STEPS, [f"{each.filename}:{each.lineno}" for each in waits]


def test_a_recorded_step_is_what_cuda_sees():
    """The mode does raise where the host waits."""

    class Reads(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            float(loss.detach())
            return loss

    with pytest.raises(RuntimeError, match="synchroniz"):
        fit(Reads(), strategy="single_device")
