"""The default process group of torch.distributed: its store and backends, adopting one, joining errors, leaving it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.distributed.interfaces import unset_variables
from stratagem.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from stratagem.api.world import Collectives, World

#: The groups that this process has made, as long as something refers to them.
_groups: weakref.WeakSet[Any] = weakref.WeakSet()
#: In a forked process: the groups of its parent. To free one would wait forever for threads that exist only there.
_inherited: list[Any] = []


def note_groups() -> None:
    """Remember the groups of this process: also those that outlive its default group must not be freed in a fork."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    _groups.update(() if c10d is None else c10d._world.pg_map)


def _keep_inherited() -> None:
    gc.freeze()  # reference cycles may hold groups, too
    note_groups()
    _inherited.extend(_groups)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_inherited)


def default_store() -> Any:
    """Return the store that the ranks of the default group connected through."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@contextlib.contextmanager
def not_splitting() -> Iterator[None]:
    """Within: a new group connects separately; NCCL would split it off the default group, in which all ranks join."""
    import torch.distributed as dist

    whole: Any = dist.group.WORLD
    device, whole.bound_device_id = whole.bound_device_id, None
    try:
        yield
    finally:
        whole.bound_device_id = device


def have_equal_names(collectives: Collectives) -> bool:
    """Whether ranks that make a group alone name it alike: torch's name has the number of groups so far. Collective."""
    import torch
    from torch.distributed.distributed_c10d import _world

    number = len(_world.pg_names)  # a rank has those alone that it is in
    most, least = collectives.all_reduce(torch.tensor([number, -number]), "max").tolist()
    return bool(most == -least)


def leave_group(failed: bool = False) -> None:
    """Destroy the default group, if there is one, and unset the variables that were set for it.

    In a forked process, where it is the parent's, that one keeps it.

    Args:
        failed: others may not join what this rank has begun to send. NCCL would wait for that: it is aborted.
    """
    import torch.distributed as dist

    unset_variables()
    if dist.is_initialized():
        # A DDP reducer that outlives its group aborts the interpreter at exit (std::terminate, seen with torch 2.13 and
        # gloo, in plain PyTorch too): wrapped models in reference cycles have to be freed first.
        gc.collect()
        forget_meshes()
        note_groups()
        if failed and "nccl" in backends_of(None).values():
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def forget_meshes() -> None:
    """Have torch forget what it keeps about device meshes, whose process groups are about to be destroyed.

    It remembers the results of operations on DTensors by the ranks and names of their mesh: a later run with an equal
    mesh would get tensors on the groups of this one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import DTensor

    propagator: Any = DTensor._op_dispatcher.sharding_propagator  # torch keeps it private
    propagator.propagate_op_sharding.cache_clear()
    # Older versions lack the one or the other.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", bool)()
    getattr(sys.modules["torch.distributed.tensor._redistribute"], "clear_redistribute_planner_cache", bool)()
    for module in filter(None, map(sys.modules.get, _tensor_modules())):
        for cache in _caches_of(module):
            cache.cache_clear()


@functools.cache
def _tensor_modules() -> tuple[str, ...]:
    """Return the names of the modules of torch.distributed.tensor, imported or not.

    To look for them in `sys.modules` would touch the thousands of modules there, whose memory a forked process shares
    with its parent until it touches it.
    """
    (folder,) = map(Path, sys.modules["torch.distributed.tensor"].__path__)
    files = [file.relative_to(folder.parents[2]).with_suffix("") for file in folder.rglob("*.py")]
    return tuple(".".join(file.parts).removesuffix(".__init__") for file in files)


@functools.cache
def _caches_of(module: Any) -> list[Any]:
    """Return the caches of functions of `module`, and of methods of its classes."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    values = [getattr(owner, name, None) for owner in owners for name in list(vars(owner))]
    return [each for each in values if isinstance(each, functools._lru_cache_wrapper)]


def not_joined(world: World, error: Exception) -> LaunchError:
    """Return the error for a rank whose process group could not be made."""
    text = str(error)
    last = text.partition("Last error:")[2].strip().splitlines()
    if "NCCL" not in text:
        do = "check that all ranks were started and can reach that address"
    elif "duplicate gpu" in text.lower():
        do = "give each rank a GPU of its own (devices, CUDA_VISIBLE_DEVICES)"
    else:
        do = "set NCCL_DEBUG=INFO to see where NCCL stopped; strategy option nccl.socket_ifname chooses an interface"
    return LaunchError(
        f"rank {world.rank} of {world.world_size} could not join the process group at "
        f"{world.main_address}:{world.main_port} ({last[0] if last else text})",
        do=do,
    )


def trace_calls() -> None:
    """Make torch keep the last calls, and dump them when one times out over NCCL, unless the user has set this."""
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name; every process warns if it is set
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def check_adoptable(device: torch.device, backend: str, size: int) -> None:
    """Refuse the existing process group if it has another size, or another backend for `device`."""
    import torch.distributed as dist

    found, wanted = backends_of(None), backends_in(with_gloo(backend, device))
    if dist.get_world_size() != size or found.get(device.type) != wanted.get(device.type):
        raise ConfigError(
            f"this process already belongs to a {dist.get_backend()} process group of {dist.get_world_size()}",
            expected=f"a {backend} group of {size} or none",
            do="close the earlier run (trainer.close()) or give both the same devices and strategy",
        )


# --- Backends: see [Note: two backends] in `process_group` -------------------------------------------------------


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
