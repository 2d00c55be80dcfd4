"""Have FSDP send weights of linear layers as float8. Imports torchao."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import amax_to_scale
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from stratagem_sharding.param_groups import param_groups, units_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stratagem.api import Collectives


class Float8Param(FSDPParam):
    """A sharded weight that FSDP sends as float8, while the parameter itself stays a plain one.

    FSDP asks the tensor of a shard what to send and what to make of it: torchao's tensor, made of the shard, answers.
    """

    _scale: torch.Tensor | None = None
    #: Versions of the weight when its scale was computed: one that was written to since then needs a new scale.
    _versions = (-1, -1)

    @property
    def layer(self) -> Any:
        """The layer that multiplies by it."""
        return self._module_info.module

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, as long as that of every other rank: the last rows of the last one may be zeros."""
        return self._sharded_param_data.view(self.padded_sharded_param_size)

    @property
    def versions(self) -> tuple[int, int]:
        """How often the sharded parameter, and its memory, were written to: torch counts them apart."""
        return self.sharded_param._version, self._sharded_param_data._version

    def set_scale(self, scale: torch.Tensor) -> None:
        """Use `scale` until the shard changes, rather than one that each gather computes and reduces over the ranks."""
        self._scale, self._versions = scale, self.versions

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        scale = self._scale if self._versions == self.versions else None
        dtype = self.layer.config.cast_config_weight.target_dtype
        tensor: torch.Tensor = WeightWithDynamicFloat8CastTensor(self.shard, self.layer.linear_mm_config, dtype, scale)
        return tensor


def send_as_float8(root: nn.Module) -> list[Float8Param]:
    """Have the units of `root` send weights of layers in fp8 as float8; return these weights.

    One that another layer uses, too, is sent as it is, and so is one that is offloaded to the CPU.
    """
    groups = [group for unit in units_in(root) for group in param_groups(unit._get_fsdp_state())]
    weights = [each for group in groups for each in group.fsdp_params if _is_float8(each)]
    for each in weights:
        if type(each) is not Float8Param:
            each.__class__ = Float8Param
            each._init_extensions()
    return weights


def _is_float8(each: FSDPParam) -> bool:
    info = each._module_info
    is_weight = info.param_name == "weight" and not each.offload_to_cpu
    return is_weight and all(isinstance(layer, Float8Linear) for layer in (info.module, *info.shared_modules))


@torch.no_grad()
def precompute_scales(weights: Sequence[Float8Param], peers: Collectives) -> None:
    """Compute the scales of all `weights` with one all-reduce over `peers`, which have the other shards. Collective."""
    largest = torch.stack(torch._foreach_norm([each.shard for each in weights], math.inf)).float()
    dtype = weights[0].layer.config.cast_config_weight.target_dtype
    scales = amax_to_scale(peers.all_reduce(largest, "max"), dtype)
    for each, scale in zip(weights, scales, strict=True):
        each.set_scale(scale)
