"""DeepSpeed at every stage trains as one process does, and as DDP does."""

from __future__ import annotations

import itertools

import pytest
import torch

import stratagem as sg
from stratagem.testing import run_in_processes
from stratagem.testing.precision import tolerance_of
from stratagem.testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem.testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
OFFLOADS = ("deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
ACCUMULATE = (1, 3)
MAX_NORM = (None, 0.5)
BATCHES = joined_batches(20, 24)


class AdamW(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)


class CPUAdam(Net):
    """AdamW by DeepSpeed's vectorized implementation."""

    def configure_optimizers(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=3e-3, eps=1e-3, weight_decay=1e-2)


def _train(make, world_size, strategy, accumulate, max_norm, **arguments):
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, accumulate_grad_batches=accumulate, gradient_clip_val=max_norm,
        **QUIET | arguments,
    )  # fmt: skip
    trainer.fit(make(), share(trainer, BATCHES))
    weights, policy = weights_of(trainer), trainer.run.policy
    trainer.run.close()
    return weights, policy


def _compare(rank, world_size, strategies, pairs, limit):
    """Train each of `strategies`; return what missed its limits, and how much was compared."""
    missed, compared = [], 0
    for (make, plain), accumulate, max_norm in itertools.product(pairs, ACCUMULATE, MAX_NORM):
        reference, norms = train_module_plainly(plain(), BATCHES, accumulate, max_norm)
        assert max(norms) > 1
        ddp, _ = _train(plain, world_size, "ddp", accumulate, max_norm)
        for strategy in strategies:
            weights, _ = _train(make, world_size, strategy, accumulate, max_norm)
            for other, expected in (("one process", reference), ("ddp", ddp)):
                distance = relative_difference(weights, expected)
                compared += 1
                if not distance < limit:
                    missed.append(
                        f"{strategy}, {make.__name__}, {accumulate=}, {max_norm=}: {distance:.1e} from {other}"
                    )
    return missed, compared


@pytest.mark.parametrize("strategy", ["deepspeed", *STAGES])
def test_every_stage_trains_as_one_process_and_as_ddp(strategy):
    pairs = ((Net, Net), (AdamW, AdamW))
    for missed, compared in run_in_processes(_compare, 2, [strategy], pairs, 1e-6, limit_s=300):
        assert missed == []
        assert compared == 16


@pytest.mark.parametrize("strategy", OFFLOADS)
def test_what_is_offloaded_to_the_cpu_trains_the_same(strategy):
    pairs = ((Net, Net), (AdamW, AdamW), (CPUAdam, AdamW))
    for missed, compared in run_in_processes(_compare, 2, [strategy], pairs, 1e-6, limit_s=300):
        assert missed == []
        assert compared == 24


def _in_16_bits(rank, world_size, strategy, precision):
    expected, _ = _train(AdamW, world_size, "ddp", 1, None)
    weights, policy = _train(AdamW, world_size, strategy, 1, None, precision=precision)
    return relative_difference(weights, expected), tolerance_of(policy)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", {"name": "16-mixed", "init_scale": 64.0}], ids=str)
@pytest.mark.parametrize("strategy", STAGES)
def test_sixteen_bits_stay_close(strategy, precision):
    for distance, tolerance in run_in_processes(_in_16_bits, 2, strategy, precision, limit_s=120):
        assert 0 < distance < tolerance
