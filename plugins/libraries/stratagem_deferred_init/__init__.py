"""Build models on the meta device, and initialize them module by module, with the same values at any world size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from stratagem.api import hookimpl
from stratagem_deferred_init.materializer import Materializer
from stratagem_deferred_init.meta_init import has_no_values, meta_init
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

__all__ = ["DeferredInit", "Materializer", "has_no_values", "meta_init"]


@define(eq=False, kw_only=True)
class DeferredInit(Callback):
    """Builds models on the meta device, and initializes them later; a run that needs this adds it automatically."""

    @hookimpl
    def init_context(self, empty: bool) -> AbstractContextManager[Any] | None:
        return meta_init() if empty else None

    @hookimpl
    def materializer(self, module: torch.nn.Module, run: RunContext) -> Materializer:
        return Materializer(module, run.collectives.broadcast_object(torch.initial_seed()), run.device)
