"""The engine's wrapped model, with a reduction that is right whatever zeroed the gradients. Imports FairScale.

[Note: gradients that are views]
ShardedDataParallel makes gradients views into its buckets, and reduces the buckets. `optimizer.zero_grad()` replaces
the views by None; backward then creates tensors outside of the buckets, and the engine reduces what the last step
left in them. So the engine reduces nothing here while backward runs. After backward, gradients are put into the
buckets again, and then the engine reduces, in the same order on all ranks, whichever parameters their losses reached.
"""

from __future__ import annotations

from typing import Any

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS

#: Attribute of a gradient that is averaged over the ranks already.
AVERAGED = "_stratagem_averaged"


class Replica(ShardedDataParallel):  # type: ignore[misc]  # the engine has no types
    """Reduces gradients in `reduce_gradients` only, and sends nothing in evaluation."""

    _should_accumulate_grads: bool
    _all_params: list[torch.nn.Parameter]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        if len(self._all_params) != len(self._stepped()):
            self.refresh_trainable()
        return super().forward(*inputs, **kwargs)

    def _stepped(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the optimizers; `add_param_group` adds some, which the engine never looks for."""
        groups = [group for optimizer in self._sharded_optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def refresh_trainable(self) -> None:
        if len(self._all_params) != len(self._stepped()):
            self._all_params = self._stepped()
            self._reference_trainable_mask = [parameter.requires_grad for parameter in self._all_params]
        without = [parameter for parameter in self._all_params if parameter.grad is None]
        averaged = [parameter for parameter in self._all_params if getattr(parameter.grad, AVERAGED, False)]
        super().refresh_trainable()
        for parameter in averaged:
            setattr(parameter.grad, AVERAGED, True)
        for parameter in without:  # the engine gives them a gradient of zeros, with which optimizers would step
            parameter.grad = None

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are reduced, in an order that is equal on all ranks."""
        return list(self._trainable_params)

    def owns(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether this rank steps `parameter`."""
        return bool(self._trainable_param_to_rank[parameter] == self._rank)

    @torch.no_grad()
    def count_averaged_once(self) -> None:
        """Let gradients that are averaged already, each on one rank, be the same after they are averaged again."""
        for parameter in self._trainable_params:
            if getattr(parameter.grad, AVERAGED, False):
                parameter.grad.div_(self._world_size_scaling)
                setattr(parameter.grad, AVERAGED, False)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks, and keep those of parameters that this rank owns. Collective."""
        for bucket in self._bucket_list:
            self._put_into(bucket)
        for parameter in self._trainable_params:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        accumulates, self._should_accumulate_grads = self._should_accumulate_grads, False
        try:
            self._grad_to_be_reduced = [True] * len(self._trainable_params)
            for bucket in self._bucket_list:
                bucket.reset_checked_in()
            self.reduce()
        finally:
            self._should_accumulate_grads = accumulates
        for parameter in self._trainable_params:
            if self.owns(parameter):
                setattr(parameter.grad, AVERAGED, True)
            else:
                parameter.grad = None

    def _put_into(self, bucket: Any) -> None:
        """Make the gradients of `bucket` views of its buffer again."""
        start = 0
        for parameter in bucket._params:
            view = bucket.buffer[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            parameter.grad = view


def shard(optimizer: torch.optim.Optimizer, constructor: Any, group: Any, broadcast_fp16: bool) -> Any:
    """Return an OSS that steps a part of the parameters of `optimizer` on each rank, and shares its groups."""
    groups = optimizer.param_groups
    sharded = OSS(groups, optim=constructor, group=group, broadcast_fp16=broadcast_fp16)
    share(sharded, groups)
    return sharded


def share(sharded: Any, groups: list[dict[str, Any]]) -> None:
    """Let `sharded` and the schedulers read the same `groups`; let it show the state of this rank's part."""
    for mine, loaded in zip(groups, sharded.param_groups, strict=True):
        mine.update(loaded)
    sharded.param_groups = groups
    sharded.state = sharded.optim.state
