"""Which backend of torch.distributed serves which type of device; see [Note: two backends] in `process_group`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# --- Backends: see [Note: two backends] --------------------------------------------------------------------------


def with_gloo(backend: str, device: torch.device) -> str:
    """Return `backend`, a name or a list such as "cuda:nccl", with gloo for CPU tensors if it is a name for `device`
    alone.
    """
    import torch.distributed as dist

    if ":" in backend or device.type == "cpu" or "cpu" in dist.Backend.backend_capability.get(backend.lower(), ["cpu"]):
        return backend
    return f"cpu:gloo,{device.type}:{backend.lower()}"  # torch accepts any case, code that looks for "nccl" does not


def backends_in(backend: str) -> dict[str, str]:
    """Return which backend serves each type of device, given a name, or a list such as "cpu:gloo,cuda:nccl"."""
    import torch.distributed as dist

    if ":" in backend:
        pairs = (pair.partition(":") for pair in backend.lower().split(","))
        return {device: name for device, _, name in pairs}
    return dict.fromkeys(dist.Backend.backend_capability.get(backend.lower(), ["cpu", "cuda"]), backend.lower())


def backends_of(group: Any) -> dict[str, str]:
    """Return which backend of the process group `group` serves each type of device."""
    import torch.distributed as dist

    return backends_in(dist.get_backend_config(group))
