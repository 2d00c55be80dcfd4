"""Data parallelism with FairScale's OSS and ShardedDataParallel: gradients and optimizer state are sharded."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Self

import torch
from attrs import define, field
from torch import nn
from torch.utils._pytree import tree_map

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Capabilities,
    hookimpl,
)
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_fairscale.installed import check_installed
from stratagem_process_group import ProcessGroupStrategy, group_options_after

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import RunContext

_PATH = "strategy.fairscale_sharded"


@define(eq=False, kw_only=True, field_transformer=group_options_after("auto_refresh_trainable"))
class FairScaleShardedStrategy(ProcessGroupStrategy):
    """Replicate the model; each rank keeps the averaged gradients and optimizer state of the parameters it steps.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 2.
    """

    #: Elements of the bucket for each rank's small gradients; larger means fewer messages, and more memory. 0 sends
    #: every gradient alone, and frees those that other ranks step.
    reduce_buffer_size: int = field(default=2**23, validator=at_least(0))
    #: Send gradients as fp16: half the bytes, less accurate. Needs ``reduce_buffer_size=0``.
    reduce_fp16: bool = False
    #: Send stepped parameters as fp16: half the bytes, and weights are rounded to fp16 in each step.
    broadcast_fp16: bool = False
    #: Look in each forward for parameters that were frozen or unfrozen. False saves the search.
    auto_refresh_trainable: bool = True

    #: Groups of each optimizer of configure_optimizers, which schedulers change.
    _groups: Any = field(init=False, factory=dict)

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CUSTOM_STEP, FULL_STATE, MANUAL_OPTIMIZATION, MULTI_PROCESS,
            MULTIPLE_OPTIMIZERS, NO_SYNC,
        }
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.reduce_fp16 and self.reduce_buffer_size:
            raise ConfigError(
                f"{_PATH}.reduce_fp16 is true and reduce_buffer_size is {self.reduce_buffer_size}, and FairScale "
                "reduces buckets in their own dtype",
                expected="reduce_buffer_size: 0 with reduce_fp16",
                do="set one of the two",
            )

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def on_connect(self) -> None:
        check_installed("fairscale_sharded", "ddp_sharded")

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        self._groups = {}
        return _Model(module)

    @hookimpl
    def wrap_optimizers(
        self, optimizers: list[torch.optim.Optimizer], module: nn.Module, run: RunContext
    ) -> list[torch.optim.Optimizer]:
        if run.stage != "train" or not optimizers:
            return optimizers
        self._check_dtypes(optimizers)
        from stratagem_fairscale.replica import Replica, shard

        group = run.collectives.group
        made = []
        for optimizer in optimizers:
            sharded = shard(optimizer, _constructor(optimizer), group, self.broadcast_fp16)
            self._groups[id(sharded)] = optimizer.param_groups
            made.append(sharded)
        model: Any = module
        replica = Replica(
            model.module, made, process_group=group, sync_models_at_startup=False,
            reduce_buffer_size=self.reduce_buffer_size, auto_refresh_trainable=self.auto_refresh_trainable,
            reduce_fp16=self.reduce_fp16,
        )  # fmt: skip
        replica.refresh_trainable()
        vars(model)["replica"] = replica
        return made

    def _check_dtypes(self, optimizers: list[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            found = {str(p.dtype) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            if len(found) > 1:
                raise ConfigError(
                    f"the parameters of {type(optimizer).__name__} have the dtypes {', '.join(sorted(found))}",
                    expected="one dtype, since FairScale puts the parameters that a rank steps into one buffer",
                    do='convert them, or choose strategy="ddp_sharded"',
                )
            if self.broadcast_fp16 and found - {"torch.float32"}:
                raise ConfigError(
                    f"{_PATH}.broadcast_fp16 is true and parameters are {found.pop()}",
                    expected="parameters in torch.float32",
                    do="drop broadcast_fp16",
                )

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        replica = getattr(run.model, "replica", None)
        return replica.no_sync() if stage == "train" and not sync and replica is not None else None

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        replica = getattr(module, "replica", None)
        if replica is None:
            run.differentiate(loss)
            return True
        replica.count_averaged_once()
        with replica.no_sync():
            run.differentiate(loss)
        if not (run.manual or run.sync_gradients):
            return True
        trained = replica.trained()
        reached = [parameter.grad is not None for parameter in trained]
        flags = torch.tensor(reached, dtype=torch.uint8)
        everywhere = run.collectives.all_reduce(flags, "max").bool().tolist() if reached else []
        replica.reduce_gradients()
        for parameter, some in zip(trained, everywhere, strict=True):
            if not some:  # as in one process
                parameter.grad = None
        return True

    @hookimpl
    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, max_value: float | None, run: RunContext
    ) -> torch.Tensor | float:
        # Each gradient exists on one rank. FairScale's own function omits gradients that were None at its first call.
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-max_value, max_value)
            return 0.0
        assert max_norm is not None, "one of the two limits is set"
        squares = torch.zeros((), device=run.device, dtype=torch.float64)
        for gradient in gradients:
            squares += gradient.double().square().sum()
        total = run.collectives.all_reduce(squares, "sum").sqrt()
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return total

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def optimizer_state(self, optimizer: Any, module: nn.Module, run: RunContext) -> dict[str, Any]:
        if id(optimizer) not in self._groups:
            return logical_optimizer_state(optimizer, module)
        everywhere = run.collectives.any(run.needs_values and run.rank != 0)
        optimizer.consolidate_state_dict(recipient_rank=-1 if everywhere else 0)
        state: dict[str, Any] | None = None
        if optimizer._all_states:
            state = logical_optimizer_state(optimizer, module)
            optimizer._all_states = []
        outline = None if state is None or run.rank else tree_map(_without_values, state)
        outline = run.collectives.broadcast_object(outline)
        return outline if state is None else state

    @hookimpl
    def load_optimizer_state(self, state: dict[str, Any], optimizer: Any, module: nn.Module, run: RunContext) -> bool:
        physical = physical_optimizer_state(state, optimizer, module)
        if id(optimizer) not in self._groups:
            optimizer.load_state_dict(physical)
            return True
        from stratagem_fairscale.replica import share

        optimizer.optim.state.clear()
        optimizer.load_state_dict({**physical, "state": dict(physical["state"])})
        share(optimizer, self._groups[id(optimizer)])
        return True


class _Model(nn.Module):
    """Calls the engine's replica where there is one: while training, when the optimizers are known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        vars(self)["replica"] = None  # not a submodule: parameters keep their names

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        called = vars(self)["replica"] or self.module
        return called(*inputs, **kwargs)

    def train(self, mode: bool = True) -> Self:
        if vars(self).get("replica") is not None:
            vars(self)["replica"].training = True  # it keeps its buckets while the module evaluates
        return super().train(mode)


def _constructor(optimizer: torch.optim.Optimizer) -> Any:
    """Return a function that makes an optimizer like `optimizer` for other parameters."""
    known = inspect.signature(type(optimizer)).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in known}

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return type(optimizer)(groups, **defaults)
        except TypeError as error:
            raise ConfigError(
                f"{type(optimizer).__name__} cannot be made again for the parameters of a rank ({error})",
                expected="an optimizer whose other arguments are in its defaults",
                do='choose strategy="ddp_sharded", which steps the optimizer itself',
            ) from error

    return make


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) and value.dim() else value
