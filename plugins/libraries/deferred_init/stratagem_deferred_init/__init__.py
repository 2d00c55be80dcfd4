"""Models that are built on the meta device, and initialized part by part, the same at every number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define

from stratagem.api import Callback, hookimpl
from stratagem_deferred_init.materializer import Materializer
from stratagem_deferred_init.meta_init import has_no_values, meta_init

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

__all__ = ["DeferredInit", "Materializer", "has_no_values", "meta_init"]


@define(eq=False, kw_only=True)
class DeferredInit(Callback):
    """Builds models without values, and initializes them later; a run that needs it adds it."""

    @hookimpl
    def init_context(self, empty: bool) -> AbstractContextManager[Any] | None:
        return meta_init() if empty else None

    @hookimpl
    def materializer(self, module: torch.nn.Module, run: RunContext) -> Materializer:
        return Materializer(module, run.collectives.broadcast_object(torch.initial_seed()), run.device)
