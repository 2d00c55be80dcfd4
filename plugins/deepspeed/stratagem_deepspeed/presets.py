"""Presets of the DeepSpeed strategy: each function returns the strategy with the options that its name stands for."""

from __future__ import annotations

from stratagem_deepspeed.strategy import DeepSpeedStrategy


def stage_1() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_1`: the optimizer state is partitioned."""
    return DeepSpeedStrategy(stage=1)


def stage_1_offload() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_1_offload`: stage 1 with the optimizer state in CPU memory."""
    return DeepSpeedStrategy(stage=1, offload_optimizer=True)


def stage_2() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_2`: the gradients are partitioned, too."""
    return DeepSpeedStrategy(stage=2)


def stage_2_offload() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_2_offload`: stage 2 with the optimizer state in CPU memory."""
    return DeepSpeedStrategy(stage=2, offload_optimizer=True)


def stage_3() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_3`: the parameters are partitioned, too."""
    return DeepSpeedStrategy(stage=3)


def stage_3_offload() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_3_offload`: stage 3 with optimizer state and parameters in CPU memory."""
    return DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)


def stage_3_offload_nvme() -> DeepSpeedStrategy:
    """Return `deepspeed_stage_3_offload_nvme`: stage 3 with optimizer state and parameters on an NVMe disk."""
    return DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_parameters=True, remote_device="nvme", offload_params_device="nvme",
        offload_optimizer_device="nvme",
    )  # fmt: skip
