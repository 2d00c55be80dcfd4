"""What rules have in common: which dimension operands are cut along, and the parts that go together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem_parallel.tensor.moves import Line, part_of, used_by_parts
from stratagem_parallel.tensor.slices import SLICES, AnySlice, part_of_slice

Arguments = tuple[Any, ...]
Options = dict[str, Any]


class NoRule(Exception):
    """Parts are not enough: the whole is needed."""


def layout_of(made: AnySlice) -> tuple[int, int, Line]:
    return made.cut, made.shape[made.cut], made.line


def common(slices: list[AnySlice]) -> tuple[int, int, Line]:
    """Return the dimension that all `slices` are cut along, counted from the last as 1, its size, and the ranks."""
    first = slices[0]
    from_right, size = first.dim() - first.cut, first.shape[first.cut]
    for each in slices[1:]:
        if (each.dim() - each.cut, each.shape[each.cut]) != (from_right, size):
            raise NoRule
    return from_right, size, first.line


def matching(value: Any, from_right: int, size: int, line: Line) -> Any:
    """Return the part of `value` that goes with parts; what is broadcast along the cut dimension as it is."""
    if isinstance(value, SLICES):
        return part_of_slice(value)
    if not isinstance(value, Tensor):
        return value
    if value.dim() >= from_right and value.shape[-from_right] == size and size > 1:
        return part_of(value, value.dim() - from_right, line)
    return used_by_parts(value, line)
