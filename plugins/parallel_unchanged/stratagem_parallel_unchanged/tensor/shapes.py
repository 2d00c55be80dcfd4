"""Rules for functions that change shapes: views, dimensions in another order, pieces, concatenation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratagem_parallel_unchanged.tensor.moves import Line, part_of, whole
from stratagem_parallel_unchanged.tensor.operands import Arguments, NoRule, Options, common, layout_of, matching
from stratagem_parallel_unchanged.tensor.slices import Slice, as_slice, name_of, numel_of, plain, shape_of


def _cut_again(value: Tensor, dim: int, line: Line) -> Slice:
    """Return this rank's part of `value`, for which the whole was gathered, along `dim`: others need not compute it."""
    size = value.shape[dim]
    if size % line.size:
        raise NoRule
    made = as_slice(part_of(value, dim, line).contiguous(), dim, size, line)
    made.copied = True
    return made


def _reshaped(made: Slice, shape: list[int]) -> Slice:
    """Return `made` in another `shape`, if each rank's part of that is its part of `made`."""
    cut, size, line = layout_of(made)
    if -1 in shape:
        known = math.prod([each for each in shape if each != -1])
        shape = [numel_of(made) // max(known, 1) if each == -1 else each for each in shape]
    before, reached = math.prod(shape_of(made)[:cut]), 1
    for index, length in enumerate(shape):
        if reached == before and length > 1:
            if length == size and math.prod(shape[index + 1 :]) == math.prod(shape_of(made)[cut + 1 :]):
                own = line.bounds(size)[1]
            elif length % line.size == 0 and size % line.size == 0:
                own = length // line.size
            else:
                return _reshaped_otherwise(made, shape, index)
            return as_slice(plain(made).reshape([*shape[:index], own, *shape[index + 1 :]]), index, length, line)
        reached *= length
    raise NoRule


def _reshaped_otherwise(made: Slice, shape: list[int], first: int) -> Slice:
    """Return `made` in a `shape` that cuts its parts, cut along the next dimension: queries, keys and values in one."""
    last, reached = first, shape[first]
    while reached < made.whole_size and last + 1 < len(shape):
        last += 1
        reached *= shape[last]
    if reached != made.whole_size or last < first + 2:
        raise NoRule
    return _cut_again(whole(made).reshape(shape), first + 1, made.line)


def _sizes(args: Arguments) -> list[int]:
    return list(args[0]) if len(args) == 1 and not isinstance(args[0], int) else list(args)


def _view(_func: Any, args: Arguments, options: Options) -> Any:
    shape = options.get("shape", options.get("size"))
    shape = args[1:] if shape is None else (shape,)
    if shape and isinstance(shape[0], torch.dtype):
        raise NoRule
    return _reshaped(args[0], [int(each) for each in _sizes(shape)])


def _view_as(_func: Any, args: Arguments, _options: Options) -> Any:
    if len(args) != 2 or not isinstance(args[0], Slice):
        raise NoRule
    return _reshaped(args[0], list(shape_of(args[1])))


def _flatten(_func: Any, args: Arguments, options: Options) -> Any:
    made = args[0]
    given = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | options
    start, end = (given.get("start_dim", 0) % made.dim(), given.get("end_dim", -1) % made.dim())
    shape = list(shape_of(made))
    return _reshaped(made, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(_func: Any, args: Arguments, options: Options) -> Any:
    made, dim, sizes = (
        args[0],
        args[1] if len(args) > 1 else options["dim"],
        args[2] if len(args) > 2 else options["sizes"],
    )
    dim %= made.dim()
    sizes = list(sizes)
    if -1 in sizes:
        known = math.prod([each for each in sizes if each != -1])
        sizes = [shape_of(made)[dim] // known if each == -1 else each for each in sizes]
    return _reshaped(made, [*shape_of(made)[:dim], *sizes, *shape_of(made)[dim + 1 :]])


def permuted(made: Slice, order: list[int]) -> Slice:
    order = [each % made.dim() for each in order]
    _, size, line = layout_of(made)
    return as_slice(plain(made).permute(order), order.index(made.cut), size, line)


def _permuted(_func: Any, args: Arguments, options: Options) -> Any:
    return permuted(args[0], _sizes(args[1:] or (options["dims"],)))


def _transpose(_func: Any, args: Arguments, options: Options) -> Any:
    made = args[0]
    given = dict(zip(("dim0", "dim1"), args[1:], strict=False)) | options
    if set(given) != {"dim0", "dim1"}:
        raise NoRule
    order = list(range(made.dim()))
    first, second = given["dim0"], given["dim1"]
    order[first], order[second] = order[second], order[first]
    return permuted(made, order)


def _unsqueeze(_func: Any, args: Arguments, options: Options) -> Any:
    made, dim = args[0], args[1] if len(args) > 1 else options["dim"]
    dim %= made.dim() + 1
    cut, size, line = layout_of(made)
    return as_slice(plain(made).unsqueeze(dim), cut + (dim <= cut), size, line)


def _squeeze(_func: Any, args: Arguments, options: Options) -> Any:
    made, dim = args[0], args[1] if len(args) > 1 else options.get("dim")
    if not isinstance(dim, int):
        raise NoRule
    dim %= made.dim()
    cut, size, line = layout_of(made)
    if dim == cut:
        raise NoRule
    out = plain(made).squeeze(dim)
    return as_slice(out, cut - (dim < cut and out.dim() < made.dim()), size, line)


def _expand(_func: Any, args: Arguments, options: Options) -> Any:
    made, sizes = args[0], _sizes(args[1:] or (options["size"],))
    cut, size, line = layout_of(made)
    at = len(sizes) - (made.dim() - cut)
    if sizes[at] not in (-1, size):
        raise NoRule
    own = [*sizes[:at], -1, *sizes[at + 1 :]]
    return as_slice(plain(made).expand(own), at, size, line)


def _indexed(made: Any, index: Any) -> tuple[tuple[Any, ...], int]:
    """Return the whole of a simple `index`, and which dimension of the result is the one that is cut."""
    if not isinstance(made, Slice):
        raise NoRule
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) is slice or _is_number(each) for each in index):
        raise NoRule
    taken = sum(each is not None and each is not Ellipsis for each in index)
    filled: list[Any] = []
    for each in index if Ellipsis in index else (*index, Ellipsis):
        filled += [slice(None)] * (made.dim() - taken) if each is Ellipsis else [each]
    dim, new_dim, at = 0, 0, -1
    for each in filled:
        if each is not None and dim == made.cut:
            if each != slice(None):
                raise NoRule
            at = new_dim
        dim += each is not None
        new_dim += not _is_number(each)
    return tuple(filled), at


def _is_number(each: Any) -> bool:
    return type(each) is int or (
        isinstance(each, Tensor) and not each.dim() and each.dtype in (torch.int64, torch.int32)
    )


def _getitem(_func: Any, args: Arguments, _options: Options) -> Any:
    index, at = _indexed(*args)
    _, size, line = layout_of(args[0])
    return as_slice(plain(args[0])[index], at, size, line)


def _setitem(_func: Any, args: Arguments, _options: Options) -> None:
    made, given, value = args
    index, at = _indexed(made, given)
    part = plain(made)
    part[index] = matching(value, part[index].dim() - at, made.whole_size, made.line)


def _pieces(func: Any, args: Arguments, options: Options) -> Any:
    """split, chunk."""
    made = args[0]
    dim = (args[2] if len(args) > 2 else options.get("dim", 0)) % made.dim()
    cut, size, line = layout_of(made)
    if dim == cut:
        return tuple(_cut_again(each, dim, line) for each in func(whole(made), *args[1:], **options))
    return tuple(as_slice(each, cut, size, line) for each in func(plain(made), *args[1:], **options))


def _one_of(func: Any, args: Arguments, options: Options) -> Any:
    """unbind, select: along a dimension that is not cut and disappears."""
    made = args[0]
    dim = (args[1] if len(args) > 1 else options.get("dim", 0)) % made.dim()
    cut, size, line = layout_of(made)
    if dim == cut:
        raise NoRule
    out = func(plain(made), *args[1:], **options)
    if isinstance(out, Tensor):
        return as_slice(out, cut - (dim < cut), size, line)
    return tuple(as_slice(each, cut - (dim < cut), size, line) for each in out)


def _narrow(_func: Any, args: Arguments, _options: Options) -> Any:
    if len(args) != 4 or args[1] % args[0].dim() == args[0].cut:
        raise NoRule
    return as_slice(plain(args[0]).narrow(*args[1:]), *layout_of(args[0]))


def _joined(func: Any, args: Arguments, options: Options) -> Any:
    """cat, stack: along a dimension that is not cut."""
    tensors, dim = list(args[0]), args[1] if len(args) > 1 else options.get("dim", 0)
    if not isinstance(dim, int) or len({each.dim() for each in tensors}) > 1:
        raise NoRule
    from_right, size, line = common([each for each in tensors if isinstance(each, Slice)])
    ndim = tensors[0].dim()
    cut, is_stack = ndim - from_right, name_of(func) == "stack"
    dim %= ndim + is_stack
    if (dim == cut and not is_stack) or any(shape_of(each)[cut] != size for each in tensors):
        raise NoRule
    parts = [matching(each, from_right, size, line) for each in tensors]
    return as_slice(func(parts, dim), cut + (is_stack and dim <= cut), size, line)


def _repeat_interleave(_func: Any, args: Arguments, options: Options) -> Any:
    given = dict(zip(("input", "repeats", "dim"), args, strict=False)) | options
    made, repeats, dim = given["input"], given["repeats"], given.get("dim")
    if not (isinstance(made, Slice) and isinstance(repeats, int) and isinstance(dim, int)):
        raise NoRule
    cut, size, line = layout_of(made)
    if dim % made.dim() == cut:
        if size % line.size:
            raise NoRule
        size *= repeats
    return as_slice(plain(made).repeat_interleave(repeats, dim), cut, size, line)


RULES: dict[str, Callable[[Any, Arguments, Options], Any]] = {
    "view": _view,
    "reshape": _view,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "flatten": _flatten,
    "unflatten": _unflatten,
    "permute": _permuted,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "split": _pieces,
    "chunk": _pieces,
    "split_with_sizes": _pieces,
    "unbind": _one_of,
    "select": _one_of,
    "narrow": _narrow,
    "cat": _joined,
    "concat": _joined,
    "stack": _joined,
    "repeat_interleave": _repeat_interleave,
}
