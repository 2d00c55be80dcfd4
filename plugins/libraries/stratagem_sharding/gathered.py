"""What users attach to a parameter holds for its shard, and for the whole that FSDP computes with.

[Note: writes into gathered parameters]
While a unit computes, its parameters are whole copies that FSDP drops afterwards: what `training_step` writes into them
(``clamp_``, a target network) would be lost silently. A write in place raises the copy's version, which is
compared at the end of a step. A write through ``.data`` leaves the version as it was: `_Gathered` notes that ``.data``
was read. Each rank writes its part into the shard, if the copy is still there, as precise, and the same on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.api.parameters import replace_parameter
from stratagem.errors import ConfigError
from stratagem_sharding.param_groups import param_groups
from stratagem_sharding.sharded_use import few
from stratagem_sharding.shards import local, shard_like

if TYPE_CHECKING:
    from stratagem_sharding.unit_order import UnitOrder

#: Attributes of a gathered parameter: its version when it was gathered first, and that its memory was asked for.
_VERSION, _TAKEN = "_stratagem_version", "_stratagem_taken"
#: What ``.data`` is in torch: `_Gathered` has a property of that name.
_DATA: Any = vars(torch._C.TensorBase)["data"]


def follow(group: Any, whole: Mapping[tuple[nn.Module, str], nn.Parameter | None]) -> None:
    """Let the shards of `group` take the place of the parameters that were there before, by module and name.

    A hook on the gradient gets that of this rank's batch, before it is averaged, as under ``ddp``; one that is called
    after the gradient was accumulated gets the shard.
    """
    attributes: dict[Any, dict[str, Any]] = {}
    for each in group.fsdp_params:
        old, shard = whole[each._module_info.module, each._module_info.param_name], each.sharded_param
        assert old is not None, "it was sharded"
        of_torch = set(shard.__dict__)
        replace_parameter(shard, old)
        attributes[each] = {key: value for key, value in shard.__dict__.items() if key not in of_torch}
    group.wait_for_unshard = functools.partial(_gather, group, attributes)


def _gather(group: Any, attributes: dict[Any, dict[str, Any]]) -> None:
    """Wait until `group` is gathered; then give its parameters the hooks of their shards, and once the `attributes`."""
    for each in () if group.is_unsharded else group.fsdp_params:
        if each._module_info.module._parameters.get(each._module_info.param_name) is not each.sharded_param:
            raise ConfigError(
                f"{each._param_fqn.removeprefix('module.')!r} is replaced while its unit is called, as functional_call "
                "does, and the unit gathers its own weights",
                expected="units that are called with their own weights", do="leave that layer out of auto_wrap_policy",
            )  # fmt: skip
    type(group).wait_for_unshard(group)
    for each in group.fsdp_params:
        hooks, gathered = each.sharded_param._backward_hooks, getattr(each, "_unsharded_param", None)
        if gathered is None:  # it never was
            continue
        if hooks:
            gathered._backward_hooks = hooks
        if each in attributes:
            gathered.__dict__.update(attributes.pop(each))
            if type(gathered) is nn.Parameter:
                gathered.__class__ = _Gathered
            gathered.__dict__[_VERSION] = gathered._version


class _Gathered(nn.Parameter):
    """A parameter while its unit computes; see [Note: writes into gathered parameters]."""

    @property
    def data(self) -> Any:
        self.__dict__[_TAKEN] = True
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if _VERSION in self.__dict__:  # not a copy
            raise _lost("a weight")
        _DATA.__set__(self, value)


@torch.no_grad()
def keep_writes(units: Iterable[Any], order: UnitOrder) -> None:
    """Write what a step has written into the gathered parameters of `units` into their shards. Collective, if any.

    Raises:
        ConfigError: a gathered parameter has been dropped, or ranks have written other values.
    """
    written: dict[str, float] = {}
    for group in (group for unit in units for group in param_groups(unit._get_fsdp_state())):
        for each in group.fsdp_params:
            whole, shard = getattr(each, "_unsharded_param", None), each.sharded_param
            state: dict[str, Any] = {} if whole is None else whole.__dict__
            taken = state.pop(_TAKEN, False) and group.is_unsharded
            if whole is None or not (taken or whole._version != state.get(_VERSION, whole._version)):
                continue
            name = each._param_fqn.removeprefix("module.")
            there = whole.detach()
            if group.is_unsharded and type(there) is torch.Tensor and there.dtype == shard.dtype:
                shard.to_local().copy_(local(shard_like(there, shard)))
                written[name], state[_VERSION] = float(there.double().sum()), whole._version
            elif not taken or not torch.equal(local(shard_like(there, shard)), shard.to_local().to(there.dtype)):
                raise _lost(repr(name))
    if written and not order.are_equal(written):
        raise ConfigError(
            f"training_step wrote into {few([repr(name) for name in written])}, and not the same on all ranks",
            expected="the same values on all ranks", do="average them over the ranks, or write to a buffer",
        )  # fmt: skip


def _lost(name: str) -> ConfigError:
    return ConfigError(
        f"training_step wrote into {name}, which is gathered for the step and would lose it",
        expected="weights that the optimizer and hooks change",
        do="write in on_train_batch_start or on_train_batch_end, which write into shards",
    )
