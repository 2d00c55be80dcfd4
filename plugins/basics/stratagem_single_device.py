"""Train on one device, in this process. Also the smallest complete strategy: copy it to write your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    WITHIN_TEAM,
    Capabilities,
    Strategy,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class SingleDeviceStrategy(Strategy):
    """Move the model to ``run.device`` and train it there."""

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM,
            CLIP_BY_VALUE,
            CLOSURE_OPTIMIZERS,
            CUSTOM_CLIPPING,
            CUSTOM_STEP,
            FULL_STATE,
            MANUAL_OPTIMIZATION,
            MULTIPLE_OPTIMIZERS,
            NO_SYNC,  # a single process never communicates
            WITHIN_TEAM,
        }
    )

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        return module.to(run.device)
