"""Memory for the parameters of a module before the strategy wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stratagem.stack.construction import default

if TYPE_CHECKING:
    from torch import nn

    from stratagem.runtime.hook_caller import HookCaller


def use_deferred_init(hooks: HookCaller) -> None:
    """Register the plugin that builds modules without values and initializes them, unless `hooks` have one.

    Raises:
        PluginError: it is not installed.
    """
    if all(implementation.wrapper for implementation in hooks.hook.materializer.get_hookimpls()):
        hooks.add(default("callback", "deferred_init", "a model is built without values"))


def separate_elements(module: nn.Module) -> None:
    """Give parameters and buffers that were expanded memory for every element: collectives write into them."""
    for tensor in (*module.parameters(), *module.buffers()):
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
