"""FSDP in all its modes trains as one process does, and as DDP does."""

from __future__ import annotations

import pytest
from torch import nn

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
SHARDING = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {},
    "HYBRID_SHARD": {2: {"device_mesh": (2, 1)}, 4: {"device_mesh": (2, 2)}},
    "NO_SHARD": {},
}
MODES = {
    "fp32": ({}, {}),
    "offload": ({}, {"cpu_offload": True}),
    "activation checkpointing": ({}, {"activation_checkpointing_policy": {nn.Tanh, nn.Linear}}),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}),
    # At its usual scale the first steps overflow and are skipped, as they should be: nothing to compare.
    "16-mixed": ({"precision": {"name": "16-mixed", "init_scale": 64.0}}, {}),
}
#: Batches per step and the largest norm: all pairs for fp32, and those in which either differs for the other modes.
WINDOWS = {"fp32": ((1, None), (1, 0.5), (3, None), (3, 0.5))}
OTHER_WINDOWS = ((1, 0.5), (3, None))
BATCHES = joined_batches(7, 24)  # the last window is short


def _train(world_size, strategy, accumulate, max_norm, **arguments):
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, accumulate_grad_batches=accumulate, gradient_clip_val=max_norm,
        **QUIET | arguments,
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, BATCHES))
    return weights_of(trainer), trainer.run.policy


def _all_modes(rank, world_size, sharding):
    """Return what missed its limits, and by how much; and how much was compared."""
    options = {"name": "fsdp", "sharding_strategy": sharding, "auto_wrap_policy": {nn.Linear}}
    options |= SHARDING[sharding].get(world_size, {})
    missed, compared = [], 0
    ddp = {}
    for mode, (arguments, own) in MODES.items():
        for accumulate, max_norm in WINDOWS.get(mode, OTHER_WINDOWS):
            plain, norms = train_module_plainly(Net(), BATCHES, accumulate, max_norm)
            assert max(norms) > 1
            weights, policy = _train(world_size, options | own, accumulate, max_norm, **arguments)
            key = str((arguments, accumulate, max_norm))
            if key not in ddp:
                ddp[key], _ = _train(world_size, "ddp", accumulate, max_norm, **arguments)
            coarse = tolerance_of(policy) if arguments else 1e-6
            for other, reference, limit in (("one process", plain, coarse), ("ddp", ddp[key], 1e-6)):
                distance = relative_difference(weights, reference)
                compared += 1
                if not distance < limit:
                    missed.append(f"{mode}, {accumulate=}, {max_norm=}: {distance:.1e} from {other}")
    return missed, compared


@pytest.mark.every_push("FULL_SHARD-2")
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sharding", list(SHARDING))
def test_every_mode_trains_as_one_process_and_as_ddp(sharding, world_size):
    for missed, compared in run_in_processes(_all_modes, world_size, sharding, limit_s=900):
        assert missed == []
        assert compared == 2 * sum(len(WINDOWS.get(mode, OTHER_WINDOWS)) for mode in MODES)
