"""The strategies `dp` and `ddp2`: one process trains on all devices of its node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    GRADIENT_BUCKETS,
    LOCAL_STEPS,
    MULTI_PROCESS,
    NO_SYNC,
    Capabilities,
    Strategy,
    hookimpl,
)
from stratagem.api.validators import duration, more_than, not_empty
from stratagem.errors import ConfigError
from stratagem_buckets.reducer import bucket_reducer
from stratagem_dp.data_parallel import data_parallel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, RunContext, World


_WITHIN_A_PROCESS = frozenset(
    {CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE, NO_SYNC}
)


@define(eq=False, kw_only=True)
class DPStrategy(Strategy):
    """One process scatters each batch to the devices of its node, and gathers their outputs."""

    process_per_device = False
    capabilities = Capabilities(provides=_WITHIN_A_PROCESS)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        return data_parallel(module, run)


@define(eq=False, kw_only=True)
class DDP2Strategy(Strategy):
    """One process on each node scatters its batches to the node's devices; gradients are averaged over the nodes."""

    #: Search each graph for parameters without a gradient: needed if there are any, costs a traversal in each step.
    find_unused_parameters: bool = False
    #: Gradients are views into the all-reduce buckets: saves a copy of all of them; they cannot be detached in place.
    gradient_as_bucket_view: bool = False
    #: Larger buckets mean fewer messages, smaller ones overlap better with backward; megabytes, fractions allowed.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))
    #: How long a node waits for the others in a collective, in seconds or as a timedelta; by default 10 minutes over
    #: NCCL and 30 otherwise.
    timeout: timedelta | None = field(default=None, validator=duration)
    #: How long a node waits for the others to start; by default as long as `timeout`, and at least 5 minutes.
    start_timeout: timedelta | None = field(default=None, validator=duration)
    #: torch.distributed backend; by default that of the device (nccl for CUDA, gloo for the CPU).
    process_group_backend: str | None = field(default=None, validator=not_empty)

    #: Bytes that DDP sends in a step; 0 with comm hooks, which count what they send.
    _num_bytes: int = field(init=False, default=0)

    process_per_device = False
    capabilities = Capabilities(provides=_WITHIN_A_PROCESS | {GRADIENT_BUCKETS, LOCAL_STEPS, MULTI_PROCESS})

    def __attrs_post_init__(self) -> None:
        for name in ("timeout", "start_timeout"):
            if isinstance(given := getattr(self, name), int | float):
                setattr(self, name, timedelta(seconds=given))

    def timeouts(self) -> tuple[timedelta | None, timedelta | None]:
        return self.start_timeout, self.timeout

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        from stratagem.distributed.process_group import join

        return join(world, self.process_group_backend or run.accelerator.backend, run)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        steps = data_parallel(module, run)
        if run.stage != "train" or not any(parameter.requires_grad for parameter in steps.parameters()):
            run.collectives.replicate((*steps.parameters(), *steps.buffers()))
            return steps
        node = NodeDDP(
            steps,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        reducer = bucket_reducer(run)
        if reducer is not None:
            reducer.serve(node)
        trained = [parameter for parameter in steps.parameters() if parameter.requires_grad]
        self._num_bytes = sum(parameter.nbytes for parameter in trained) if reducer is None else 0
        return node

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        accumulates = stage == "train" and not sync and isinstance(run.model, NodeDDP)
        return run.model.no_sync() if accumulates else None

    @hookimpl
    def backward(self, loss: Tensor, run: RunContext) -> bool:
        with _explaining_unused():
            run.differentiate(loss)
        if self._num_bytes and run.sync_gradients:
            run.collectives.traffic.add("all_reduce", self._num_bytes, run.world_size, sender="gradients")
        return True

    @hookimpl(optionalhook=True)
    def on_validation_start(self, run: RunContext) -> None:
        if isinstance(run.model, NodeDDP):
            assert run.module is not None, "it was wrapped"
            run.collectives.replicate(run.module.buffers())

    on_test_start = on_predict_start = on_validation_start


class NodeDDP(DistributedDataParallel):
    """DDP that does not communicate in evaluation, in which nodes may have different numbers of batches."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        with _explaining_unused():
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's


@contextlib.contextmanager
def _explaining_unused() -> Iterator[None]:
    """Replace torch's long error for a parameter without a gradient by one that names the option to set."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            raise
        raise ConfigError(
            "some parameters got no gradient in the last step, and the nodes wait for all of them",
            expected="a loss that depends on every trainable parameter",
            do="set strategy.ddp2.find_unused_parameters to true, or freeze what is not trained",
        ) from error
