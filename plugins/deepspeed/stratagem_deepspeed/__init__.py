"""DeepSpeed's ZeRO: optimizer state, gradients and parameters partitioned over the processes, and offloaded.

Importing the package imports neither torch nor DeepSpeed: names below load their module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {"DeepSpeedStrategy": "strategy", "convert_zero_checkpoint_to_fp32_state_dict": "consolidation"}

__all__ = list(_MODULES)

if TYPE_CHECKING:
    from stratagem_deepspeed.consolidation import (
        convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
    )
    from stratagem_deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        message = f"module 'stratagem_deepspeed' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"stratagem_deepspeed.{module}"), name)
