"""The groups in which FSDP2 gathers and reduces a unit's parameters, and averages of them through comm hooks.

torch keeps the groups private.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stratagem_buckets import Bucket


def param_groups(state: Any) -> list[Any]:
    """Return the groups in which a unit with this `state` sends its parameters; torch before 2.13 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def with_gradients(parameters: list[Any]) -> int:
    """Return which of a group's `parameters` have gradients to reduce, a bit for each."""
    reached = 0
    for index, each in enumerate(parameters):
        unsharded = getattr(each, "_unsharded_param", None)
        if each.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None):
            reached |= 1 << index
    return reached


def shards_in(unit: FSDPModule, reduced: torch.Tensor) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    """Return the parameters whose gradients' shards are in `reduced`, and views of these shards.

    Both are empty if some of the unit's parameters have no gradient.
    """
    groups = param_groups(unit._get_fsdp_state())
    trained = [each for group in groups for each in group.fsdp_params if each.sharded_param.requires_grad]
    shapes = [each.padded_sharded_param_size for each in trained]
    sizes = [shape.numel() for shape in shapes]
    if sum(sizes) != reduced.numel():
        return (), ()
    views = [part.view(shape) for part, shape in zip(reduced.split(sizes), shapes, strict=True)]
    return tuple(each.sharded_param for each in trained), tuple(views)


def units_in(root: nn.Module) -> list[Any]:
    """Return the units of `root`, parents before children."""
    return [part for part in root.modules() if isinstance(part, FSDPModule)]


def computed_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that autograd sees: those of units as they are while gathered, and all others."""
    gathered = {
        each.sharded_param: each._unsharded_param
        for unit in units_in(root)
        for group in param_groups(unit._get_fsdp_state())
        for each in group.fsdp_params
        if hasattr(each, "_unsharded_param")
    }
    return [gathered.get(parameter, parameter) for parameter in root.parameters()]


def reshard(root: nn.Module) -> None:
    """Reshard every unit: an evaluation, or a backward within a forward, may have left some unsharded."""
    for unit in units_in(root):
        unit.reshard()


# --- Averages over replicas --------------------------------------------------------------------------------------


def send_through_hooks(units: list[nn.Module], reduce: Callable[[Bucket], Any]) -> None:
    """Have `reduce` average over the replicas what `units` have reduced over their shards."""

    def average(index: int, unit: FSDPModule, reduced: torch.Tensor) -> None:
        parameters, gradients = shards_in(unit, reduced)
        # Each bucket is the last of its kind: FSDP uses the result at once.
        bucket = Bucket(buffer=reduced, index=index, parameters=parameters, gradients=gradients)
        reduced.copy_(reduce(bucket).wait())
        keep_for_this_stream(reduced)

    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule), "it was sharded"
        unit.set_all_reduce_hook(functools.partial(average, index, unit))


def keep_for_this_stream(reduced: torch.Tensor) -> None:
    """Have the allocator keep the memory of `reduced` until what the present stream does with it is done.

    FSDP calls hooks on the stream of its all-reduce, and allocates `reduced` on that of its reduce-scatter. For its own
    all-reduce it holds a reference to the tensor; after a hook the next unit's reduce-scatter might get the memory too
    soon.
    """
    if reduced.device.type != "cpu":
        reduced.record_stream(torch.accelerator.current_stream(reduced.device))
