"""What rules have in common: which dimension operands are cut along, the parts that go together, random numbers.

[Note: dropout of parts]
The generators of the ranks of the axis `tensor` have equal states, so that replicated activations get equal dropout.
That of a part is to differ. Its seed is drawn from the default generator: it is the same in a repeated forward
(activation checkpointing), for which the generator's state is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stratagem_parallel_unchanged.tensor.moves import Line, part_of, used_by_parts
from stratagem_parallel_unchanged.tensor.slices import Slice, plain

Arguments = tuple[Any, ...]
Options = dict[str, Any]


class NoRule(Exception):
    """Parts are not enough: the whole is needed."""


def layout_of(made: Slice) -> tuple[int, int, Line]:
    return made.cut, made.whole_size, made.line


def common(slices: list[Slice]) -> tuple[int, int, Line]:
    """Return the dimension that all `slices` are cut along, counted from the last as 1, its size, and the ranks."""
    first = slices[0]
    from_right, size = first.dim() - first.cut, first.whole_size
    for each in slices[1:]:
        if (each.dim() - each.cut, each.whole_size) != (from_right, size):
            raise NoRule
    return from_right, size, first.line


def matching(value: Any, from_right: int, size: int, line: Line) -> Any:
    """Return the part of `value` that goes with parts; what is broadcast along the cut dimension as it is."""
    if isinstance(value, Slice):
        return plain(value)
    if not isinstance(value, Tensor):
        return value
    if is_plain_part(value, from_right, size, line):
        return value
    if value.dim() < from_right or value.shape[-from_right] == 1:
        return used_by_parts(value, line)
    if value.shape[-from_right] != size:
        raise NoRule
    return part_of(value, value.dim() - from_right, line)


def is_plain_part(value: Any, from_right: int, size: int, line: Line) -> bool:
    """Return whether `value` is a plain part, as autograd gives backward functions outside of `functions`."""
    if isinstance(value, Slice) or not isinstance(value, Tensor) or value.dim() < from_right:
        return False
    if not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() == -1:
        return False  # a program's, in forward
    return value.shape[-from_right] not in (1, size) and value.shape[-from_right] == line.bounds(size)[1]


# --- Random numbers ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def of_this_part(line: Line, device: torch.device) -> Iterator[None]:
    """Within: random numbers on `device` are those of this rank's part; see [Note: dropout of parts]."""
    seed = int(torch.randint(2**62, ()))
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        own = (seed + 0x9E3779B97F4A7C15 * (line.rank + 1)) % 2**63
        if devices:
            torch.get_device_module(device).manual_seed(own)
        else:
            torch.default_generator.manual_seed(own)
        yield
