"""Find what is wrong on a part of a sequence while a step runs: operations that mix or number positions.

[Note: what can be seen]
A tensor whose dimension `context_dim` has the length of a part is taken for a part of a sequence. Operations along that
dimension would compute something else than on the whole sequence, on every rank without an error: numbers of positions
that start at 0 on each rank, shifts by one, a first or last position, means, convolutions, attention by hand. Each is
refused where it is called. A tensor that has this length for another reason is refused, too: therefore the checks can
be switched off.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stratagem.errors import ConfigError
from stratagem_parallel_unchanged.context import mixing

if TYPE_CHECKING:
    from stratagem_parallel.context.part import Part

#: Methods and functions that reduce or reorder along a dimension, their second argument.
_ALONG = {
    "mean", "sum", "max", "min", "amax", "amin", "argmax", "argmin", "prod", "cumsum", "cumprod", "logsumexp",
    "logcumsumexp", "std", "var", "norm", "median", "flip", "roll", "sort", "argsort", "topk", "softmax", "log_softmax",
    "diff", "cummax", "cummin", "any", "all", "count_nonzero", "nanmean", "nansum",
    "normalize", "softmin", "aminmax", "narrow", "select", "index_select",
}  # fmt: skip
#: Where the dimension is, among the positional arguments of those that have it elsewhere.
_PLACE_OF_DIM = {"roll": 2, "topk": 2, "norm": 2, "diff": 2, "normalize": 2}
#: The dimension of those that take one if none is given.
_DEFAULT_DIM = {"normalize": 1, "diff": -1, "sort": -1, "argsort": -1, "topk": -1}
#: Those by which a loss becomes a number; the loss of each position may have the dimensions of the batch alone.
_ADDS = {"sum", "mean", "nansum", "nanmean"}


class PositionChecks(TorchFunctionMode):
    """Raises an error for operations that need whole sequences; see [Note: what can be seen]."""

    def __init__(self, axis: Part) -> None:
        super().__init__()
        self.axis = axis
        #: The first sum over positions of the step, and where.
        self._sum = ""

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Within: check operations, and at the end that attention was seen and what was done with sums."""
        before = self.axis.attention.calls
        with self:
            yield
        if self.axis.attention.calls == before:
            raise ConfigError(
                f"strategy.parallel.context is {self.axis.over.world_size}, and the step did not call "
                "torch.nn.functional.scaled_dot_product_attention",
                expected="attention through this function: each rank has a part of each sequence",
                do="call it; if the model treats each position alone, set strategy.parallel.check_parts to False",
            )
        if self._sum and not self.axis.knows_sums:
            raise ConfigError(
                f"{self._sum}, with strategy.parallel.context {self.axis.over.world_size}",
                expected="a loss whose mean over ranks is that of whole sequences",
                do="pass the sum to stratagem_parallel.context_mean(total, count) for a mean over the positions that "
                "count, or to context_sum(total); if this is not a loss, set strategy.parallel.check_parts to False",
            )

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        is_inside = self.axis.attention.is_inside or not self.axis.is_running
        if not is_inside and not any(loss.is_inside for loss in self.axis.losses):
            self._check(function, args, options)
            self._check_loss(function, args, options)
        return function(*args, **options)

    def _check(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.__getitem__:
            self._check_index(*args)
        elif function is torch.arange:
            self._check_arange(args)
        elif name in _ALONG:
            self._check_along(name, args, options)
        elif name == "multi_head_attention_forward":
            if options.get("need_weights", True):
                self._refuse("computes the weights of nn.MultiheadAttention", "call it with need_weights=False")
        elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            self._refuse(f"runs {name} over positions")
        elif function is self.axis.attention.attend:
            self._refuse(
                "calls scaled_dot_product_attention under a reference that it kept",
                "call torch.nn.functional.scaled_dot_product_attention",
            )
        found = mixing.of_operation(name, args, options, self.axis)
        if found:
            self._refuse(found)

    def _check_loss(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        kept = mixing.kept_loss(function, args, options, self.axis)
        if kept:
            self._refuse(
                f"calls {kept} under a reference that it kept",
                f"call torch.nn.functional.{kept}, which counts the targets of all parts",
            )
        found = "" if self._sum else mixing.sum_over_positions(function, args, options, self.axis)
        if found:
            self._sum = f"{_caller()} {found}"

    # --- Operations ----------------------------------------------------------------------------------------------

    def _check_arange(self, args: tuple[Any, ...]) -> None:
        length = self.axis.length
        numbers_part = args in ((length,), (0, length), (0, length, 1)) and not isinstance(args[0], float)
        if numbers_part and not self.axis.knows_offset and length > 1:
            self._refuse(
                f"calls torch.arange({length}), which are not the positions of this part on other ranks than the first",
                "add stratagem_parallel.context_offset(length), calling it first, or put position ids into the batch",
            )

    def _check_index(self, tensor: Tensor, index: Any) -> None:
        dim, length = self.axis.dim, self.axis.length
        indices = _aligned(index if isinstance(index, tuple) else (index,), tensor.dim())
        if isinstance(tensor, nn.Parameter) or (tensor.is_leaf and not tensor.requires_grad and tensor.dim() > 0):
            is_held = isinstance(tensor, nn.Parameter) or any(tensor is each for each in self.axis.module.buffers())
            for each, size in zip(indices, tensor.shape, strict=False):
                if is_held and isinstance(each, slice) and each.start in (None, 0) and each.stop == length < size:
                    self._refuse(
                        f"takes the first {length} rows of a parameter or buffer of shape {tuple(tensor.shape)}",
                        "index it with torch.arange(length) + stratagem_parallel.context_offset(length)",
                    )
        if not self._is_part(tensor) or dim >= len(indices):
            return
        each = indices[dim]
        if isinstance(each, slice):
            is_whole = each.start in (None, 0) and (each.stop is None or each.stop >= length) and each.step in (None, 1)
            if not is_whole:
                self._refuse(
                    f"takes positions {_shown(each)} of each part, not of each sequence",
                    "shift or cut sequences before they are cut into parts, in collate_fn or on_before_batch_transfer",
                )
        elif isinstance(each, int) or (isinstance(each, Tensor) and each.dtype in (torch.int32, torch.int64)):
            self._refuse(
                f"takes position {each if isinstance(each, int) else 'numbers'} of each part, not of each sequence"
            )

    def _check_along(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        tensor = args[0] if args else options.get("input")
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            return
        place = _PLACE_OF_DIM.get(name, 1)
        given = options.get("dim", options.get("axis", args[place] if len(args) > place else _DEFAULT_DIM.get(name)))
        dims = mixing.dims_of(given, tensor)
        length = self.axis.length
        is_last = tensor.dim() > 2 and tensor.dim() - 1 in dims
        if name == "softmax" and is_last and tensor.shape[-2:] == (length, length):
            self._refuse(
                f"computes softmax of a tensor of shape {tuple(tensor.shape)}: attention within a part",
                'call scaled_dot_product_attention (attn_implementation="sdpa" for a model of Hugging Face)',
            )
        if name in _ADDS:  # those of all positions are a loss: see [Note: sums] in `mixing`
            is_part = tensor.dim() > len(dims) + 1 and self._is_part(tensor)
        else:
            is_part = self._is_part(tensor) if tensor.dim() > 2 else tensor.shape == (self.axis.samples, length)
        if self.axis.dim in dims and is_part and length > 1:
            self._refuse(f"computes {name} over the positions of each part, not of each sequence")

    # --- What is a part ------------------------------------------------------------------------------------------

    def _is_part(self, tensor: Tensor) -> bool:
        dim, length = self.axis.dim, self.axis.length
        is_sequence = isinstance(tensor, Tensor) and tensor.dim() > dim
        return is_sequence and tensor.shape[dim] in (length, length + 1) and length > 1

    def _refuse(self, found: str, do: str = "") -> None:
        raise ConfigError(
            f"{_caller()} {found}, with strategy.parallel.context {self.axis.over.world_size}",
            expected="operations that treat each position alone, and scaled_dot_product_attention",
            do=(do or "compute it on whole sequences, such as in the loader")
            + "; if this is not about positions, set strategy.parallel.check_parts to False",
        )


def _aligned(index: tuple[Any, ...], dims: int) -> list[Any]:
    """Return an index for each dimension, up to one that makes the rest unknown."""
    used = sum(each.dim() if isinstance(each, Tensor) and each.dtype is torch.bool else 1
               for each in index if each is not None and each is not Ellipsis)  # fmt: skip
    found: list[Any] = []
    for each in index:
        if each is Ellipsis:
            found += [slice(None)] * (dims - used)
        elif isinstance(each, Tensor) and each.dtype is torch.bool:
            found += [slice(None)] * each.dim()
        elif each is not None:
            found.append(each)
    return found


def _shown(each: slice) -> str:
    start, stop = ("" if value is None else value for value in (each.start, each.stop))
    return f"[{start}:{stop}]" if each.step in (None, 1) else f"[{start}:{stop}:{each.step}]"


def _caller() -> str:
    """Return the function and line of the call, outside of torch and of this package."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(("torch.", "stratagem_parallel")):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
