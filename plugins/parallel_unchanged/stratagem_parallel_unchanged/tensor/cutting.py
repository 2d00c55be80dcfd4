"""Cut the layers of a plan: parameters become DTensors, of which this rank holds its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from stratagem.api.parameters import replace_parameter
from stratagem.errors import ConfigError
from stratagem_parallel.placement import check_no_hooks
from stratagem_parallel.plan import WHOLE
from stratagem_parallel_unchanged.tensor.styles import Foreign, Rowwise, Style, check_embedding, style_class

if TYPE_CHECKING:
    from stratagem_parallel.derived_plan import Plan
    from stratagem_parallel_unchanged.tensor.moves import Line

#: Layers by name with their styles, ready to be cut.
Styled = dict[str, tuple[nn.Module, Style, Any]]


def styled(module: nn.Module, plan: Plan, line: Line, where: str) -> Styled:
    """Return the layers of `plan` with the styles that will compute them.

    Raises:
        ConfigError: a layer that its style cannot cut over these ranks.
    """
    by_sequence = "sequence" in plan.values()
    found: Styled = {}
    for name, wanted in plan.items():
        part = module.get_submodule(name)
        already = [key for key, tensor in part.named_parameters() if isinstance(tensor, DTensor)]
        if already and wanted not in WHOLE:
            raise ConfigError(
                f"{where} names {name}, of which {already[0]} is cut already",
                expected="layers that configure_model leaves whole",
                do="leave the layer out of the plan",
            )
        if isinstance(wanted, ParallelStyle):
            for key, tensor in part.named_parameters():
                check_no_hooks(tensor, f"{name}.{key}", "tensor")
            found[name] = part, Foreign(line, by_sequence), wanted
            continue
        kind = style_class(wanted, part)
        if kind is None:
            raise ConfigError(
                f"{where} gives {name} the style {wanted!r}, and it is a {type(part).__name__}",
                expected="a Linear or an Embedding",
                do="name the layers in it, or pass a ParallelStyle of torch",
            )
        if isinstance(part, nn.Embedding) and kind.cuts:
            check_embedding(part, name, where)
        _check_plain(part, name, wanted, kind, where)
        _check_sizes(part, name, wanted, kind, line, where)
        for key in kind.cuts:
            if (parameter := part._parameters.get(key)) is not None:
                check_no_hooks(parameter, f"{name}.{key}", "tensor")
        found[name] = part, kind(line, by_sequence), None
    _check_tied(module, found, where)
    closed = {name.rpartition(".")[0] for name, (_, style, _) in found.items() if isinstance(style, Rowwise)}
    for name, (_, style, _) in found.items():
        style.has_taker = name.rpartition(".")[0] in closed
    return found


def _check_plain(part: nn.Module, name: str, wanted: str, kind: type[Style], where: str) -> None:
    """Refuse a layer that computes what would be cut from other parameters."""
    for parameter in kind.cuts:
        if parameter not in part._parameters and hasattr(part, parameter):
            raise ConfigError(
                f"{where} gives {name} the style {wanted!r}, and its {parameter} is computed from other parameters",
                expected="a layer without weight_norm, spectral_norm, pruning or another parametrization",
                do="leave the layer out of the plan, or remove its parametrization",
            )


def _check_sizes(part: nn.Module, name: str, wanted: str, kind: type[Style], line: Line, where: str) -> None:
    for parameter, dim in kind.cuts.items():
        tensor = part._parameters.get(parameter)
        if tensor is None or isinstance(tensor, DTensor):
            continue
        size = tensor.shape[dim]
        if size < line.size or (size % line.size and not kind.uneven):
            raise ConfigError(
                f"{where} gives {name} the style {wanted!r}, which cuts {size} "
                f"{'inputs' if dim else 'outputs'} over strategy.parallel.tensor={line.size}",
                expected=f"a multiple of {line.size}",
                do="change the layer's size or strategy.parallel.tensor, or leave the layer out of the plan",
            )


def _check_tied(module: nn.Module, found: Styled, where: str) -> None:
    """Refuse a parameter of several layers that are not cut in the same way."""
    cuts = {id(part): {key: style.cuts.get(key) for key in part._parameters} for part, style, _ in found.values()}
    names = {id(part): name for name, part in module.named_modules()}
    holders = _holders(module)
    for part, style, _ in found.values():
        for key in style.cuts:
            tensor = part._parameters.get(key)
            if tensor is None:
                continue
            for other, other_key in holders[id(tensor)]:
                if cuts.get(id(other), {}).get(other_key) != style.cuts[key]:
                    raise ConfigError(
                        f"{where} cuts {names[id(part)]}.{key}, and {names[id(other)]}.{other_key} is the same "
                        f"parameter, which it {'does not cut' if id(other) not in cuts else 'cuts otherwise'}",
                        expected="one cut of a parameter",
                        do=f"give both layers the style 'vocab', or leave out {names[id(part)]}",
                    )


def _holders(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    found = defaultdict(list)
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                found[id(parameter)].append((part, key))
    return found


def cut(module: nn.Module, layers: Styled, line: Line, fill: Callable[[nn.Module], None]) -> None:
    """Cut `layers` of `module`, one after the other: a rank holds at most one whole layer that had no values."""
    for part, style, foreign in layers.values():
        by_parameter = _holders(module)
        holders = {key: by_parameter[id(part._parameters[key])] for key in style.cuts if key in part._parameters}
        fill(part)
        for key, where in holders.items():
            whole = part._parameters[key]
            if whole is None or isinstance(whole, DTensor):
                continue
            made = _cut_parameter(whole, style.cuts[key], line)
            for holder, its_key in where:
                holder._parameters[its_key] = made
            replace_parameter(made, whole)
        if foreign is not None:
            _cut_by_torch(module, part, foreign, line)
        style.attach(part)


def _cut_by_torch(module: nn.Module, part: nn.Module, style: ParallelStyle, line: Line) -> None:
    """Let torch cut `part` in its own `style`, and tie again what other layers share with it."""
    holders = _holders(module)
    shared = {
        (inner, key): (parameter, holders[id(parameter)])
        for inner in part.modules()
        for key, parameter in inner._parameters.items()
        if parameter is not None
    }
    parallelize_module(part, line.mesh, style)
    for (inner, key), (whole, where) in shared.items():
        made = inner._parameters[key]
        if made is not None and made is not whole and not isinstance(whole, DTensor):
            replace_parameter(made, whole)
        for holder, its_key in where:
            holder._parameters[its_key] = inner._parameters[key]


def _cut_parameter(whole: nn.Parameter, dim: int, line: Line) -> nn.Parameter:
    with torch.no_grad():
        part = line.part(whole.detach(), dim).clone(memory_format=torch.contiguous_format)
        made = DTensor.from_local(
            part, line.mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return nn.Parameter(made, requires_grad=whole.requires_grad)
