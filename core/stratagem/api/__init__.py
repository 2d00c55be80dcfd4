"""All that a plugin may import: the names below, and the modules of this package.

A plugin's author reads `hooks`, `kinds` and `context`; the other modules hold what a kind of plugin may need.
"""

from stratagem.api.capabilities import (
    ACCUMULATION,
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    COMPILATION,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    DEVICE_CPU,
    DEVICE_CUDA,
    DEVICE_MPS,
    FULL_STATE,
    GRADIENT_BUCKETS,
    LOCAL_STEPS,
    LOSS_SCALING,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    SHARDED_PARAMETERS,
    SIXTEEN_BIT_GRADIENTS,
    STEPPED_COPIES,
    TEAMS,
    WITHIN_TEAM,
    Capabilities,
)
from stratagem.api.context import RunContext
from stratagem.api.kinds import (
    Accelerator,
    CheckpointFormat,
    Command,
    Confidence,
    Environment,
    Evidence,
    Kind,
    Launcher,
    Plugin,
    Precision,
    PrecisionPolicy,
    Strategy,
)
from stratagem.api.markers import hookimpl
from stratagem.api.world import Collectives, Mesh, World

__all__ = [
    "ACCUMULATION", "CLIP_BY_NORM", "CLIP_BY_VALUE", "CLOSURE_OPTIMIZERS", "COMPILATION", "CUSTOM_CLIPPING",
    "CUSTOM_STEP", "DEVICE_CPU", "DEVICE_CUDA", "DEVICE_MPS", "FULL_STATE", "GRADIENT_BUCKETS", "LOCAL_STEPS",
    "LOSS_SCALING", "MANUAL_OPTIMIZATION", "MULTIPLE_OPTIMIZERS", "MULTI_PROCESS", "NO_SYNC", "SHARDED_PARAMETERS",
    "SIXTEEN_BIT_GRADIENTS", "STEPPED_COPIES", "TEAMS", "WITHIN_TEAM", "Accelerator", "Capabilities",
    "CheckpointFormat", "Collectives", "Command", "Confidence", "Environment", "Evidence", "Kind", "Launcher", "Mesh",
    "Plugin", "Precision", "PrecisionPolicy", "RunContext", "Strategy", "World", "hookimpl",
]  # fmt: skip
