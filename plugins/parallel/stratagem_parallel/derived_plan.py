"""Derive a plan: pairs of linear layers, of which the second takes what the first ones compute, and vocabularies.

Any plan computes the right values (see [Note: slices] in `unchanged.tensor.slices`); what is proven here is that ranks
need not gather activations: shapes match, and heads divide.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from stratagem.errors import ConfigError

#: Styles by names of layers.
Plan = dict[str, Any]

#: Attributes in which attention layers keep their numbers of heads.
HEADS = (
    "num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "nheads", "num_key_value_heads",
    "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads",
)  # fmt: skip


def derived(module: nn.Module, size: int) -> Plan:
    """Return a plan for `module` over `size` ranks.

    Raises:
        ConfigError: no block of layers that can be cut so was found.
    """
    found: Plan = {}
    left_out: list[str] = []
    for name, part in module.named_modules():
        layers = [(key, child) for key, child in part.named_children() if isinstance(child, nn.Linear)]
        for first, second in _pairs(part, layers):
            problem = _problem(part, [child for _, child in first], size)
            if problem:
                left_out.append(f"{name or type(module).__name__} ({problem})")
                continue
            found |= {_joined(name, key): "colwise" for key, _ in first} | {_joined(name, second[0]): "rowwise"}
    found |= _vocabulary(module, found, size)
    if not any(style == "rowwise" for style in found.values()):
        reason = f": {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"strategy.parallel.plan is 'auto', and {type(module).__name__} has no block of linear layers that can be "
            f"proven to need no gathering over {size} ranks{reason}",
            expected="in a module, linear layers of equal inputs and one that takes their outputs",
            do="set strategy.parallel.plan to names of layers and styles",
        )
    return found


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


Layer = tuple[str, nn.Linear]
#: Names of layers that take what others of equal shape compute, and of keys and values.
_TAKER = re.compile(
    r"(^|_)(o|out|output|down|proj|wo|w2|fc2|dense|lin2|linear2|projection)(_(proj|lin|linear|layer))?$"
)
_KEY_OR_VALUE = re.compile(r"(^|_)(k|v|key|value|keys|values|wk|wv)(_(proj|lin|linear|layer))?$")


def _pairs(part: nn.Module, layers: list[Layer]) -> list[tuple[list[Layer], Layer]]:
    """Return layers of `part` that are cut by outputs, each with the layer that takes these."""
    if isinstance(part, nn.Sequential):
        return _chained(layers)
    found: list[tuple[list[Layer], Layer]] = []
    used: set[str] = set()
    for taker in layers:
        takes, gives = taker[1].in_features, taker[1].out_features
        alike = [each for each in layers if (each[1].in_features, each[1].out_features) == (takes, gives)]
        first = [each for each in layers if (each[1].in_features, each[1].out_features) == (gives, takes)]
        if takes == gives:
            alike = [each for each in layers if _TAKER.search(each[0]) and each in alike]
            first = [each for each in first if each not in alike]
        if len(alike) != 1 or alike[0] != taker or not first or layers.index(first[0]) > layers.index(taker):
            continue
        if used & {taker[0], *(name for name, _ in first)}:
            continue
        others = [each for each in layers if each[1].in_features == gives and each not in first and each != taker]
        first += [each for each in others if _KEY_OR_VALUE.search(each[0])]
        found.append((first, taker))
        used |= {taker[0], *(name for name, _ in first)}
    return found


def _chained(layers: list[Layer]) -> list[tuple[list[Layer], Layer]]:
    """Return neighbours of a Sequential, of which the second takes what the first computes."""
    found, waiting = [], None
    for each in layers:
        if waiting is not None and waiting[1].out_features == each[1].in_features:
            found.append(([waiting], each))
            waiting = None
        else:
            waiting = each
    return found


def _problem(part: nn.Module, first: list[nn.Linear], size: int) -> str:
    """Return why these layers of `part` cannot be cut over `size` ranks without gathering; "" if they can."""
    for layer in first:
        if layer.out_features % size:
            return f"{layer.out_features} outputs"
    if len(first) == 1:
        return ""
    for where in (part, getattr(part, "config", None)):
        for name in HEADS:
            number: Any = getattr(where, name, None)
            if type(number) is int and number % size:
                return f"{name} is {number}"
    return ""


def _vocabulary(module: nn.Module, found: Plan, size: int) -> Plan:
    """Return the embeddings and the heads of one vocabulary: tied, or of equal shapes."""
    tables = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)]
    heads = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear) and name not in found]
    plan: Plan = {}
    for name, table in tables:
        plain = table.max_norm is None and not table.scale_grad_by_freq and not table.sparse
        for head_name, head in heads:
            if plain and head.weight.shape == table.weight.shape and table.num_embeddings >= size:
                plan |= {name: "vocab", head_name: "vocab"}
    return plan
