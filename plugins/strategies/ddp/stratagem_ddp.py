"""Data parallelism: a replica of the model in every process, gradients averaged in buckets (torch's DDP)."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
from attrs import define, evolve, field
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from stratagem import Capabilities, Strategy, hookimpl
from stratagem.errors import ConfigError
from stratagem.options import more_than
from stratagem.plugin import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    FULL_STATE,
    GRADIENT_BUCKETS,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Bucket,
)
from stratagem.world import DEFAULT_TIMEOUT, TorchCollectives

_LAUNCHERS = {"popen": "subprocess", "subprocess": "subprocess", "spawn": "spawn", "fork": "fork"}


@define(eq=False, kw_only=True)
class DDPStrategy(Strategy):
    """Every process holds the whole model and its own share of the data; their gradients are averaged while backward
    still runs. Li et al., "PyTorch Distributed", VLDB 2020.
    """

    #: Promise that every step uses the same parameters in the same order: allows more overlap, and activation
    #: checkpointing of shared parts; wrong gradients if the promise is broken.
    static_graph: bool = False
    #: Gradients are views into the all-reduce buckets: saves a copy of them all; they cannot be detached in place.
    gradient_as_bucket_view: bool = False
    #: Look for parameters that the loss does not reach: needed if there are any, costs a walk of the graph each step.
    #: None does so only where it must: under manual optimization, where a loss may train half of the model.
    find_unused_parameters: bool | None = None
    #: Larger buckets mean fewer messages, smaller ones overlap better with backward; megabytes, fractions allowed.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))
    #: How long a rank waits for the others before it gives up, in seconds or as a timedelta.
    timeout: timedelta = DEFAULT_TIMEOUT
    #: torch.distributed backend; by default the one that fits the device (nccl for CUDA, gloo for the CPU).
    process_group_backend: str | None = None
    #: How the processes of this node begin: "popen" runs the script again, "spawn" and "fork" run the training function
    #: in fresh or in copied processes. None leaves it to `launcher`.
    start_method: Literal["popen", "subprocess", "spawn", "fork"] | None = None

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM,
            CLIP_BY_VALUE,
            CLOSURE_OPTIMIZERS,
            FULL_STATE,
            GRADIENT_BUCKETS,
            MANUAL_OPTIMIZATION,
            MULTI_PROCESS,
            MULTIPLE_OPTIMIZERS,
            NO_SYNC,
        }
    )

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.timeout, timedelta) and isinstance(self.timeout, int | float):
            self.timeout = timedelta(seconds=self.timeout)

    def default_launcher(self) -> str | None:
        return None if self.start_method is None else _LAUNCHERS[self.start_method]

    def join_timeout(self) -> timedelta:
        return self.timeout

    @hookimpl
    def connect(self, world, run):
        backend = self.process_group_backend or run.stack.accelerator.plugin.backend
        return TorchCollectives.connect(world, run.device, backend=backend, timeout=self.timeout)

    @hookimpl
    def wrap_model(self, module, run):
        module = module.to(run.device)
        trainable = any(parameter.requires_grad for parameter in module.parameters())
        if run.stage != "train" or not trainable:
            _broadcast(module, run.collectives)
            return module
        if self.static_graph and run.manual:
            raise ConfigError(
                "strategy.ddp.static_graph is true and the module optimizes by hand",
                expected="false: which parameters a loss reaches may change from call to call",
            )
        search = run.manual if self.find_unused_parameters is None else self.find_unused_parameters
        replica = _Replica(
            module,
            device_ids=None if run.device.type == "cpu" else [run.device],
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=search,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        reducer = run.bucket_reducer()
        if reducer is not None:
            replica.register_comm_hook(reducer, _reduce)
        return replica

    @hookimpl
    def step_context(self, stage, sync, run):
        # An evaluating model is not wrapped; while training, None adds nothing to the list of contexts.
        silent = stage == "train" and not sync and isinstance(run.model, DistributedDataParallel)
        return run.model.no_sync() if silent else None

    @hookimpl
    def backward(self, loss, module, run):
        if run.manual and run.sync_gradients and isinstance(module, DistributedDataParallel):
            _backward_inside_forward(loss, module)
        else:
            _explaining_unused(loss.backward)
        return True

    @hookimpl
    def on_validation_start(self, run):
        if isinstance(run.model, DistributedDataParallel):
            for buffer in run.module.buffers():
                run.collectives.broadcast(buffer)


class _Replica(DistributedDataParallel):
    """DDP that leaves evaluation alone: without gradients there is nothing to say to the other ranks, and a rank may
    have a batch more than another.
    """

    def forward(self, *inputs, **kwargs):
        if torch.is_grad_enabled():
            return _explaining_unused(super().forward, *inputs, **kwargs)
        return self.module(*inputs, **kwargs)


def _reduce(reducer, bucket):  # torch reads the annotations of a hook, and wants objects rather than text
    return reducer(
        Bucket(
            buffer=bucket.buffer(),
            index=bucket.index(),
            is_last=bucket.is_last(),
            parameters=tuple(bucket.parameters()),
            gradients=tuple(bucket.gradients()),
        )
    )


def _backward_inside_forward(loss: torch.Tensor, replica: DistributedDataParallel) -> None:
    """Differentiate while the replica's own forward is still running, as manual optimization does.

    DDP arms its reducer when a forward returns, and only if that forward was to be synchronised. Here the forward ran
    without synchronisation, and the reducer is armed for this backward alone.
    """
    replica.require_backward_grad_sync = True
    replica.reducer.prepare_for_backward(list(_find_tensors(loss)) if replica.find_unused_parameters else [])
    try:
        loss.backward()
    finally:
        replica.require_backward_grad_sync = False
    # Buffers are to be sent at the next forward, as after any synchronised step.
    replica.require_forward_param_sync = True


def _explaining_unused(call, *inputs, **kwargs):
    """Say in one sentence what torch says in a page when a parameter got no gradient."""
    try:
        return call(*inputs, **kwargs)
    except RuntimeError as error:
        if "Expected to have finished reduction in the prior iteration" not in str(error):
            raise
        raise ConfigError(
            "some parameters got no gradient in the last step, and DDP waits for all of them",
            expected="a loss that every trainable parameter takes part in",
            do='choose strategy="ddp_find_unused_parameters_true", or freeze what is not trained',
        ) from error


def _broadcast(module: torch.nn.Module, collectives) -> None:
    """Give every rank rank 0's parameters and buffers, as DDP does when it wraps."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            collectives.broadcast(tensor.data)


# --- Presets -----------------------------------------------------------------------------------------------------


def spawn() -> DDPStrategy:
    """``ddp_spawn``"""
    return DDPStrategy(start_method="spawn")


def fork() -> DDPStrategy:
    """``ddp_fork`` and ``ddp_notebook``"""
    return DDPStrategy(start_method="fork")


def find_unused() -> DDPStrategy:
    """``ddp_find_unused_parameters_true``"""
    return DDPStrategy(find_unused_parameters=True)


def no_unused() -> DDPStrategy:
    """``ddp_find_unused_parameters_false``"""
    return DDPStrategy(find_unused_parameters=False)


def spawn_find_unused() -> DDPStrategy:
    """``ddp_spawn_find_unused_parameters_true``"""
    return evolve(spawn(), find_unused_parameters=True)


def spawn_no_unused() -> DDPStrategy:
    """``ddp_spawn_find_unused_parameters_false``"""
    return evolve(spawn(), find_unused_parameters=False)


def fork_find_unused() -> DDPStrategy:
    """``ddp_fork_find_unused_parameters_true``, and the same for a notebook"""
    return evolve(fork(), find_unused_parameters=True)


def fork_no_unused() -> DDPStrategy:
    """``ddp_fork_find_unused_parameters_false``, and the same for a notebook"""
    return evolve(fork(), find_unused_parameters=False)
