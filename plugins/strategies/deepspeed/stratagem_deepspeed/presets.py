"""Presets of the strategy: names with options set."""

from __future__ import annotations

from stratagem_deepspeed.strategy import DeepSpeedStrategy


def stage_1() -> DeepSpeedStrategy:
    """``deepspeed_stage_1``"""
    return DeepSpeedStrategy(stage=1)


def stage_1_offload() -> DeepSpeedStrategy:
    """``deepspeed_stage_1_offload``"""
    return DeepSpeedStrategy(stage=1, offload_optimizer=True)


def stage_2() -> DeepSpeedStrategy:
    """``deepspeed_stage_2``"""
    return DeepSpeedStrategy(stage=2)


def stage_2_offload() -> DeepSpeedStrategy:
    """``deepspeed_stage_2_offload``"""
    return DeepSpeedStrategy(stage=2, offload_optimizer=True)


def stage_3() -> DeepSpeedStrategy:
    """``deepspeed_stage_3``"""
    return DeepSpeedStrategy(stage=3)


def stage_3_offload() -> DeepSpeedStrategy:
    """``deepspeed_stage_3_offload``"""
    return DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)


def stage_3_offload_nvme() -> DeepSpeedStrategy:
    """``deepspeed_stage_3_offload_nvme``"""
    return DeepSpeedStrategy(
        stage=3,
        offload_optimizer=True,
        offload_parameters=True,
        remote_device="nvme",
        offload_params_device="nvme",
        offload_optimizer_device="nvme",
    )
