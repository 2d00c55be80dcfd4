"""What users attach to a parameter holds for its shard, and for the whole that FSDP computes with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from stratagem.api.parameters import take_place


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
        take_place(shard, old)
        attributes[each] = {key: value for key, value in shard.__dict__.items() if key not in of_torch}
    group.wait_for_unshard = functools.partial(_gather, group, attributes)


def _gather(group: Any, attributes: dict[Any, dict[str, Any]]) -> None:
    """Wait until `group` is gathered; then give its parameters the hooks of their shards, and once the `attributes`."""
    type(group).wait_for_unshard(group)
    for each in group.fsdp_params:
        hooks, gathered = each.sharded_param._backward_hooks, getattr(each, "_unsharded_param", None)
        if gathered is None:  # it never was
            continue
        if hooks:
            gathered._backward_hooks = hooks
        if each in attributes:
            gathered.__dict__.update(attributes.pop(each))
