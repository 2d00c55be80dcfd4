"""What each rank saved, and which of it this rank continues with: that of a rank with the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from stratagem.api.world import Mesh
from stratagem.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

#: What each rank saved, in order.
Ranks: TypeAlias = Sequence[Mapping[str, Any]]


def check_meshes(ranks: Ranks, numbers: Iterable[int], path: Any) -> None:
    """Check the meshes that those of `numbers` among `ranks` saved.

    Raises:
        CheckpointError: a size is not a number, their product is not the number of ranks, or ranks have others.
    """
    for number in numbers:
        axes, first = ranks[number].get("mesh", {}), ranks[0].get("mesh", {})
        expected = None
        if not _are_sizes(axes) or (axes and math.prod(axes.values()) != len(ranks)):
            expected = f"sizes whose product is {len(ranks)}"
        elif axes != first:
            expected = f"that of rank 0, {first!r}"
        if expected is not None:
            raise CheckpointError(
                f"{path}: ranks[{number}].mesh is {axes!r}", expected=expected, do="use another checkpoint"
            )


def _are_sizes(axes: Any) -> bool:
    return isinstance(axes, Mapping) and all(type(size) is int and size > 0 for size in axes.values())


def mesh_of(ranks: Ranks) -> Mesh:
    """Return the mesh of the run that saved `ranks`; before meshes were saved, every rank read other samples."""
    return Mesh(axes=dict(ranks[0].get("mesh") or {"data": len(ranks)}))


def with_the_same_samples(ranks: Ranks, mesh: Mesh) -> Mapping[str, Any] | None:
    """Return what the rank that read the samples of this one saved: itself where the layout is the same.

    None if the samples were divided among another number of ranks.
    """
    saved = mesh_of(ranks)
    if _wide(saved) == _wide(mesh):
        return ranks[mesh.rank]
    if saved.num_data_shards != mesh.num_data_shards:
        return None
    numbers = [n for n in range(len(ranks)) if Mesh(axes=saved.axes, rank=n).data_shard == mesh.data_shard]
    joined = _joined([ranks[number] for number in numbers])
    if saved.size("context") != mesh.size("context"):
        joined["metrics"] = {}  # each of these ranks had those of its part of the samples
    return joined


def _wide(mesh: Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.axes.items() if size > 1}


def _joined(ranks: Ranks) -> dict[str, Any]:
    """Return what the first of `ranks`, which shared their samples, saved; with the buffers that the others held."""
    first, feed = ranks[0], ranks[0]["feed"]
    buffers = {name: buffer for rank in reversed(ranks) for name, buffer in rank["buffers"].items()}
    if "window" in feed:
        windows = [rank["feed"].get("window", {}) for rank in reversed(ranks)]
        before = {name: buffer for window in windows for name, buffer in window.get("buffers", {}).items()}
        feed = {**feed, "window": {**feed["window"], "buffers": before}}
    return {**first, "buffers": buffers, "feed": feed}


def restore_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give the buffers of `module` the values that a rank `saved`, where they fit."""
    own = dict(module.named_buffers())
    for name, buffer in saved.items():
        fits = name in own and own[name].shape == getattr(buffer, "shape", None) and own[name].dtype == buffer.dtype
        if fits and not own[name].is_meta:
            own[name].copy_(buffer)
