"""Which functions of torch a rank applies to its parts alone; see [Note: slices] in `slices`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stratagem_parallel_unchanged.tensor import shapes
from stratagem_parallel_unchanged.tensor.copies import is_view, marked, unwritable
from stratagem_parallel_unchanged.tensor.functions import hook_of_slices, part_for
from stratagem_parallel_unchanged.tensor.loss import cross_entropy
from stratagem_parallel_unchanged.tensor.moves import (
    all_whole,
    for_parts,
    part_of,
    renumbered,
    summed,
    used_by_parts,
    whole,
    writes,
)
from stratagem_parallel_unchanged.tensor.operands import (
    Arguments,
    NoRule,
    Options,
    common,
    is_plain_part,
    layout_of,
    matching,
    of_this_part,
)
from stratagem_parallel_unchanged.tensor.slices import Slice, as_slice, name_of, numel_of, plain, shape_of

#: What a part answers for the whole, and what is done to the part itself.
_OF_PART = {
    "dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device", "is_signed",
    "is_inference", "has_names", "__hash__", "register_hook", "retain_grad", "register_post_accumulate_grad_hook",
    "requires_grad_",
}  # fmt: skip
_PROPERTIES_OF_PART = {
    "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized",
    "is_leaf", "grad_fn", "names", "itemsize", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_xpu", "retains_grad",
    "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "output_nr",
}  # fmt: skip
_ELEMENTWISE = {
    "add", "sub", "mul", "div", "true_divide", "multiply", "divide", "subtract", "rsub", "neg", "pow", "square", "sqrt",
    "rsqrt", "exp", "log", "log1p", "expm1", "sin", "cos", "tanh", "sigmoid", "relu", "relu6", "gelu", "silu", "mish",
    "elu", "selu", "celu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softsign", "tanhshrink",
    "logsigmoid", "abs", "sign", "clamp", "clip", "clamp_min", "clamp_max", "float", "double", "half", "bfloat16",
    "contiguous", "clone", "detach", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "maximum",
    "minimum", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_and", "logical_or",
    "logical_not", "reciprocal", "erf", "floor", "ceil", "round", "zeros_like", "ones_like", "full_like", "empty_like",
    "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__",
    "__truediv__", "__rtruediv__", "__itruediv__", "__pow__", "__rpow__", "__neg__", "__eq__", "__ne__", "__lt__",
    "__le__", "__gt__", "__ge__", "__and__", "__or__", "__invert__", "__abs__", "nan_to_num", "bool", "int", "long",
    "float_power", "type",
}  # fmt: skip
#: Elementwise with random numbers of this rank's own.
_RANDOM = {
    "dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "bernoulli", "rand_like", "randn_like",
    "native_dropout", "rrelu",
}  # fmt: skip
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "prod", "var", "std", "softmax", "log_softmax", "cumsum", "argmax", "argmin",
    "logsumexp", "normalize", "norm", "vector_norm", "_softmax", "cumprod", "all", "any",
}  # fmt: skip
_NOTHING = contextlib.nullcontext()
#: What torch calls the first argument of its functions.
_FIRST = ("input", "tensors", "tensor", "query")


def apply(name: str, func: Any, args: Arguments, options: Options) -> Any:
    """Return what `func`, of this `name`, returns for whole activations, as a `Slice` where parts are enough."""
    if name == "__get__":
        return _property(func, args[0])
    if name == "__set__":
        return _set_property(func, *args)
    if name in _OF_PART:
        if name == "register_hook" and torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break()  # a slice with a hook would leave a graph as a plain tensor
        if name == "register_hook":
            return args[0].register_hook(hook_of_slices(args[1], args[0]))
        return getattr(args[0], name)(*args[1:], **options)
    is_copy = bool(args) and isinstance(args[0], Slice) and args[0].copied
    if is_copy and writes(name) and not name.startswith("__i"):
        raise unwritable(name)
    try:
        is_overload = isinstance(func, torch._ops.OpOverload)
        out = _overload(func, args, options) if is_overload else _by_rule(name, func, args, options)
    except NoRule:
        return _of_whole(name, func, args, options)
    if is_copy and is_view(func, args):
        for each in out if isinstance(out, tuple) else (out,):
            each.copied = True
    return out


def _overload(func: Any, args: Arguments, options: Options) -> Any:
    """Apply one of ``torch.ops``, whose arguments may differ from those of the function of that name."""
    if func._overloadname.endswith("out") or func._schema.name.split("::")[-1] not in _ELEMENTWISE:
        raise NoRule
    return _elementwise(func, args, options)


def _property(func: Any, made: Slice) -> Any:
    which = getattr(func.__self__, "__name__", "")
    if which == "shape":
        return shape_of(made)
    if which in _PROPERTIES_OF_PART:
        return func(made)
    if which == "grad":
        gradient = made.grad
        return None if gradient is None else as_slice(gradient, *layout_of(made))
    if which == "data":
        return as_slice(plain(made).detach(), *layout_of(made))
    if callable(getattr(Tensor, which)):  # the compiler takes methods that are written in Python for properties
        return functools.partial(_called, which, made)
    if which not in ("T", "mT") or made.dim() < 2:
        out = getattr(whole(made), which)
        return marked(out) if is_view(func, (made,)) else out
    order = list(range(made.dim()))
    return shapes.permuted(made, order[::-1] if which == "T" else [*order[:-2], order[-1], order[-2]])


def _called(name: str, made: Slice, *args: Any, **options: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return apply(name, getattr(Tensor, name), (made, *args), options)


def _set_property(func: Any, made: Any, value: Any) -> None:
    which = getattr(func.__self__, "__name__", "")
    if which not in ("requires_grad", "grad"):
        raise unwritable(which)
    func(made, value)


def _of_whole(name: str, func: Any, args: Arguments, options: Options) -> Any:
    in_place = writes(name) and not name.startswith("__i")  # a program takes what those return
    if (in_place and isinstance(args[0], Slice)) or isinstance(options.get("out"), Slice):
        raise unwritable(name)
    out = func(*all_whole(args), **all_whole(options))
    return marked(out) if args and isinstance(args[0], Slice) and is_view(func, args) else out


def _by_rule(name: str, func: Any, args: Arguments, options: Options) -> Any:
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    rule = _RULES.get(name)
    if rule is not None or name in _REDUCTIONS:
        args, options = _in_order(args, options)
    if rule is not None:
        return rule(func, args, options)
    if name in _ELEMENTWISE or plain in _ELEMENTWISE:
        return _elementwise(func, args, options)
    if plain in _RANDOM:
        return _elementwise(func, args, options, random=True)
    if name in _REDUCTIONS:
        return _reduce(name, func, args, options)
    raise NoRule


def _in_order(args: Arguments, options: Options) -> tuple[Arguments, Options]:
    """Return the arguments of a function as rules expect them: the first one by position, and `dim` by its own name."""
    if not args:
        first = next((name for name in _FIRST if name in options), None)
        if first is None:
            raise NoRule
        args, options = (options[first],), {name: value for name, value in options.items() if name != first}
    if "axis" in options:
        options = {"dim" if name == "axis" else name: value for name, value in options.items()}
    return args, options


# --- Elementwise -------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: Arguments, options: Options, random: bool = False) -> Any:
    slices = [each for each in (*args, *options.values()) if isinstance(each, Slice)]
    if not slices:
        raise NoRule
    from_right, size, line = common(slices)
    name = name_of(func)
    if writes(name) and not isinstance(args[0], Slice):
        raise NoRule
    parts = [matching(each, from_right, size, line) for each in args]
    named = {key: matching(each, from_right, size, line) for key, each in options.items()}
    with of_this_part(line, slices[0].device) if random else _NOTHING:
        out = func(*parts, **named)
    if not isinstance(out, Tensor):  # where(condition) returns indices
        raise NoRule
    if any(is_plain_part(each, from_right, size, line) for each in (*args, *options.values())):
        return out  # a gradient, which autograd goes on with
    return as_slice(out, out.dim() - from_right, size, line)


def _converted(func: Any, args: Arguments, options: Options) -> Any:
    """to, type_as: another tensor tells a dtype and a device, whatever its shape."""
    made, *rest = (plain(each) if isinstance(each, Slice) else each for each in args)
    out = func(made, *rest, **{key: plain(each) if isinstance(each, Slice) else each for key, each in options.items()})
    return as_slice(out, *layout_of(args[0])) if isinstance(args[0], Slice) else out


def _dropout(func: Any, args: Arguments, options: Options) -> Any:
    names = ("input", "p", "training", "inplace")
    given = dict(zip(names, args, strict=False)) | options
    active = given.get("training", True) and given.get("p", 0.5) > 0
    return _elementwise(func, args, options, random=bool(active))


# --- Reductions and products -------------------------------------------------------------------------------------


def _reduce(name: str, func: Any, args: Arguments, options: Options) -> Any:
    made = args[0]
    given = args[1] if len(args) > 1 else options.get("dim")
    if name in ("normalize", "norm", "vector_norm"):
        given = args[2] if len(args) > 2 else options.get("dim", 1 if name == "normalize" else None)
    if not isinstance(made, Slice) or given is None or isinstance(given, bool):
        raise NoRule
    over = given if isinstance(given, (tuple, list)) else (given,)
    if not over or not all(type(each) is int for each in over):
        raise NoRule
    dims = {each % made.dim() for each in over}
    cut, size, line = layout_of(made)
    if cut in dims:
        raise NoRule
    out = func(plain(made), *args[1:], **options)
    if not isinstance(out, Tensor):
        raise NoRule
    is_kept = out.dim() == made.dim()
    return as_slice(out, cut - (0 if is_kept else sum(dim < cut for dim in dims)), size, line)


def _norm_of_last(func: Any, args: Arguments, options: Options) -> Any:
    """layer_norm, rms_norm."""
    made, shape = args[0], args[1] if len(args) > 1 else options["normalized_shape"]
    if not isinstance(made, Slice) or made.cut >= made.dim() - len(shape):
        raise NoRule
    line = made.line
    rest = [used_by_parts(each, line) if isinstance(each, Tensor) else each for each in args[1:]]
    named = {key: used_by_parts(each, line) if isinstance(each, Tensor) else each for key, each in options.items()}
    return as_slice(func(plain(made), *rest, **named), *layout_of(made))


def _linear(func: Any, args: Arguments, options: Options) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | options
    made, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(weight, Slice):
        return _linear_by_parts(func, made, weight, bias)
    if not isinstance(made, Slice) or made.cut == made.dim() - 1 or isinstance(bias, Slice):
        raise NoRule
    line = made.line
    own = None if bias is None else used_by_parts(bias, line)
    return as_slice(func(plain(made), used_by_parts(weight, line), own), *layout_of(made))


def _linear_by_parts(func: Any, value: Tensor, weight: Slice, bias: Tensor | None, outputs: int = 0) -> Tensor:
    """Apply a linear function whose weight is cut, by a layer with a forward of its own; `outputs` is a dimension."""
    cut, size, line = layout_of(weight)
    if cut == outputs:
        own = None if bias is None else matching(bias, 1, size, line)
        return as_slice(func(for_parts(value, line), plain(weight), own), -1, size, line)
    is_cut = isinstance(value, Slice) and value.cut == value.dim() - 1
    part = plain(value) if is_cut else part_of(whole(value), value.dim() - 1, line)
    out = summed(func(part, plain(weight), None), line)
    return out if bias is None else out + whole(bias)


def _grouped(func: Any, args: Arguments, options: Options) -> Any:
    """grouped_mm: of rows with weights of shape (groups, inputs, outputs) that are cut."""
    given = dict(zip(("input", "weight"), args, strict=False)) | options
    value, weight = given.pop("input", None), given.pop("weight", None)
    if not isinstance(weight, Slice) or not weight.cut:
        raise NoRule
    product = lambda part, own, _: func(part, own, *args[2:], **given)  # noqa: E731
    return _linear_by_parts(product, value, weight, None, outputs=2)


def _embedding(func: Any, args: Arguments, options: Options) -> Any:
    given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | options
    ids, weight = whole(given["input"]), given["weight"]
    if not isinstance(weight, Slice):
        raise NoRule
    cut, size, line = layout_of(weight)
    given |= {"input": ids, "weight": plain(weight)}
    if cut == 1:
        return as_slice(func(**given), -1, size, line)
    given["input"], elsewhere, padding = renumbered(ids, given.get("padding_idx"), size, line)
    return summed(func(**given | {"padding_idx": padding}).masked_fill(elsewhere.unsqueeze(-1), 0), line)


def _matmul(func: Any, args: Arguments, options: Options) -> Any:
    if len(args) != 2 or options:
        raise NoRule
    left, right = args
    if isinstance(left, Slice) and isinstance(right, Slice):
        from_right, size, line = common([left, right])
        if from_right < 3:
            raise NoRule
        out = func(plain(left), plain(right))
        return as_slice(out, out.dim() - from_right, size, line)
    if isinstance(left, Slice) and right.dim() == 2 and left.cut < left.dim() - 1:
        cut, size, line = layout_of(left)
        return as_slice(func(plain(left), used_by_parts(right, line)), cut, size, line)
    raise NoRule


def _attention(func: Any, args: Arguments, options: Options) -> Any:
    """scaled_dot_product_attention with heads, or batches, that are cut."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | options
    three = [given[name] for name in names[:3]]
    from_right, _, line = common([each for each in three if isinstance(each, Slice)][:1])
    if from_right < 3 or any(each.dim() < from_right for each in three):
        raise NoRule
    sizes = [shape_of(each)[-from_right] for each in three]
    cuts = [each.dim() - each.cut for each in three if isinstance(each, Slice)]
    is_grouped = len(set(sizes)) > 1
    if set(cuts) != {from_right} or any(size % line.size for size in sizes) or (is_grouped and from_right > 3):
        raise NoRule
    mask = given.get("attn_mask")
    if isinstance(mask, Tensor):
        given["attn_mask"] = matching(mask, from_right, sizes[0], line)
    given |= {name: matching(given[name], from_right, size, line) for name, size in zip(names, sizes, strict=False)}
    with of_this_part(line, three[0].device) if given.get("dropout_p") else _NOTHING:
        out = func(**given)
    return as_slice(out, out.dim() - from_right, sizes[0], line)


def _cross_entropy(_func: Any, args: Arguments, options: Options) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | options
    logits, target = given["input"], given["target"]
    classes = 1 if logits.dim() > 1 else 0
    simple = all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
    fits = isinstance(logits, Slice) and logits.cut == classes and not isinstance(target, Slice)
    if not (simple and fits) or target.is_floating_point() or given.get("label_smoothing"):
        raise NoRule
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    return cross_entropy(plain(logits), target, *layout_of(logits), ignored, reduction)


def _gradients(func: Any, args: Arguments, options: Options) -> Any:
    """torch.autograd.grad: of slices, the gradients are slices."""
    given = dict(zip(("outputs", "inputs", "grad_outputs"), args, strict=False)) | options
    inputs = given["inputs"]
    given = {key: each if key == "inputs" else all_whole(each) for key, each in given.items()}
    every = [inputs] if isinstance(inputs, Tensor) else inputs
    found = func(**given)
    return tuple(
        as_slice(gradient, *layout_of(each)) if isinstance(each, Slice) and gradient is not None else gradient
        for each, gradient in zip(every, found, strict=True)
    )


def _backward(func: Any, args: Arguments, options: Options) -> Any:
    """backward of a tensor, and of torch.autograd: from parts of slices, with parts of gradients."""
    key = "grad_tensors" if "grad_tensors" in options else "gradient"
    given = args[1] if len(args) > 1 else options.get(key)
    several = isinstance(args[0], (tuple, list))
    made = args[0] if several else (args[0],)
    gradients = given if isinstance(given, (tuple, list)) else [given] * len(made)
    own = [part_for(gradient, each) for gradient, each in zip(gradients, made, strict=True)]
    with torch.enable_grad():  # a checkpoint calls this without
        parts = [plain(each) if isinstance(each, Slice) else each for each in made]
    rest = {name: each for name, each in options.items() if name != key}
    return func(parts if several else parts[0], own if several else own[0], *args[2:], **rest)


def _size(_func: Any, args: Arguments, options: Options) -> Any:
    dim = args[1] if len(args) > 1 else options.get("dim")
    return shape_of(args[0]) if dim is None else shape_of(args[0])[dim]


def _described(_func: Any, args: Arguments, _options: Options) -> str:
    made = args[0]
    return f"Slice(shape={tuple(shape_of(made))}, cut={made.cut}, dtype={made.dtype})"


_RULES: dict[str, Callable[[Any, Arguments, Options], Any]] = {
    **shapes.RULES,
    "size": _size,
    "numel": lambda _, args, __: numel_of(args[0]),
    "nelement": lambda _, args, __: numel_of(args[0]),
    "__len__": lambda _, args, __: shape_of(args[0])[0],
    "__repr__": _described,
    "grad": _gradients,
    "backward": _backward,
    "to": _converted,
    "type_as": _converted,
    "dropout": _dropout,
    "dropout_": _dropout,
    "alpha_dropout": _dropout,
    "feature_alpha_dropout": _dropout,
    "layer_norm": _norm_of_last,
    "rms_norm": _norm_of_last,
    "linear": _linear,
    "embedding": _embedding,
    "grouped_mm": _grouped,
    "_grouped_mm": _grouped,
    "matmul": _matmul,
    "bmm": _matmul,
    "__matmul__": _matmul,
    "scaled_dot_product_attention": _attention,
    "cross_entropy": _cross_entropy,
}

Slice.apply = staticmethod(apply)
