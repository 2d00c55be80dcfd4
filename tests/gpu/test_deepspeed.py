"""DeepSpeed on one GPU at every stage, with its own optimizers, beside plain PyTorch on a CPU."""

from __future__ import annotations

import pytest
import torch
from on_device import DEVICE, OTHER_ORDER, AdamW, Noisy, SaveAt, differing, fit, run_ranks
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, data, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
OFFLOADS = ("deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
#: DeepSpeed compiles its optimizers before their first use.
COMPILING_S = 400
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


class Fused(Net):
    """AdamW by DeepSpeed's kernel for CUDA."""

    def configure_optimizers(self):
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(self.parameters(), lr=3e-3, eps=1e-3, weight_decay=1e-2, adam_w_mode=True)


class OnTheCPU(Net):
    """AdamW by DeepSpeed's vectorized implementation, for parameters that are offloaded."""

    def configure_optimizers(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=3e-3, eps=1e-3, weight_decay=1e-2)


def _train(rank, world_size, make, strategy, precisions):
    results = []
    for precision in precisions:
        options = {"name": strategy} | ({"initial_scale_power": 6} if precision == "16-mixed" else {})
        trainer = sg.Trainer(
            max_epochs=1, strategy=options, devices=world_size, precision=precision, gradient_clip_val=1.0,
            accelerator=DEVICE, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(globals()[make](), share(trainer, joined_batches(10, 16)))
        limit = OTHER_ORDER if precision == "32-true" else tolerance_of(trainer.run.policy)
        results.append((weights_of(trainer), limit))
        trainer.close()
    return results


def _check(results):
    reference, norms = train_module_plainly(AdamW(), joined_batches(10, 16), max_norm=1.0)
    assert max(norms) > 1
    for weights, limit in results:
        assert relative_difference(weights, reference) < limit


@pytest.mark.parametrize("strategy", STAGES)
def test_a_stage_trains_as_plain_pytorch(strategy):
    (results,) = run_ranks(_train, 1, "AdamW", strategy, PRECISIONS, limit_s=COMPILING_S)
    _check(results)


@pytest.mark.gpu
@pytest.mark.xdist_group("fused_adam")
@pytest.mark.parametrize("strategy", STAGES)
def test_a_stage_with_fused_adam(strategy):
    (results,) = run_ranks(_train, 1, "Fused", strategy, PRECISIONS, limit_s=COMPILING_S)
    _check(results)


@pytest.mark.xdist_group("cpu_adam")
@pytest.mark.parametrize("strategy", OFFLOADS)
def test_an_offloaded_stage_with_its_own_optimizer(strategy):
    (results,) = run_ranks(_train, 1, "OnTheCPU", strategy, ("32-true", "bf16-mixed"), limit_s=COMPILING_S)
    _check(results)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("strategy", STAGES)
def test_two_gpus(strategy):
    for results in run_ranks(_train, 2, "Fused", strategy, PRECISIONS, one_gpu=False, limit_s=COMPILING_S):
        _check(results)


def _resume(rank, world_size, strategy, folder):
    names = []
    for name in ("full", "sharded"):
        path = f"{folder}/{name}"
        options = {"strategy": strategy, "checkpoint": name, "max_epochs": 2}
        torch.manual_seed(11)
        loader = DataLoader(TensorDataset(*data(64)), 8, shuffle=True)
        whole, trainer = fit(Noisy(), loader, callbacks=[SaveAt(path, 3)], **options)
        trainer.close()
        torch.manual_seed(99)
        resumed, trainer = fit(Noisy(), loader, ckpt_path=path, **options)
        trainer.close()
        names += differing(whole, resumed)
    return names


@pytest.mark.parametrize("strategy", STAGES)
def test_a_stage_resumes_within_an_epoch_bit_for_bit(strategy, tmp_path):
    assert run_ranks(_resume, 1, strategy, str(tmp_path), limit_s=COMPILING_S) == [[]]


def _overflows(rank, world_size, strategy):
    class Overflows(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)

    options = {"name": strategy, "initial_scale_power": 6, "hysteresis": 1}
    _, trainer = fit(Overflows(), joined_batches(10, 16), strategy=options, precision="16-mixed")
    return trainer.position.skipped_steps


@pytest.mark.parametrize("strategy", STAGES)
def test_a_forced_overflow_skips_one_step(strategy):
    assert run_ranks(_overflows, 1, strategy, limit_s=COMPILING_S) == [1]
