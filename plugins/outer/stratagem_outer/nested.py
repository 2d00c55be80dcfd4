"""Tensors in nested dicts of state: copy to the CPU, copy to a device, drop shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stratagem_process_group.messages import local_tensor


def copied_if_shared(state: dict[str, Any], live: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `state` with CPU copies of the tensors that share memory with `live`, which is about to change."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in live.values()}

    def kept(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_meta:
            return on_cpu(value) if local_tensor(value).untyped_storage().data_ptr() in memory else value
        return {key: kept(each) for key, each in value.items()} if isinstance(value, dict) else value

    return {key: kept(value) for key, value in state.items()}


def without_shards(value: Any) -> Any:
    """Return nested `value` with sharded tensors on the meta device: other ranks save them."""
    if isinstance(value, Tensor) and hasattr(value, "to_local"):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return {key: without_shards(each) for key, each in value.items()} if isinstance(value, dict) else value


def on_cpu(value: Any) -> Any:
    """Return nested `value` with tensors copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: on_cpu(each) for key, each in value.items()} if isinstance(value, dict) else value


def on_device(device: torch.device, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    return {key: on_device(device, each) for key, each in value.items()} if isinstance(value, dict) else value
