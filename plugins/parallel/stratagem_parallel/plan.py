"""Plans: which layers are cut, and in which style."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from stratagem.errors import ConfigError, nearest, shown
from stratagem_parallel.derived_plan import Plan, derived
from stratagem_parallel.expert.axis import STYLE as EXPERT

#: Styles that cut the layer's parameters, and those that keep them replicated.
CUTTING = (
    "colwise", "rowwise", "vocab", "colwise_gather_output",
    "packed_colwise", "packed_rowwise", "rowwise_split_input", "embedding_rowwise",  # of Hugging Face's models
)  # fmt: skip
WHOLE = ("sequence", "replicate", "replicated_with_grad_allreduce")
NAMES = (*CUTTING, *WHOLE)


def plan_of(module: nn.Module, option: Any, size: int) -> tuple[Plan, str]:
    """Return the plan for `module` over `size` ranks by names of layers, and what gave it.

    Args:
        option: ``strategy.parallel.plan``.

    Raises:
        ConfigError: a plan with a mistake, or none at all.
    """
    if option is not None and option != "auto":
        return matched(option, module, "strategy.parallel.plan"), "strategy.parallel.plan"
    own = getattr(module, "parallel_plan", None)
    if callable(own):
        where = f"{type(module).__name__}.parallel_plan()"
        return matched(own(), module, where), where
    carried = _carried(module)
    if carried:
        return carried, "the model's own plan"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return {}, f"{type(module).__name__}.configure_model"
    if option == "auto":
        return derived(module, size), "strategy.parallel.plan 'auto'"
    raise ConfigError(
        f"strategy.parallel.tensor is {size}, and nothing states how layers are cut",
        expected=f"strategy.parallel.plan, or a method parallel_plan of {type(module).__name__}",
        do="set strategy.parallel.plan, to names of layers and styles or to 'auto'",
    )


def matched(plan: Any, module: nn.Module, where: str) -> Plan:
    """Return the styles of the layers of `module` that the patterns of `plan` match.

    Raises:
        ConfigError: a pattern that matches nothing, a layer that two patterns match, or an unknown style.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"{where} is {shown(plan)}", expected="names of layers, or patterns of names, and their styles",
            do='set it like {"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
        )  # fmt: skip
    names = {name: part for name, part in module.named_modules() if name}
    found: Plan = {}
    by: dict[str, str] = {}
    for pattern, style in plan.items():
        if style == EXPERT:  # another axis divides these
            continue
        _check_style(style, f"{where}[{pattern!r}]")
        hits = [name for name in names if fnmatchcase(name, str(pattern))]
        if not hits:
            general = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names}
            raise ConfigError(
                f"{where} names {pattern!r}, and {type(module).__name__} has no such layer",
                expected="names of its layers, in which * stands for anything",
                do=nearest(str(pattern), [*names, *general]),
            )
        for name in hits:
            if name in by:
                raise ConfigError(
                    f"{where} names the layer {name!r} twice: by {by[name]!r} and by {pattern!r}",
                    expected="one pattern for each layer",
                )
            by[name], found[name] = str(pattern), style
    if not found:
        raise ConfigError(
            f"{where} has experts only, and strategy.parallel.tensor is above 1", expected="layers that are cut",
            do="name them, or use the processes for another axis",
        )  # fmt: skip
    return found


def _check_style(style: Any, where: str) -> None:
    if isinstance(style, ParallelStyle):
        return
    if not isinstance(style, str) or style not in NAMES:
        hint = nearest(style, NAMES) if isinstance(style, str) else ""
        raise ConfigError(
            f"{where} is {shown(style)}",
            expected=f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, or a ParallelStyle of torch", do=hint,
        )  # fmt: skip


def _carried(module: nn.Module) -> Plan:
    """Return the plans that models of Hugging Face within `module` carry: patterns in which * is one number."""
    found: Plan = {}
    covered = ""
    for prefix, part in module.named_modules():
        if covered and prefix.startswith(covered):
            continue
        plan = _patterns(part)
        if not plan:
            continue
        covered = f"{prefix}." if prefix else ""
        for name, _ in part.named_modules():
            style = _style_for(name, plan)
            if style is not None:
                # The loss is computed from parts, and what else uses logits gathers them.
                found[covered + name] = "vocab" if style == "colwise_gather_output" else style
                _check_style(style, f"the plan of {type(part).__name__} for {covered + name!r}")
        _add_tied(part, covered, found)
        if not covered:
            break
    return found


def _patterns(part: nn.Module) -> dict[str, str]:
    """Return the plan of a model of Hugging Face: merged by recent versions, else those of its base and its head."""
    if not hasattr(type(part), "base_model_prefix"):
        return {}
    own = getattr(part, "_tp_plan", None) or {}
    base = getattr(getattr(part, "config", None), "base_model_tp_plan", None) or {}
    prefix = part.base_model_prefix
    within = f"{prefix}." if prefix and hasattr(part, str(prefix)) else ""
    return {f"{within}{name}": style for name, style in base.items()} | dict(own)


def _style_for(name: str, plan: dict[str, str]) -> str | None:
    general = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    return plan.get(name) or plan.get(general)


def _add_tied(part: nn.Module, prefix: str, found: Plan) -> None:
    """Cut the embedding as the head that has the same weight, which such plans name alone."""
    layers = [part.get_submodule(name[len(prefix) :]) for name in found if name.startswith(prefix)]
    cut = {id(layer.weight) for layer in layers if isinstance(layer, nn.Linear)}
    for name, module in part.named_modules():
        if isinstance(module, nn.Embedding) and prefix + name not in found and id(module.weight) in cut:
            found[prefix + name] = "vocab"
