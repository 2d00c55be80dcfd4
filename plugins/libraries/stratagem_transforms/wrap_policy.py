"""Select modules of a model: by class, by the name of a class, by a policy of torch, or by a callable."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from stratagem.errors import ConfigError, nearest, shown

_EXPECTED = "'blocks', a set of classes (or their names), a torch policy or a callable"


def check_policy(policy: Any, option: str) -> None:
    """Refuse a policy that cannot select modules of any model; the model need not exist yet."""
    if isinstance(policy, set | frozenset | list | tuple):
        wrong = [each for each in policy if not (isinstance(each, type) or _is_class_name(each))]
        if wrong or not policy:
            raise ConfigError(f"{option} is {shown(policy)}", expected="a set of classes or of their names")
    elif isinstance(policy, type) or _is_class_name(policy) or hasattr(policy, "_run_policy"):
        return
    elif isinstance(policy, nn.Module) or not callable(policy):
        raise ConfigError(f"{option} is {shown(policy)}", expected=_EXPECTED)
    else:
        _check_callable(policy, option)


def _check_callable(policy: Callable[..., bool], option: str) -> None:
    """Refuse a callable that does not take what `_asked` passes."""
    try:
        signature = inspect.signature(policy)
    except ValueError:  # a function of C has none
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError:
        raise ConfigError(
            f"{option} is a callable with the arguments {signature}",
            expected="one with the arguments (module, recurse, nonwrapped_numel)",
            do="use a set of classes, or lambda module, recurse, nonwrapped_numel: ...",
        ) from None


def _is_class_name(value: Any) -> bool:
    return isinstance(value, str) and all(part.isidentifier() for part in value.split("."))


def select(root: nn.Module, policy: Any, option: str) -> list[nn.Module]:
    """Return the modules below `root` that `policy` chooses, children before parents.

    Args:
        policy: "blocks" for what `repeated` returns, a class, a set of classes or of class names, one of torch's FSDP
            policies, or a callable as FSDP1 takes it: ``policy(module=..., recurse=..., nonwrapped_numel=...)``.
        option: the name of the option, for errors.

    Raises:
        ConfigError: it selects no module, or names a class that the model does not have.
    """
    check_policy(policy, option)
    if isinstance(policy, type | str) and policy != "blocks":
        policy = {policy}
    if policy == "blocks":
        chosen = set(repeated(root))
    elif isinstance(policy, set | frozenset | list | tuple):
        chosen = _of_classes(root, policy, option)
    elif hasattr(policy, "_run_policy"):
        chosen = set(policy._run_policy(root, set(), {}))
    else:
        chosen = by_callable(root, policy)
    chosen.discard(root)
    if not chosen:
        raise ConfigError(
            f"{option} chooses no part of {type(root).__name__}",
            expected="at least one", do="drop it, or let it choose smaller parts",
        )  # fmt: skip
    return children_first(root, chosen)


def repeated(module: nn.Module) -> list[nn.Module]:
    """Return the layers of one class, two or more with parameters, of each ModuleList and Sequential in `module`.

    A list of lists has the layers of all of them. The only layer of a ModuleList is one, too: forward may repeat it.
    """
    found: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            layers = [each for each in _layers(part) if any(True for _ in each.parameters()) and any(each.children())]
            kinds = [type(each) for each in layers]
            alone = isinstance(part, nn.ModuleList) and len(part) == 1
            found += [each for each in layers if kinds.count(type(each)) > 1 or alone]
    return outermost(module, found)


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    """Yield what a list holds, and what the lists in it hold, which have no forward."""
    for each in filter(None, part._modules.values()):
        yield from _layers(each) if isinstance(each, nn.ModuleList | nn.ModuleDict) else (each,)


def outermost(module: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Return those of `parts` that are in no other one, without `module`."""
    inside = {id(each) for part in parts for each in part.modules() if each is not part}
    return [part for part in dict.fromkeys(parts) if id(part) not in inside and part is not module]


def children_first(root: nn.Module, chosen: set[nn.Module]) -> list[nn.Module]:
    """Return the modules of `root` that are `chosen`, each after the chosen modules inside it."""
    ordered: list[nn.Module] = []
    _append_after_children(root, chosen, ordered)
    return ordered


def _of_classes(root: nn.Module, wanted: Any, option: str) -> set[nn.Module]:
    parts = list(root.modules())
    present = sorted({type(part).__name__ for part in parts})
    chosen: set[nn.Module] = set()
    for each in wanted:
        found = {part for part in parts if _is_a(part, each)}
        if not found:
            name = each if isinstance(each, str) else each.__name__
            raise ConfigError(
                f"{option} names {name}, and {type(root).__name__} has none",
                expected=f"classes of its parts: {', '.join(present)}", do=nearest(name, present),
            )  # fmt: skip
        chosen |= found
    return chosen


def _is_a(part: nn.Module, wanted: Any) -> bool:
    if isinstance(wanted, type):
        return isinstance(part, wanted)
    return any(cls.__name__ == wanted for cls in type(part).__mro__)


def by_callable(root: nn.Module, policy: Callable[..., bool]) -> set[nn.Module]:
    """Return the parts of `root` that `policy` chooses, `root` itself among them, called as FSDP1 calls it."""
    chosen: set[nn.Module] = set()

    def visit(part: nn.Module) -> int:
        """Return the number of elements of `part` that are in chosen modules."""
        size: int = sum(parameter.numel() for parameter in part.parameters())
        if not policy(module=part, recurse=True, nonwrapped_numel=size):
            return 0
        inside = sum(map(visit, part.children()))
        if policy(module=part, recurse=False, nonwrapped_numel=size - inside):
            chosen.add(part)
            return size
        return inside

    visit(root)
    return chosen


def _append_after_children(part: nn.Module, chosen: set[nn.Module], ordered: list[nn.Module]) -> None:
    for child in part.children():
        _append_after_children(child, chosen, ordered)
    if part in chosen and part not in ordered:
        ordered.append(part)
