"""DeepSpeed's ZeRO: optimizer state, gradients and parameters partitioned over the processes, and offloaded.

Importing the package imports neither torch nor DeepSpeed: names below load their module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "DeepSpeedFormat": "native",
    "DeepSpeedStrategy": "strategy",
    "convert_zero_checkpoint_to_fp32_state_dict": "consolidation",
    "stage_1": "presets",
    "stage_1_offload": "presets",
    "stage_2": "presets",
    "stage_2_offload": "presets",
    "stage_3": "presets",
    "stage_3_offload": "presets",
    "stage_3_offload_nvme": "presets",
}

__all__ = list(_MODULES)

if TYPE_CHECKING:
    from stratagem_deepspeed.consolidation import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
    from stratagem_deepspeed.native import DeepSpeedFormat as DeepSpeedFormat
    from stratagem_deepspeed.presets import stage_1 as stage_1
    from stratagem_deepspeed.presets import stage_1_offload as stage_1_offload
    from stratagem_deepspeed.presets import stage_2 as stage_2
    from stratagem_deepspeed.presets import stage_2_offload as stage_2_offload
    from stratagem_deepspeed.presets import stage_3 as stage_3
    from stratagem_deepspeed.presets import stage_3_offload as stage_3_offload
    from stratagem_deepspeed.presets import stage_3_offload_nvme as stage_3_offload_nvme
    from stratagem_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        message = f"module 'stratagem_deepspeed' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"stratagem_deepspeed.{module}"), name)
