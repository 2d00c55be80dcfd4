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
from stratagem_parallel.derived_plan import EXPERTS, Plan, derived
from stratagem_parallel.expert.axis import STYLE as EXPERT

#: Styles that cut the layer's parameters, and those that keep them replicated.
CUTTING = ("colwise", "rowwise", "vocab", "colwise_gather_output", EXPERTS)
WHOLE = ("sequence", "replicate")
NAMES = (*CUTTING, *WHOLE)


def plan_of(module: nn.Module, option: Any, size: int, *, with_experts: bool = True) -> tuple[Plan, str]:
    """Return the plan for `module` over `size` ranks by names of layers, and what gave it.

    Args:
        option: ``strategy.parallel.plan``.
        with_experts: whether experts are to be cut, too: no other axis divides them.

    Raises:
        ConfigError: a plan with a mistake, or no layers that can be cut.
    """
    if option not in (None, "auto"):
        return matched(option, module, "strategy.parallel.plan"), "strategy.parallel.plan"
    own = getattr(module, "parallel_plan", None)
    if callable(own):
        where = f"{type(module).__name__}.parallel_plan()"
        return matched(own(), module, where), where
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return {}, f"{type(module).__name__}.configure_model"
    return derived(module, size, with_experts=with_experts), "strategy.parallel.plan 'auto'"


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
        raise ConfigError(
            f"{where} is {shown(style)}",
            expected=f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, or a ParallelStyle of torch",
            do=nearest(style, NAMES) if isinstance(style, str) else "",
        )
