"""What rules have in common: which dimension operands are cut along, and the parts that go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stratagem_parallel.tensor.moves import Line, part_of, used_by_parts
from stratagem_parallel.tensor.slices import Slice, plain

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
