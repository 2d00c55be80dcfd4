"""Describe the mesh for people: which rank holds what, what it sends, and when it waits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen
from torch import nn

from stratagem.api import Mesh
from stratagem.api.traffic import wire_bytes
from stratagem_layout import AxisMessages, Layout, RankLayout
from stratagem_parallel.layout import axis_of
from stratagem_parallel.messages import StepMessages
from stratagem_parallel.placement import cut_axes
from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from stratagem.api import Collectives
    from stratagem_layout import Timeline

#: What is sent along an axis.
_SENT = {
    "pipeline": "activations of micro-batches and their gradients",
    "data": "gradients, averaged over replicas",
    "shard": "parameters, and gradients",
    "expert": "tokens to the experts and back, and gradients of all other layers",
    "context": "what attention needs of other parts of a sequence, and gradients",
    "tensor": "activations of layers that are cut, and their gradients",
}
_OVER_SEVERAL = "gradients, averaged over ranks with other samples or other parts of them"


@frozen
class Held:
    """What a rank holds of a model."""

    #: Names of the modules whose own parameters it holds.
    layers: tuple[str, ...]
    #: By axis: those of which it holds one part.
    cut: Mapping[str, tuple[str, ...]]
    num_bytes: int


def held(user: nn.Module) -> Held:
    """Return what this rank holds of `user`, which was cut."""
    layers: list[str] = []
    cut: dict[str, list[str]] = {}
    num_bytes, seen = 0, set[nn.Parameter]()
    for name, part in user.named_modules():
        own = [parameter for parameter in part.parameters(recurse=False) if not parameter.is_meta]
        if own:
            layers.append(name)
        for axis in {axis_of(size) for parameter in own for size in cut_axes(parameter)}:
            cut.setdefault(axis, []).append(name)
        num_bytes += sum(local(parameter.detach()).nbytes for parameter in own if parameter not in seen)
        seen.update(own)
    return Held(tuple(layers), {axis: tuple(names) for axis, names in cut.items()}, num_bytes)


class Record:
    """What is known about the mesh of a run: what each rank holds, and what this one sent in a step."""

    def __init__(self, mesh: Mesh, ranks: list[int]) -> None:
        self.mesh = mesh
        self.messages = StepMessages(mesh, ranks)
        self._held: list[Held] = []

    def note(self, user: nn.Module, peers: Collectives) -> None:
        """Ask all ranks what they hold of `user`. Collective."""
        self._held = peers.all_gather_object(held(user))

    def layout(self, user: nn.Module | None, timeline: Timeline | None) -> Layout | None:
        """Return the mesh with what ranks hold and sent; None if nothing was trained."""
        if not self._held:
            return None
        counted = [
            AxisMessages(
                axis=name, size=math.prod(self.mesh.size(axis) for axis in name.split(" and ")),
                what=_SENT.get(name, _OVER_SEVERAL), num_bytes=num_bytes, counted=True,
            )
            for name, num_bytes in self.messages.by_axis().items() if name
        ]  # fmt: skip
        if not counted:  # there was one step
            counted = expected_messages(self.mesh, max(has.num_bytes for has in self._held))
        return described(self.mesh, self._held, user, counted, timeline)


def described(
    mesh: Mesh, by_rank: Sequence[Held | None], user: nn.Module | None, messages: Sequence[AxisMessages],
    timeline: Timeline | None,
) -> Layout:  # fmt: skip
    """Return the layout of `mesh`, on whose ranks is what `by_rank` tells."""
    axes = {axis: size for axis, size in mesh.axes.items() if size > 1}
    ranks = []
    for rank, has in enumerate(by_rank):
        place = Mesh(axes=mesh.axes, rank=rank)
        position = {axis: place.position(axis) for axis in axes}
        if has is None:
            ranks.append(RankLayout(rank=rank, position=position))
            continue
        slices = [
            f"{axis}: part {position[axis] + 1} of {axes[axis]} of {', '.join(_short(names, user))}"
            for axis, names in has.cut.items()
        ]
        ranks.append(
            RankLayout(
                rank=rank, position=position, layers=_short(has.layers, user), slices=slices, num_bytes=has.num_bytes
            )
        )
    return Layout(axes=axes, ranks=ranks, messages=messages, timeline=timeline)


def expected_messages(mesh: Mesh, num_bytes: int) -> list[AxisMessages]:
    """Return what follows from the `num_bytes` of parameters of a rank, before anything runs."""
    found = []
    for axis, size in mesh.axes.items():
        if size == 1:
            continue
        sent = None
        if axis == "data":
            sent = wire_bytes("all_reduce", num_bytes, size)
        elif axis == "shard":  # gathered for forward and for backward, and reduced
            sent = 2 * wire_bytes("all_gather", num_bytes, size) + wire_bytes("reduce_scatter", num_bytes * size, size)
        found.append(AxisMessages(axis=axis, size=size, what=_SENT[axis], num_bytes=sent))
    return found


# --- Names of layers ---------------------------------------------------------------------------------------------


def _short(names: Iterable[str], user: nn.Module | None) -> list[str]:
    """Return `names` of modules with the fewest words: a module for all that is in it, and ranges of numbers."""
    wanted = list(names)
    if user is None:
        return short_names(wanted)
    every = [name for name, part in user.named_modules() if any(True for _ in part.parameters(recurse=False))]
    if wanted and set(every) <= set(wanted):
        return ["all layers"]
    return short_names(_covered("", user, set(wanted), every), every)


def _covered(prefix: str, part: nn.Module, wanted: set[str], every: Sequence[str]) -> list[str]:
    found = [prefix] if prefix in wanted and prefix else []
    for key, child in part.named_children():
        name = f"{prefix}.{key}" if prefix else key
        within = {each for each in every if each == name or each.startswith(f"{name}.")}
        if within and within <= wanted:
            found.append(name)
        elif within & wanted:
            found += _covered(name, child, wanted, every)
    return found


def short_names(names: Sequence[str], every: Sequence[str] = ()) -> list[str]:
    """Return `names` with those that differ in a number as one: "layers.*.up" if these are all, or a range."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(_pattern(name), []).append(name)
    found: list[str] = []
    for pattern, alike in by_pattern.items():
        existing = [name for name in every if _pattern(name) == pattern]
        if len(alike) > 1 and set(existing) == set(alike):
            found.append(pattern)
            continue
        for run in _runs(alike):
            found += run if len(run) < 3 else [f"{run[0]} to {run[-1]}"]
    return found


def _pattern(name: str) -> str:
    """Return `name` with a star for each of its parts that is a number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _runs(names: Sequence[str]) -> list[list[str]]:
    """Return `names` in groups whose numbers count on."""
    runs: list[list[str]] = []
    for name in names:
        numbers = _numbers(name)
        before = _numbers(runs[-1][-1]) if runs else []
        steps = [now - then for now, then in zip(numbers, before, strict=False)]
        if runs and sum(map(abs, steps)) == 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
