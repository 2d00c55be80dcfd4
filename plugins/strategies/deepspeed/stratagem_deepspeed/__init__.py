"""DeepSpeed's ZeRO: optimizer state, gradients and parameters shared out over the processes, and offloaded."""

from stratagem_deepspeed.consolidation import convert_zero_checkpoint_to_fp32_state_dict
from stratagem_deepspeed.native import DeepSpeedFormat
from stratagem_deepspeed.presets import (
    stage_1,
    stage_1_offload,
    stage_2,
    stage_2_offload,
    stage_3,
    stage_3_offload,
    stage_3_offload_nvme,
)
from stratagem_deepspeed.strategy import DeepSpeedStrategy

__all__ = [
    "DeepSpeedFormat",
    "DeepSpeedStrategy",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "stage_1",
    "stage_1_offload",
    "stage_2",
    "stage_2_offload",
    "stage_3",
    "stage_3_offload",
    "stage_3_offload_nvme",
]
