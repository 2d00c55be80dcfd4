"""What torch does on a GPU and leaves out for a device that it does not know: autocast, fused attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from stratagem_plan.backend import NAME, planned_device
from stratagem_plan.counter import StepCounter

aten = torch.ops.aten
#: Operators that autocast computes in its dtype on a GPU, and those that it computes in fp32 (torch's documentation of
#: autocast lists both).
_IN_DTYPE = (
    "linear", "mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "matmul", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu",
    "scaled_dot_product_attention", "chain_matmul", "linalg_multi_dot", "_thnn_fused_gru_cell", "gru_cell",
)  # fmt: skip
_IN_FP32 = (
    "layer_norm", "group_norm", "native_layer_norm", "native_group_norm", "rms_norm", "softmax.int", "log_softmax.int",
    "cross_entropy_loss", "nll_loss", "nll_loss2d", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "cosine_embedding_loss", "binary_cross_entropy_with_logits", "exp", "log", "log10", "log2", "log1p",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "sum", "sum.dim_IntList", "prod", "cumsum",
    "cumprod", "norm.Scalar",
    "cdist", "cosine_similarity", "softplus", "erfinv", "expm1", "tan", "acos", "asin", "sinh", "cosh", "renorm",
)  # fmt: skip
_library: Any = None
#: Copies of leaves in autocast's dtype, which torch keeps until its cache is cleared.
copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def register() -> None:
    """Have autocast convert for the planned device, once in a process."""
    global _library
    if _library is not None:
        return
    planned_device()
    _library = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _library[1].fallback(torch.library.fallthrough_kernel)
    _library[0].impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for names, convert in ((_IN_DTYPE, _lowered), (_IN_FP32, _exact)):
        for name in names:
            packet, _, overload = name.partition(".")
            found = getattr(getattr(aten, packet, None), overload or "default", None)
            if found is not None:
                _library[0].impl(name, functools.partial(_converted, found, convert), "AutocastPrivateUse1")
    clear = torch.clear_autocast_cache  # autocast calls it where its context ends

    def clear_both() -> None:
        copies.clear()
        clear()

    torch.clear_autocast_cache = clear_both


def _converted(operator: Any, convert: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    with torch._C._ExcludeDispatchKeyGuard(key):
        args, kwargs = tree_map(lambda each: convert(each) if _is_number(each) else each, (args, kwargs))
        return operator(*args, **kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == NAME


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    dtype = torch.get_autocast_dtype(NAME)
    if tensor.dtype in (dtype, torch.float64):
        return tensor
    is_weight = tensor.is_leaf and tensor.requires_grad and tensor.dtype is torch.float32
    keeps = is_weight and torch.is_autocast_cache_enabled()
    if not keeps:
        return tensor.to(dtype)
    known = copies.get(id(tensor))
    if known is None or known[0] is not tensor:
        known = copies[id(tensor)] = (tensor, tensor.to(dtype))
    return known[1]


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = aten._scaled_dot_product_flash_attention.default
        attended: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return attended
    mask = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
    fused = aten._scaled_dot_product_efficient_attention.default
    masked: torch.Tensor = fused(query, key, value, mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]
    return masked


#: Functions that make tensors from nothing, and from values.
_FACTORIES = {
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace, torch.eye,
    torch.empty_strided, torch.randint, torch.normal,
}  # fmt: skip
_FROM_VALUES = {torch.tensor, torch.as_tensor}


class Building(TorchFunctionMode):
    """Builds modules without memory: what a constructor of a module makes is on the planned device.

    What the script makes outside of modules, such as its data, is real.
    """

    def __init__(self, fake: Any, counter: StepCounter) -> None:
        super().__init__()
        self.fake, self.counter = fake, counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):  # of a dispatch mode: subclasses of tensors have had their turn
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        is_here = str(kwargs.get("device")).startswith(NAME)
        if func in _FROM_VALUES and (is_here or (func is torch.tensor and _in_constructor())):
            values = func(*args, **kwargs | {"device": "cpu"})
            with self.fake:  # torch would move the values, which a fake tensor cannot take
                return torch.empty_like(values, device=planned_device())
        if func in _FACTORIES and _in_constructor():
            with self.fake:
                made = func(*args, **kwargs | {"device": planned_device()})
            if func is torch.linspace and made.numel() > 1:  # such as rates of dropout by layer
                made.constant = func(*args, **kwargs | {"device": "cpu"})  # torch answers `item` of its parts with it
            return made
        if func is torch.chunk and self.counter.phase == "wrap" and args[0].device.type == NAME:
            return chunks(*args, **kwargs)
        return func(*args, **kwargs)


def chunks(tensor: torch.Tensor, count: int, dim: int = 0) -> list[torch.Tensor]:
    """Return parts as `torch.chunk` makes them, with one tensor for all parts of one shape: they have no values.

    A strategy makes a part for each of thousands of ranks, and takes one. Parts beyond the end are empty, which
    strategies append.
    """
    length = tensor.shape[dim]
    size = max(1, -(-length // count))
    whole, rest = divmod(length, size)
    parts = [tensor.narrow(dim, 0, size)] * whole if whole else []
    parts += [tensor.narrow(dim, whole * size, rest)] if rest else []
    return parts + [tensor.narrow(dim, length, 0)] * (count - len(parts))


def _in_constructor() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if (
            code.co_name == "__init__"
            and code.co_argcount
            and isinstance(frame.f_locals.get(code.co_varnames[0]), nn.Module)
        ):
            return True
        frame = frame.f_back
    return False
