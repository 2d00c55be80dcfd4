"""Logical state from the parts that ranks hold, and parts from logical state.

[Note: tensors of other stages]
A rank of a pipeline holds the tensors of its stage; the others are on the meta device, under their names. Where the
state is to be whole, the ranks of one pipeline exchange it tensor by tensor: at no time does a rank hold more than one
tensor that it does not keep. Where the format takes shards, each rank returns its own, and tensors without values for
the others; names, shapes and dtypes are then the same on all ranks.

[Note: slices by rows]
Formats that take shards write them where they lie in the whole tensor. A slice of columns lies there in as many places
as it has rows, each written and verified alone. So the ranks exchange such slices for rows before they are saved: one
tensor at a time on the device, and the rows on the CPU until they are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from stratagem.api.named_state import logical_optimizer_state
from stratagem.checkpoint.tensor_memory import as_gathered
from stratagem.errors import CheckpointError
from stratagem_sharding.shards import gathered, local
from stratagem_sharding.shards import whole as whole_of

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

#: Tensors up to this many elements that are not sharded travel with their names: counts of steps.
_SMALL = 16


def model_state(module: nn.Module, run: RunContext, stages: Collectives) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model. Collective.

    Args:
        stages: the ranks of this rank's pipeline.
    """
    return _completed(module.state_dict(), run, stages)


def optimizer_state(
    optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext, stages: Collectives
) -> dict[str, Any]:
    """Return the state of `optimizer` for the parameters of the whole model, by name. Collective."""
    state = logical_optimizer_state(optimizer, module)
    flat = {
        (name, key): value
        for name, entry in state["state"].items()
        if not any(_is_absent(each) for each in entry.values())
        for key, value in entry.items()
    }
    completed = _completed(flat, run, stages)
    entries: dict[str, dict[str, Any]] = {}
    for (name, key), value in completed.items():
        entries.setdefault(name, {})[key] = value
    order = [name for group in state["param_groups"] for name in group["params"]]
    return state | {"state": {name: entries[name] for name in order if name in entries}}


# --- What the stages of a pipeline hold --------------------------------------------------------------------------


@frozen
class _Spec:
    """A tensor that a stage holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _is_absent(value: Any) -> bool:
    """Whether `value` is a tensor of another stage."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _spec(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    is_small = not isinstance(value, DTensor) and value.numel() <= _SMALL
    return value.detach().cpu() if is_small else _Spec(tuple(value.shape), value.dtype)


def _completed(mine: Mapping[Any, Any], run: RunContext, stages: Collectives) -> dict[Any, Any]:
    """Return the union of what the `stages` hold, in the order of the first that has a name. Collective.

    See [Note: tensors of other stages].
    """
    if stages.world_size == 1:
        return {name: gathered(value, run) if run.whole_state else _by_rows(value) for name, value in mine.items()}
    held = {name: _spec(value) for name, value in mine.items() if not _is_absent(value)}
    every = stages.all_gather_object((list(mine), held, run.needs_values))
    names = list(dict.fromkeys(name for known, _, _ in every for name in known))
    wanted = any(needs for _, _, needs in every)
    completed: dict[Any, Any] = {}
    for name in names:
        specs = {stage: each[name] for stage, (_, each, _) in enumerate(every) if name in each}
        if not specs:
            raise CheckpointError(
                f"{name!r} has values on no rank of the pipeline", expected="a stage that holds it",
                do="tell the strategy's author",
            )  # fmt: skip
        holder, spec = next(iter(specs.items()))
        if not isinstance(spec, _Spec):
            completed[name] = mine[name] if name in held else spec
        elif not run.whole_state:
            completed[name] = _by_rows(mine[name]) if name in held else _without_values(spec)
        elif len(specs) == stages.world_size:
            completed[name] = gathered(mine[name], run)
        else:
            completed[name] = _from(holder, mine.get(name), spec, wanted, run, stages)
    return completed


def _from(holder: int, value: Any, spec: _Spec, wanted: bool, run: RunContext, stages: Collectives) -> torch.Tensor:
    """Return the whole tensor of which the stage `holder` has the `value`, without values where it is not needed.

    Collective. All ranks of that stage gather it, whether or not a rank of their pipeline has it `wanted`.
    """
    whole = None
    if stages.rank == holder:
        part: Any = value.detach()
        whole = whole_of(part) if isinstance(part, DTensor) else part
    if wanted:
        if whole is None:
            whole = torch.empty(spec.shape, dtype=spec.dtype, device=run.device)
        whole = stages.unchecked.broadcast(whole, holder)
    if whole is None or not run.needs_values:
        return _without_values(spec)
    return as_gathered(whole.cpu(), local(value) if stages.rank == holder else None)


def _by_rows(value: Any) -> Any:
    """Return a DTensor that is not cut by rows alone so cut, on the CPU; anything else as it is. Collective.

    See [Note: slices by rows].
    """
    if not isinstance(value, DTensor) or _is_by_rows(value):
        return value
    rows = [placement if placement.is_replicate() else Shard(0) for placement in value.placements]
    part: Any = value.detach()
    if value.device_mesh.device_type == "cpu" or any(isinstance(each, _StridedShard) for each in value.placements):
        # gloo has no all-to-all for torch to use, which would warn and gather; and see `whole` for FSDP's cuts.
        undone = [Replicate() if isinstance(each, _StridedShard) else each for each in value.placements]
        part = part.redistribute(placements=undone).redistribute(placements=[Replicate()] * len(rows))
    part = part.redistribute(placements=rows)
    spec = DTensorSpec(part.device_mesh, part.placements, TensorMeta(part.shape, part.stride(), part.dtype))
    return DTensor(part.to_local().to("cpu", copy=True), spec, requires_grad=False)


def _is_by_rows(value: DTensor) -> bool:
    """Whether torch knows which consecutive rows of the whole tensor each part is."""
    cuts = [
        (size, placement.dim, isinstance(placement, _StridedShard))
        for size, placement in zip(value.device_mesh.shape, value.placements, strict=True)
        if isinstance(placement, Shard | _StridedShard)
    ]
    strided = any(is_strided for _, _, is_strided in cuts)
    divides = value.dim() > 0 and value.shape[0] % math.prod(size for size, _, _ in cuts) == 0
    return all(dim == 0 for _, dim, _ in cuts) and (divides or not strided)


def _without_values(spec: _Spec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
