"""Data parallelism with torch's DDP: a replica of the model in every process, gradients averaged in buckets."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import define, field
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from stratagem.api import CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, GRADIENT_BUCKETS, LOCAL_STEPS, Capabilities, hookimpl
from stratagem.api.options import options
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError
from stratagem_buckets.reducer import bucket_reducer
from stratagem_ddp import literal, words
from stratagem_ddp.planned import PlannedReplica
from stratagem_ddp.words import REACHED, advice, check_complete, explain, names_of, reached, trained
from stratagem_process_group import USUAL, ProcessGroupStrategy, group_options_after
from stratagem_process_group.losses import one_gradient_each

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from stratagem.api import Collectives, RunContext
    from stratagem_trainer.api import TrainerView

_LAUNCHERS = {"popen": "subprocess", "subprocess": "subprocess", "spawn": "spawn", "fork": "fork"}


@define(eq=False, kw_only=True, field_transformer=group_options_after("bucket_cap_mb"))
class DDPStrategy(ProcessGroupStrategy):
    """Replicate the model in every process; average gradients while backward runs.

    Li et al., "PyTorch Distributed", VLDB 2020.
    """

    #: Set it if every step uses the same parameters in the same order: allows more overlap, and activation
    #: checkpointing of shared layers; gradients are wrong if steps differ.
    static_graph: bool = False
    #: Gradients are views into the all-reduce buckets: saves a copy of all gradients; `detach_()` on them fails.
    gradient_as_bucket_view: bool = False
    #: Find parameters that the loss does not depend on: needed if there are any, costs a graph traversal each step.
    #: "auto" does so with manual optimization, where a loss may train a part of the model, and where the first loss
    #: leaves some out. False refuses them.
    find_unused_parameters: bool | Literal["auto"] = "auto"
    #: Larger buckets mean fewer messages, smaller ones overlap better with backward; megabytes, fractions allowed.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))
    #: Send rank 0's buffers, such as the statistics of batch normalization, to all ranks before each training step and
    #: each evaluation. False: each rank keeps its own, and checkpoints have rank 0's.
    broadcast_buffers: bool = True
    #: Compare the parameters' shapes on all ranks, and send rank 0's values. False: the ranks made equal models.
    init_sync: bool = True
    #: A DDP communication hook: a callable of (state, bucket) that returns a future of the averaged bucket. The
    #: trainer's ``comm_hook=`` takes names instead, and works with other strategies, too.
    ddp_comm_hook: Any = None
    #: The first argument of `ddp_comm_hook`, such as torch's PowerSGDState.
    ddp_comm_state: Any = None
    #: A callable that wraps a hook: torch's fp16_compress_wrapper and bf16_compress_wrapper, or your own.
    ddp_comm_wrapper: Any = None
    #: With torch's post_localSGD_hook: steps between two averages of the parameters. More send less and diverge
    #: further.
    model_averaging_period: int | None = field(default=None, validator=at_least(1))
    #: How to start the processes of this node: "popen" runs the script again, "spawn" and "fork" run the training
    #: function in new or forked processes. None: as `launcher` says.
    start_method: Literal["popen", "subprocess", "spawn", "fork"] | None = None

    #: Bytes that DDP sends in a step without comm hooks.
    _num_bytes: int = field(init=False, default=0)

    capabilities = Capabilities(provides=USUAL | {CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, GRADIENT_BUCKETS, LOCAL_STEPS})

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.static_graph and self.find_unused_parameters is True:
            raise ConfigError(
                "strategy.ddp.static_graph and strategy.ddp.find_unused_parameters are both true",
                expected="one of them: with a static graph DDP finds unused parameters in the first step",
                do="drop find_unused_parameters",
            )
        literal.check(*self._literal)

    def __getstate__(self) -> dict[str, Any]:
        # Comm hooks are pickled separately; torch's states need a process group to be unpickled.
        spent = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
        return {name: None if name in spent else getattr(self, name) for name in options(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs generates it

    @property
    def _literal(self) -> tuple[Any, Any, Any, int | None]:
        return self.ddp_comm_hook, self.ddp_comm_state, self.ddp_comm_wrapper, self.model_averaging_period

    def default_plugins(self, kind: str) -> list[Any]:
        return literal.plugins(*self._literal) if kind == "comm_hook" else []

    def default_launcher(self) -> str | None:
        return None if self.start_method is None else _LAUNCHERS[self.start_method]

    @hookimpl
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        module = module.to(run.device)
        trainable = any(parameter.requires_grad for parameter in module.parameters())
        if run.stage != "train" or not trainable:
            run.collectives.replicate((*module.parameters(), *module.buffers()))
            return module
        if self.static_graph and run.manual:
            raise ConfigError(
                "strategy.ddp.static_graph is true and the module uses manual optimization",
                expected="false: the parameters that a loss depends on may change between calls",
            )
        search = run.manual if self.find_unused_parameters == "auto" else self.find_unused_parameters
        if run.environment.simulated:
            return PlannedReplica(
                module, run, self.bucket_cap_mb, self.gradient_as_bucket_view, self.broadcast_buffers,
                rebuilds=self.static_graph or not search,
            )  # fmt: skip
        # Without device_ids: batches are on the device already, and torch would walk and rebuild each of them.
        with warnings.catch_warnings():
            # Torch has begun to give this option another name and a narrower meaning.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            replica = _Replica(
                module, run, process_group=run.peers.group, bucket_cap_mb=self.bucket_cap_mb,
                find_unused_parameters=search, gradient_as_bucket_view=self.gradient_as_bucket_view,
                static_graph=self.static_graph, init_sync=self.init_sync,
                **({} if self.broadcast_buffers else {"broadcast_buffers": False}),
            )  # fmt: skip
        silent = replica.bucket_reducer is not None  # it counts its traffic
        self._num_bytes = 0 if silent else sum(p.nbytes for p in module.parameters() if p.requires_grad)
        return replica

    @hookimpl
    def step_context(self, stage: str, sync: bool, run: RunContext) -> AbstractContextManager[Any] | None:
        # An evaluating model is not wrapped; while training, None adds nothing to the list of contexts.
        silent = stage == "train" and not sync and isinstance(run.model, DistributedDataParallel)
        return run.model.no_sync() if silent and not _learns_its_graph(run.model) else None

    @hookimpl
    def backward(self, loss: torch.Tensor, module: torch.nn.Module, run: RunContext) -> bool:
        if not isinstance(module, _Replica):
            run.differentiate(loss)
            if isinstance(module, PlannedReplica) and run.sync_gradients:
                module.finish(run.manual or self.find_unused_parameters is not False or not run.owns_loop)
            return True
        try:
            is_first = run.sync_gradients and not module.is_checked
            if is_first:
                loss, module.is_checked = self._searched(loss, module, run), True
            with one_gradient_each(trained(module)) if is_first else contextlib.nullcontext():
                if run.manual and run.sync_gradients:
                    _backward_inside_forward(loss, module, run)
                else:
                    run.differentiate(loss)
            if run.sync_gradients and run.owns_loop:  # a loop without a Trainer may call backward several times a step
                check_complete(module, run)
        except RuntimeError as error:
            explain(error, module, run.rank, loss)
            raise
        if self._num_bytes and (run.sync_gradients or _learns_its_graph(module)):
            run.collectives.traffic.add("all_reduce", self._num_bytes, run.peers.world_size, sender="gradients")
        if module.static_graph and _learns_its_graph(module):
            vars(module)[REACHED] = reached(loss)
        return True

    def _searched(self, loss: torch.Tensor, replica: _Replica, run: RunContext) -> torch.Tensor:
        """Return the first loss that sends; search for unused parameters if it leaves some out on any rank. Collective.

        A loop without a Trainer is left alone: it may differentiate several losses of one forward.
        """
        waiting_in = "loss.backward()"  # noqa: F841 - messages on ranks that wait read it
        is_asked = self.find_unused_parameters == "auto" and not replica.find_unused_parameters and run.owns_loop
        left, names = words.left_out(loss, replica) if is_asked else ({}, [])
        if is_asked and run.peers.unchecked.any(bool(names)):  # all ranks are in this backward
            # A new reducer does not know what earlier batches of the window have used: this loss uses it, too.
            loss = sum((each.flatten()[:0].sum().to(loss) for each in left.values() if each.grad is not None), loss)
            replica.search(loss)
            if run.is_global_zero:
                warnings.warn(words.found_unused(names), stacklevel=2)
        return loss

    @hookimpl(optionalhook=True)
    def on_train_epoch_end(self, run: RunContext) -> None:
        if isinstance(run.model, _Replica):
            run.model.check_frozen()

    @hookimpl(optionalhook=True)
    def on_fit_end(self, trainer: TrainerView, run: RunContext) -> None:
        # With manual optimization torch does not count unused parameters.
        searched = isinstance(run.model, DistributedDataParallel) and self.find_unused_parameters is True
        if searched and not run.manual:
            said = advice(run, trainer.global_step)
            if said and run.is_global_zero:
                warnings.warn(said, stacklevel=2)

    def buffer_peers(self, run: RunContext) -> Collectives | None:
        return super().buffer_peers(run) if self.broadcast_buffers else None


class _Replica(DistributedDataParallel):
    """DDP that sends nothing in evaluation, where one rank may have more batches than another."""

    def __init__(self, module: torch.nn.Module, run: RunContext, **options: Any) -> None:
        super().__init__(module, **options)
        self.traffic, self.bucket_reducer = run.collectives.traffic, bucket_reducer(run)
        #: A static graph adds the gradients that a parameter gets in one backward.
        self.is_checked: bool = options["static_graph"]
        self._number()

    def _number(self) -> None:
        #: Names of the parameters that DDP averages, by its numbers; a parameter frozen later keeps its number.
        self.names = names_of(self)
        if self.bucket_reducer is not None:
            self.bucket_reducer.serve(self)

    def search(self, loss: torch.Tensor) -> None:
        """Search for unused parameters from the backward of `loss` on, with a new reducer."""
        self.find_unused_parameters = True
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]  # torch's
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, sparse, names, False)  # type: ignore[no-untyped-call]
        self._number()
        self.reducer.prepare_for_backward(list(_find_tensors(loss)))

    def check_frozen(self) -> None:
        """Refuse a parameter that was frozen when DDP wrapped the model and is trained now: DDP does not average it."""
        thawed = set(names_of(self)) - set(self.names)
        if thawed:
            raise ConfigError(
                f"{min(thawed)!r} was frozen when training began and is trained now, which DDP does not support",
                expected="the same trainable parameters during a fit",
                do="make it trainable before the fit, or train in two fits",
            )

    def _sync_buffers(self) -> None:
        super()._sync_buffers()  # type: ignore[no-untyped-call]  # torch's
        size = sum(buffer.nbytes for buffer in self.modules_buffers)
        self.traffic.add("broadcast", size, torch.distributed.get_world_size(self.process_group), sender="buffers")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        except RuntimeError as error:
            explain(error, self, torch.distributed.get_rank())
            raise


def _learns_its_graph(replica: DistributedDataParallel) -> bool:
    """Return whether the static graph of `replica` is not known yet: no backward has run.

    The first backward must all-reduce, also during accumulation: its averages are then equal on all ranks, and
    averaging them again with the later micro-batches changes nothing.
    """
    return replica.static_graph and REACHED not in vars(replica)


def _backward_inside_forward(loss: torch.Tensor, replica: DistributedDataParallel, run: RunContext) -> None:
    """Run backward inside the replica's forward, as manual optimization does.

    DDP prepares its reducer when a forward returns, and only if that forward synchronizes. Here the forward ran with
    `no_sync`, and the reducer is prepared for this backward only.
    """
    replica.require_backward_grad_sync = True
    replica.reducer.prepare_for_backward(list(_find_tensors(loss)) if replica.find_unused_parameters else [])
    try:
        run.differentiate(loss)
    finally:
        replica.require_backward_grad_sync = False
    # Broadcast buffers at the next forward, as after any synchronized step.
    replica.require_forward_param_sync = True
