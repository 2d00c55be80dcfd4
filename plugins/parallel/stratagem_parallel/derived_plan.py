"""Derive a plan: linear layers that are cut together, the last of which takes what others compute, and vocabularies.

Any plan computes the right values (see [Note: slices] in `unchanged.tensor.slices`). So layers are paired by where they
are, by their shapes and by what they are called; where the model does something between that needs the whole, ranks
gather it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from stratagem.errors import ConfigError

#: Styles by names of layers.
Plan = dict[str, Any]

#: The style of a module that has the layers of experts in one tensor each.
EXPERTS = "experts_by_features"

#: Attributes in which attention layers keep their numbers of heads, and those of keys and values alone.
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "nhead", "heads", "nheads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


def derived(module: nn.Module, size: int, *, with_experts: bool = True) -> Plan:
    """Return a plan for `module` over `size` ranks.

    Raises:
        ConfigError: no layers that can be cut so were found.
    """
    names = {part: name for name, part in module.named_modules()}
    held = Counter(each for part in names for each in part._parameters.values() if each is not None)
    whole = {part for part in names if any(held[each] > 1 for each in part._parameters.values() if each is not None)}
    found: dict[nn.Module, str] = {}
    left_out: list[str] = []
    for part in reversed(names):  # inner ones first: the nearest layers belong together
        layers = {names[each]: each for each in _layers(part) if each not in found and each not in whole}
        for first, second in _pairs(part, layers):
            group = {name: layers[name] for name in first}
            problem, parts = _divided(part, group, layers[second], size)
            if problem:
                whole |= {*group.values(), layers[second]}
                left_out.append(f"{names[part] or type(module).__name__} ({problem})")
            else:
                found |= dict.fromkeys(parts.values(), "colwise") | {layers[second]: "rowwise"}
    plan = {name: found[part] for part, name in names.items() if part in found}
    plan |= {name: EXPERTS for part, name in names.items() if with_experts and _has_experts(part, size)}
    plan |= _vocabulary(module, plan, held, size)
    if not plan:
        reason = f": {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"strategy.parallel.plan is 'auto', and {type(module).__name__} has no linear layers that can be cut "
            f"together over {size} ranks{reason}",
            expected="in a module, linear layers of equal inputs and one that takes their outputs",
            do="set strategy.parallel.plan to names of layers and styles",
        )
    return plan


def features(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear `layer`, None for others: its weight may be (in, out)."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight = layer._parameters.get("weight")
    is_transposed = type(layer).__name__ == "Conv1D" and weight is not None and weight.dim() == 2  # of GPT-2
    return (weight.shape[0], weight.shape[1]) if is_transposed and weight is not None else None


def _has_experts(part: nn.Module, size: int) -> bool:
    both = [part._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    return all(each is not None and each.dim() == 3 and not any(n % size for n in each.shape[1:]) for each in both)


Layers = dict[str, nn.Module]


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers within `part`; where it has repeated parts, only its own."""
    has_repeated = any(_is_repeated(each) for each in part.modules() if each is not part)
    adapted = getattr(part, "base_layer", None)  # adapters beside it are small
    for child in part.children() if adapted is None else [adapted]:
        if features(child) is not None:
            if child._parameters.get("weight") is not None:  # a parametrization computes it otherwise
                yield child
        elif not has_repeated and not _is_repeated(part):
            yield from _layers(child)


def _is_repeated(part: nn.Module) -> bool:
    is_list = isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    kinds = [type(child) for child in part.children()] if is_list else []
    return len(kinds) > 1 == len(set(kinds))


#: Names of layers that take what others of equal shape compute, and of keys and values.
_TAKER = re.compile(
    r"((^|[_.])(o|out|output|down|wo|w2|fc2|dense|lin2|linear2|projection)(_(proj|lin|linear|layer))?"
    r"|(^|\.)((c|attn|attention)_)?proj)(\.(0|dense|base_layer))?$"
)
_KEY_OR_VALUE = re.compile(r"(^|[_.])(k|v|key|value|keys|values|wk|wv)(_(proj|lin|linear|layer))?(\.base_layer)?$")


def _pairs(part: nn.Module, layers: Layers) -> list[tuple[list[str], str]]:
    """Return names of layers of `part` that are cut by outputs, each with that of the layer that takes these."""
    own = set(part.children())
    is_list = isinstance(part, nn.Sequential | nn.ModuleList)
    sizes = {name: features(each) or (0, 0) for name, each in layers.items() if not is_list or each in own}
    if is_list:
        return _chained(sizes)
    order = list(layers)
    found: list[tuple[list[str], str]] = []
    used: set[str] = set()
    for taker, (takes, gives) in sizes.items():
        alike = [each for each in order if sizes[each] == (takes, gives)]
        first = [each for each in order if sizes[each] == (gives, takes)]
        if takes == gives:
            alike = [each for each in alike if _TAKER.search(each)]
            first = [each for each in first if each not in alike]
        before = order[: order.index(taker)]
        if not first:  # several in one, such as queries, keys and values, or a gate beside what it opens
            first = [each for each in before if sizes[each][0] == gives and sizes[each][1] > takes][-1:]
        if alike != [taker] or not first or first[0] not in before:
            continue
        others = [each for each in order if sizes[each][0] == gives and each not in first and each != taker]
        first += [each for each in others if _KEY_OR_VALUE.search(each)]
        if not used & {taker, *first}:
            found.append((first, taker))
            used |= {taker, *first}
    return found or _chained(sizes if len(sizes) == 2 else {})


def _chained(sizes: dict[str, tuple[int, int]]) -> list[tuple[list[str], str]]:
    """Return neighbours, of which the second takes what the first computes."""
    found, waiting = [], ""
    for name, (takes, _) in sizes.items():
        if waiting and sizes[waiting][1] == takes:
            found.append(([waiting], name))
            waiting = ""
        else:
            waiting = name
    return found


def _divided(part: nn.Module, first: Layers, second: nn.Module, size: int) -> tuple[str, Layers]:
    """Return why these layers of `part` cannot be cut over `size` ranks without gathering, and those that can be."""
    if len(first) > 1:
        owner, config = vars(part), getattr(part, "config", None)
        numbers = {name: owner.get(name, getattr(config, name, None)) for name in (*HEADS, *KEY_VALUE_HEADS)}
        odd = [name for name, number in numbers.items() if type(number) is int and number % size]
        if any(name in HEADS for name in odd):
            return f"{odd[0]} is {numbers[odd[0]]}", {}
        first = {name: each for name, each in first.items() if not odd or not _KEY_OR_VALUE.search(name)}
    for layer, which, word in [*((each, 1, "outputs") for each in first.values()), (second, 0, "inputs")]:
        if (number := (features(layer) or (0, 0))[which]) % size:
            return f"{number} {word}", {}
    return "", first


#: Names of embeddings that have the shape of a head by chance.
_NO_WORDS = re.compile(r"pos|quer|type")


def _vocabulary(module: nn.Module, found: Plan, held: Counter[nn.Parameter], size: int) -> Plan:
    """Return the embeddings and the heads of one vocabulary: tied, or of equal shapes."""
    tables = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)]
    heads = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear) and name not in found]
    plan: Plan = {}
    for name, table in tables:
        has_words = not _NO_WORDS.search(name)
        plain = has_words and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)
        for head_name, head in heads:
            fits = head.weight.shape == table.weight.shape and table.num_embeddings >= size
            if plain and fits and (head.bias is None or held[head.bias] == 1):
                plan |= {name: "vocab", head_name: "vocab"}
    return plan
