"""Which modules become units, each gathered and sharded as a whole, and whether FSDP can shard them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigError
from stratagem_sharding.gathered import follow
from stratagem_sharding.param_groups import param_groups
from stratagem_transforms.wrap_policy import by_callable, children_first, repeated, select

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: On a module that was made a unit by hand.
_MARK = "_stratagem_unit"


def shard_units(
    root: nn.Module | None, user: nn.Module, *, policy: Any, option: str, options: dict[str, Any],
    fill: Callable[[nn.Module], None], run: RunContext, also: Iterable[nn.Module] = (),
    ignored: AbstractSet[nn.Parameter] = frozenset(), keep_root: bool = False,
) -> None:  # fmt: skip
    """Shard the units of `user` and the rest of `root`.

    Args:
        root: the module whose forward runs `user`; None if only parts of it are called.
        policy: chooses units.
        option: that of `policy`, for messages.
        options: of `fully_shard`.
        fill: gives values to a part that was built without any.
        also: further units, such as these parts.
        ignored: parameters that stay as they are.
        keep_root: `root` stays gathered from its forward to its backward, which follows at once.
    """
    if policy is None and run.device.type != "cpu":
        _advise_blocks(user, option)
    chosen = {*units_of(user, policy, option), *also}
    if run.manual:  # a root's own parameters would be sharded again by the first backward within its forward
        chosen.update(user.children())
    exact = options | {"mp_policy": MixedPrecisionPolicy()}
    units = [unit for unit in children_first(user, chosen) if any(True for _ in unit.parameters())]
    normalizing = running_norms(user, units) if options["mp_policy"].param_dtype is not None else []
    units = children_first(user, {*units, *normalizing})
    check_tied(user, units, ignored)
    check_dtypes(user, units, option)
    for unit in units:
        fill(unit)
        precise = unit in normalizing or is_double(unit)
        _shard(unit, user, ignored, exact if precise else options)
    fill(user)
    if root is not None:
        options = exact if is_double(user) else options
        if keep_root:
            options = options | {"reshard_after_forward": False}
        _shard(root, user, ignored, options)


def _advise_blocks(user: nn.Module, option: str) -> None:
    """Warn if GPUs wait for the whole model, whose blocks they could gather one by one beside the computation."""
    if blocks := repeated(user):
        names = ", ".join(sorted({type(block).__name__ for block in blocks}))
        warnings.warn(
            f"{option} is not set: each step begins when the whole model is gathered; 'blocks' would gather its "
            f"{len(blocks)} repeated layers ({names}) one by one, beside the computation of others",
            stacklevel=2,
        )


def _shard(unit: nn.Module, user: nn.Module, ignored: AbstractSet[nn.Parameter], options: dict[str, Any]) -> None:
    """Shard a `unit` of `user`; shards take the place of parameters."""
    whole = {(part, name): parameter for part in unit.modules() for name, parameter in part._parameters.items()}
    fully_shard(unit, **options, ignored_params=unsharded_parameters(user) | ignored)
    for group in param_groups(unit._get_fsdp_state()):  # type: ignore[operator]
        follow(group, whole)


def shared_parameters(root: nn.Module, units: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of `root` that belong to several of `units`, or to one and to the rest."""
    owners: dict[nn.Parameter, set[int]] = {}
    for _, parameter, owner in _by_unit(root, units):
        owners.setdefault(parameter, set()).add(owner)
    return {parameter for parameter, its in owners.items() if len(its) > 1}


def units_of(user: nn.Module, policy: Any, option: str) -> list[nn.Module]:
    """Return the modules that `policy` chooses and those that were wrapped by hand, children before parents.

    Where "blocks" finds no repeated layers, size decides, as in torch's policy: none for a small model. `option` is
    that of the policy, for messages.
    """
    chosen: set[nn.Module] = set()
    if policy == "blocks" and not repeated(user):
        chosen.update(by_callable(user, size_based_auto_wrap_policy) - {user})
    elif policy is not None:
        chosen.update(select(user, policy, option))
        # Attention computes with this layer's parameters and never calls it.
        attentions = [part for part in user.modules() if isinstance(part, nn.MultiheadAttention)]
        chosen.difference_update(part.out_proj for part in attentions)
    chosen.update(part for part in user.modules() if _MARK in part.__dict__ and part is not user)
    return children_first(user, chosen)


def mark_unit(module: nn.Module, **overrides: Any) -> nn.Module:
    """Have `units_of` return `module`, which torch's ``wrap`` was called with."""
    if overrides:
        raise ConfigError(
            f"wrap got {', '.join(f'{name}={value!r}' for name, value in overrides.items())}",
            expected="the module alone", do="set options on the strategy: they hold for all units",
        )  # fmt: skip
    module.__dict__[_MARK] = True
    return module


def check_tied(root: nn.Module, units: list[nn.Module], ignored: AbstractSet[nn.Parameter] = frozenset()) -> None:
    """Refuse a parameter that belongs to two units: sharded with one, it would be another parameter in the other."""
    names = {id(part): name for name, part in root.named_modules()}
    chosen = {id(unit) for unit in units}
    owners: dict[int, tuple[str, int]] = {}
    for name, parameter, owner in _by_unit(root, units):
        first, other = owners.setdefault(id(parameter), (name, owner))
        if other != owner and parameter not in ignored:
            both = " and ".join(repr(names[unit]) if unit in chosen else "the rest" for unit in (other, owner))
            raise ConfigError(
                f"{first!r} and {name!r} are one parameter in two units, {both}",
                expected="tied parameters within one unit",
                do="make a module that holds both a unit, or leave theirs out of auto_wrap_policy",
            )


def _by_unit(root: nn.Module, units: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield each parameter, under all of its names, with the id of the unit that it belongs to, or of `root`."""
    chosen = {id(unit) for unit in units}

    def visit(part: nn.Module, prefix: str, owner: int) -> Iterator[tuple[str, nn.Parameter, int]]:
        owner = id(part) if id(part) in chosen else owner
        for name, parameter in part.named_parameters(prefix, recurse=False):
            yield name, parameter, owner
        for name, child in part.named_children():
            yield from visit(child, f"{prefix}.{name}" if prefix else name, owner)

    yield from visit(root, "", id(root))


def check_dtypes(root: nn.Module, units: list[nn.Module], policy: str) -> None:
    """Refuse trained parameters that FSDP cannot reduce in one message: complex ones, and two dtypes in a unit."""
    names = {id(part): name for name, part in root.named_modules()}
    first: dict[int, tuple[str, torch.dtype]] = {}
    for name, parameter, owner in _by_unit(root, units):
        if not parameter.requires_grad or not is_sharded(parameter):
            continue
        if parameter.is_complex():
            raise ConfigError(
                f"{name!r} is complex and trained, and FSDP sends gradients as real numbers",
                expected="real parameters",
                do='keep torch.view_as_real of it as the parameter, freeze it, or choose strategy="ddp"',
            )
        other, dtype = first.setdefault(owner, (name, parameter.dtype))
        if dtype != parameter.dtype:
            unit = f"in the unit {names[owner]!r}" if names[owner] else "outside of all units"
            raise ConfigError(
                f"{other!r} is {_name_of(dtype)} and {name!r} is {_name_of(parameter.dtype)}, {unit}",
                expected="trained parameters of one dtype in a unit, which FSDP sends in one message",
                do=f"make units of the layers with the other dtype ({policy}), or convert them",
            )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether FSDP can shard `parameter`: it has a dimension and an element. The others are averaged."""
    return parameter.dim() > 0 and parameter.numel() > 0


def unsharded_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of `module` that FSDP leaves whole on every rank."""
    return {parameter for parameter in module.parameters() if not is_sharded(parameter)}


def running_norms(user: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Return the normalization layers that are not in `units`; running statistics are fp32, so weights have to be."""
    norms = [part for part in user.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    return [part for part in norms if part.weight is not None and part not in units]


def is_double(unit: nn.Module) -> bool:
    """Whether a parameter of `unit` that is not sharded yet is in double precision, which autocast does not cast."""
    own = [each for each in unit.parameters() if not isinstance(each, DTensor) and is_sharded(each)]
    return any(each.dtype is torch.float64 for each in own)
