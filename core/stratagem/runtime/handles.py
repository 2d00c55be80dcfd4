"""What `Run.setup` and `Run.dataloader` return: the module and the loader of a loop that the user writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stratagem.api.context import RunContext

if TYPE_CHECKING:
    from torch import nn

    from stratagem.runtime.hook_caller import HookCaller


class HandledRun(RunContext, Protocol):
    """What a handle uses of a run."""

    hooks: HookCaller
    handles: Any


class ModelHandle:
    """A prepared module in a loop of the user's: call it like the module; other attributes are the module's."""

    def __init__(self, run: HandledRun, module: nn.Module) -> None:
        self.run, self.module, self._model = run, module, run.model
        run.handles.add(self)

    def release(self) -> None:
        """Drop the wrapped model: it must not outlive the process group."""
        self._model = None

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        run = self.run
        run.module, run.model = self.module, self._model  # of several modules, the one that was called last
        stage = "train" if self.module.training and torch.is_grad_enabled() else "validate"
        if run.hooks.step_context is None:
            return run.model("__call__", *arguments, **options)
        with contextlib.ExitStack() as stack:
            run.hooks.enter_all(stack, "step_context", stage=stage, sync=run.sync_gradients)
            return run.model("__call__", *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class LoaderHandle:
    """A loader whose batches are on the device."""

    def __init__(self, run: HandledRun, loader: Any) -> None:
        self.run, self.loader = run, loader

    def __iter__(self) -> Iterator[Any]:
        return (self.run.transfer(batch) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
