"""Run LowLevelZeroPlugin's engine: backward, clipping, steps, and its shards as logical state. Imports Colossal-AI.

[Note: masters]
Each rank steps an fp32 copy of its shard of every parameter, a master, and then all ranks gather the parameters. A
parameter is flattened and padded to a multiple of the number of ranks; the shard of a rank is contiguous.

[Note: after backward]
The engine reduces gradients in hooks while backward runs, where all ranks must use the same parameters in the same
order; with other parameters it would add the gradient of one to that of another. Unless communication shall overlap,
the hooks are switched off, and all gradients are reduced afterwards, with zeros where a rank did not use a parameter.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import LowLevelZeroPlugin
from torch import nn

from stratagem.api.named_state import parameter_names
from stratagem.api.state_fit import check_optimizer_state, check_weights
from stratagem.errors import ConfigError
from stratagem_colossalai.options import PATH
from stratagem_colossalai.weights import Originals, group_names

if TYPE_CHECKING:
    from stratagem.api import RunContext


class ZeroEngine:
    """LowLevelZeroPlugin's model and optimizer."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, arguments: dict[str, Any],
        originals: Originals, run: RunContext,
    ) -> None:  # fmt: skip
        self.user: nn.Module = module.get_submodule("module")
        self.names = parameter_names(self.user)
        self.groups = group_names(optimizer, self.user)
        self.originals = originals
        self._frozen = {name for name, each in self.user.named_parameters() if not each.requires_grad}
        exact = {id(each): each.detach() for each in self.user.parameters()}
        self.model, self.optimizer, *_ = LowLevelZeroPlugin(**arguments).configure(module, optimizer)
        self._overlaps = arguments["overlap_communication"]
        self._is_partitioned = self.optimizer._partition_grads
        self._syncs = True
        self.pending = False
        self._put_masters(exact)  # the engine made them from 16 bits

    def _put_masters(self, exact: dict[int, torch.Tensor]) -> None:
        for number, master in self.optimizer.working_to_master_param.items():
            parameter = self.optimizer.master_to_working_param[id(master)]
            master.copy_(self._shard(exact[number], parameter, master))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.model(*inputs, **options)

    @property
    def mixin(self) -> Any:
        return self.optimizer.mixed_precision_mixin

    # --- The step ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        """Accumulate gradients without reducing them; at stage 2 each batch's are reduced nevertheless."""
        self._syncs = self._is_partitioned
        try:
            yield
        finally:
            self._syncs = True

    def backward(self, loss: torch.Tensor, run: RunContext) -> None:
        """Differentiate `loss` and reduce the gradients, as the engine's own `backward` does."""
        optimizer = self.optimizer
        if self.mixin is not None:
            loss = self.mixin.pre_backward(loss.float())
        optimizer.require_grad_sync = self._syncs and self._overlaps
        try:
            with optimizer._backward_context():
                run.differentiate(loss)
        finally:
            optimizer.require_grad_sync = True
        self.pending = True
        if not self._syncs:
            return
        if not self._overlaps:
            self._agree(run)
        optimizer._sync_grad()
        if self._overlaps:
            get_accelerator().synchronize()
            self._compare(run)
        operation = "reduce_scatter" if self._is_partitioned else "all_reduce"
        run.collectives.traffic.add(operation, self.num_bytes_of_step, run.world_size, sender="gradients")

    @property
    def num_bytes_of_step(self) -> int:
        """Bytes of the parameters that are trained: all ranks gather them after a step."""
        return sum(each.nbytes for group in self.optimizer._working_param_groups.values() for each in group)

    def _agree(self, run: RunContext) -> None:
        """Give a parameter that only other ranks used a gradient of zeros. Collective."""
        if run.world_size == 1:
            return
        trained = [each for group in self.optimizer._working_param_groups.values() for each in group]
        flags = torch.tensor([each.grad is not None for each in trained], dtype=torch.uint8)
        everywhere = run.collectives.all_reduce(flags, "max").bool().tolist()
        for parameter, used in zip(trained, everywhere, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _compare(self, run: RunContext) -> None:
        """Refuse gradients that were reduced while ranks used different parameters. Collective."""
        trained = [each for group in self.optimizer._working_param_groups.values() for each in group]
        reduced = [self.optimizer.get_working_grad_by_param_id(id(each)) is not None for each in trained]
        counts = run.collectives.all_reduce(torch.tensor(reduced, dtype=torch.int32), "sum").tolist()
        for parameter, count in zip(trained, counts, strict=True):
            if count not in (0, run.world_size):
                raise ConfigError(
                    f"{self.names[id(parameter)]!r} got a gradient on {count} of {run.world_size} ranks, and "
                    f"{PATH}.overlap_communication is true",
                    expected="the same parameters on all ranks in each batch",
                    do="drop overlap_communication",
                )

    def clip(self, max_norm: float) -> float:
        """Clip in the next step; return the norm before clipping."""
        optimizer = self.optimizer
        norms = [
            optimizer._compute_grad_norm(dp_pg=store.torch_pg, gradients=store.get_working_grads_by_group_id(group))
            for group in range(optimizer.num_param_groups)
            for store in optimizer.pg_to_grad_store.values()
        ]
        optimizer._clip_grad_norm = max_norm
        return math.sqrt(sum(norm**2 for norm in norms)) / getattr(self.mixin, "loss_scale", 1.0)

    def step(self) -> bool:
        """Step; return False if gradients overflowed."""
        self.optimizer.step()
        self.pending = False
        self.optimizer._clip_grad_norm = 0.0
        overflow = getattr(self.mixin, "found_overflow", None)
        return overflow is None or overflow.item() == 0

    def drop_gradients(self) -> None:
        """Forget gradients that were not stepped."""
        self.pending = False
        self.optimizer.zero_grad()

    def check_thawed(self) -> None:
        """Refuse a parameter that was frozen when the engine was made and is not now: it would not be trained."""
        check_thawed(self.user, self._frozen)

    # --- State ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def model_state(self, module: nn.Module, run: RunContext) -> dict[str, Any]:
        """Return the tensors of `module`, of trained parameters the masters. Collective."""
        masters = self.optimizer.working_to_master_param
        state: dict[str, Any] = {}
        whole: dict[int, torch.Tensor] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) in masters and id(value) not in whole:
                whole[id(value)] = self._whole(masters[id(value)], value, run.needs_values)
            state[name] = self.originals.widened(name, whole.get(id(value), value))
        return state

    def _whole(self, shard: torch.Tensor, parameter: torch.Tensor, wanted: bool) -> torch.Tensor:
        """Return the tensor of which each rank has a `shard`; on ranks that do not use it, on meta. Collective."""
        group = self.optimizer.param_to_pg[parameter]
        flat = torch.empty(shard.numel() * dist.get_world_size(group), dtype=shard.dtype, device=parameter.device)
        dist.all_gather_into_tensor(flat, shard.detach().to(parameter.device).contiguous(), group=group)
        whole = flat[: parameter.numel()].view(parameter.shape)
        return whole.cpu() if wanted else whole.to("meta")

    def _shard(self, whole: torch.Tensor, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of `whole`, with the dtype and the device of `like`."""
        group = self.optimizer.param_to_pg[parameter]
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = nn.functional.pad(whole.detach().reshape(-1), [0, -whole.numel() % size])
        return flat.chunk(size)[rank].to(dtype=like.dtype, device=like.device, copy=True)

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Any], module: nn.Module, strict: bool, run: RunContext) -> None:
        """Put `state` into `module` and into the masters."""
        self.optimizer._force_wait_all_gather()
        own = module.state_dict(keep_vars=True)
        check_weights({name: getattr(value, "shape", None) for name, value in own.items()}, state, strict)
        module.load_state_dict(state, strict=strict)
        masters = self.optimizer.working_to_master_param
        for name in own.keys() & state.keys():
            parameter, value = own[name], state[name]
            if id(parameter) in masters:
                masters[id(parameter)].copy_(self._shard(value, parameter, masters[id(parameter)]))
            elif isinstance(value, torch.Tensor):
                self.originals.remember(name, value)

    @torch.no_grad()
    def optimizer_state(self, run: RunContext) -> dict[str, Any]:
        """Return the optimizer's state by names of parameters, in whole tensors. Collective."""
        inner, state = self.optimizer.optim, {}
        for master in (each for group in inner.param_groups for each in group["params"]):
            parameter = self.optimizer.master_to_working_param[id(master)]
            if entry := inner.state.get(master):
                state[self.names[id(parameter)]] = {
                    key: self._whole(value, parameter, run.needs_values) if _is_sharded(value) else value
                    for key, value in entry.items()
                }
        return {"state": state, "param_groups": named_groups(inner.param_groups, self.groups)}

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load what `optimizer_state` or another strategy returned."""
        check_optimizer_state(state, [name for group in self.groups for name in group], [len(g) for g in self.groups])
        inner = self.optimizer.optim
        for group, saved in zip(inner.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for master in group["params"]:
                parameter = self.optimizer.master_to_working_param[id(master)]
                entry = state["state"].get(self.names[id(parameter)], {})
                inner.state[master] = {
                    key: self._loaded(value, parameter, master, group) for key, value in entry.items()
                }

    def _loaded(self, value: Any, parameter: torch.Tensor, master: torch.Tensor, group: dict[str, Any]) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() == parameter.numel() and _is_sharded(value):
            return self._shard(value, parameter, master)
        on_device = group.get("capturable") or group.get("fused")
        return value.to(master.device) if on_device else value.clone()

    def release(self) -> None:
        """Give the module its dtypes again. Safe to call twice."""
        self.optimizer._force_wait_all_gather()
        for handle in self.optimizer.grad_handles:
            handle.remove()
        self.originals.restore(self.user)


def _is_sharded(value: Any) -> bool:
    """Whether state of an optimizer has a value for each element, rather than one for a parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def named_groups(groups: list[dict[str, Any]], names: list[list[str]]) -> list[dict[str, Any]]:
    """Return the options of parameter `groups` with the `names` of their parameters."""
    return [{**group, "params": each} for group, each in zip(groups, names, strict=True)]


def check_thawed(module: nn.Module, frozen: set[str]) -> None:
    """Refuse a parameter that is in `frozen` and is trained now.

    Raises:
        ConfigError: there is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in frozen:
            raise ConfigError(
                f"{name!r} was frozen when training began and is trained now, which Colossal-AI does not notice",
                expected="the same trainable parameters during the whole fit",
                do="begin with it trainable, or train in two fits",
            )
