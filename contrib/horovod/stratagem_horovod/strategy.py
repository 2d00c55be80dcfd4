"""Data parallelism with Horovod: a replica of the model in every process, gradients averaged while backward runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from attrs import define, field

from stratagem.api import (
    CLIP_BY_NORM,
    CLIP_BY_VALUE,
    CLOSURE_OPTIMIZERS,
    CUSTOM_CLIPPING,
    CUSTOM_STEP,
    FULL_STATE,
    MANUAL_OPTIMIZATION,
    MULTI_PROCESS,
    MULTIPLE_OPTIMIZERS,
    NO_SYNC,
    Capabilities,
    RunContext,
    Strategy,
    hookimpl,
)
from stratagem.api.per_run import PerRun
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError
from stratagem_horovod.averaging import Averager, Reduction

if TYPE_CHECKING:
    from torch.optim import Optimizer

_MEBIBYTE = 2**20


@define(eq=False)
class _Kept:
    """What the strategy keeps for a run and a module."""

    averager: Averager | None = None

    def close(self) -> None:
        if self.averager is not None:
            self.averager.close()
        self.averager = None


@define(eq=False, kw_only=True)
class HorovodStrategy(Strategy):
    """Replicate the model in every process; average gradients with Horovod, over gloo.

    Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018. It works under every
    launcher and environment. The learning rate is used as given; it is not multiplied by the number of processes.
    """

    #: "fp16" sends gradients as 16-bit floats: half the bytes, with rounding.
    compression: Literal["none", "fp16"] = "none"
    #: "sum" adds gradients up, as if the learning rate were larger by the number of processes. Horovod has "adasum"
    #: over MPI only.
    op: Literal["average", "sum", "adasum"] = "average"
    #: Divide gradients by this before they are summed, and by the rest of the number of processes afterwards: more
    #: avoids overflow, less avoids underflow. None: by the number of processes with fp16, else by 1.
    gradient_predivide_factor: float | None = field(default=None, validator=more_than(0))
    #: Reduce gradients in this many groups, each when all of it is known: fewer messages, less overlap with backward.
    #: None: each gradient at once, which Horovod fuses as `fusion_threshold_mb` says.
    num_groups: int | None = field(default=None, validator=at_least(1))
    #: Send sparse gradients of embeddings as dense tensors: they are refused otherwise. Large tables send much.
    sparse_as_dense: bool = False
    #: Send a gradient while backward computes others. False, after backward, allows several gradients of a parameter.
    overlap: bool = True
    #: Size of the buffer in which gradients are fused: more means fewer messages, 0 fuses none. None: as Horovod does.
    fusion_threshold_mb: float | None = field(default=None, validator=at_least(0))
    #: Write a timeline of all messages to this file, for chrome://tracing; it slows training down.
    timeline_filename: str | None = None
    #: Seconds after which an error ends a wait for a gradient that some rank does not send; Horovod warns after 60.
    #: None: 1800.
    stall_check_shutdown_time_seconds: int | None = field(default=None, validator=at_least(1))

    _kept: PerRun[_Kept] = field(init=False, factory=lambda: PerRun(_Kept))
    #: Whether this strategy started Horovod in this process, for the run that is connected.
    _started: bool = field(init=False, default=False)

    capabilities = Capabilities(
        provides={
            CLIP_BY_NORM, CLIP_BY_VALUE, CLOSURE_OPTIMIZERS, CUSTOM_CLIPPING, CUSTOM_STEP, FULL_STATE,
            MANUAL_OPTIMIZATION, MULTI_PROCESS, MULTIPLE_OPTIMIZERS, NO_SYNC,
        }
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        if self.op == "adasum":
            raise ConfigError(
                "strategy.horovod.op is 'adasum', which Horovod computes over MPI, and this strategy uses gloo",
                expected="'average' or 'sum'", do="leave op out",
            )  # fmt: skip
        if self.op != "average" and self.gradient_predivide_factor is not None:
            raise ConfigError(
                f"strategy.horovod.gradient_predivide_factor is {self.gradient_predivide_factor:g} and "
                f"strategy.horovod.op is {self.op!r}", expected="op 'average', which divides",
                do="leave one of them out",
            )  # fmt: skip

    def preload(self, device_type: str) -> None:
        from stratagem_horovod import engine

        engine.load()

    # --- Processes -----------------------------------------------------------------------------------------------

    @hookimpl
    def on_connect(self, run: RunContext) -> None:
        from stratagem_horovod import engine

        self._check_timeline(run)
        if run.world_size > 1:
            if run.environment.simulated:
                raise ConfigError("strategy.horovod connects processes, and a plan has one", do='plan strategy="ddp"')
            self._started = engine.start(run, self._settings())
        else:
            engine.load()

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        from stratagem_horovod import engine

        self._kept.of(run).close()
        if self._started:
            self._started = False
            engine.end()

    def _check_timeline(self, run: RunContext) -> None:
        """Refuse a timeline that Horovod would not write: it says nothing about that. Rank 0 writes it."""
        if self.timeline_filename is None:
            return
        folder, error = Path(self.timeline_filename).resolve().parent, None
        if run.world_size == 1 or (run.rank == 0 and not os.access(folder, os.W_OK)):
            cannot = f"no file can be written in {str(folder)!r}"
            reason = "one process sends nothing" if run.world_size == 1 else cannot
            error = ConfigError(
                f"strategy.horovod.timeline_filename is {self.timeline_filename!r}, and {reason}",
                expected="several processes, and a file in a folder that exists", do="correct it, or leave it out",
            )  # fmt: skip
        run.collectives.fail_together(error)

    def _settings(self) -> dict[str, str]:
        """Return the variables that Horovod reads when it starts."""
        settings = {}
        if self.stall_check_shutdown_time_seconds is not None:
            settings["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(self.stall_check_shutdown_time_seconds)
        if self.fusion_threshold_mb is not None:
            settings["HOROVOD_FUSION_THRESHOLD"] = str(int(self.fusion_threshold_mb * _MEBIBYTE))
        if self.timeline_filename is not None:
            settings["HOROVOD_TIMELINE"] = self.timeline_filename
        return settings

    # --- The model -----------------------------------------------------------------------------------------------

    @hookimpl
    def wrap_model(self, module: torch.nn.Module, run: RunContext) -> torch.nn.Module:
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        kept = self._kept.of(run)
        kept.close()
        if run.stage == "train" and run.world_size > 1:
            import horovod.torch as hvd

            kept.averager = Averager(hvd, module, run.world_size, self._reduction(run), run.collectives.traffic)
        return module

    def _reduction(self, run: RunContext) -> Reduction:
        usual = float(run.world_size) if self.compression == "fp16" else 1.0
        factor = self.gradient_predivide_factor or usual
        return Reduction(
            op=self.op, compress=self.compression == "fp16", predivide=factor, num_groups=self.num_groups,
            sparse_as_dense=self.sparse_as_dense, overlap=self.overlap,
        )  # fmt: skip

    @hookimpl
    def wrap_optimizers(self, optimizers: list[Optimizer], run: RunContext) -> list[Optimizer]:
        # Horovod's own function takes a step with zeros to learn the state, which decays weights.
        states = [optimizer.state_dict() for optimizer in optimizers]
        first = run.collectives.broadcast_object(states)
        for optimizer, mine, theirs in zip(optimizers, states, first, strict=True):
            if run.rank != 0 and (theirs["state"] or mine["state"] or repr(mine) != repr(theirs)):
                optimizer.load_state_dict(theirs)
        return optimizers

    @hookimpl
    def backward(self, loss: torch.Tensor, run: RunContext) -> bool:
        averager = self._kept.of(run).averager
        if averager is None:
            run.differentiate(loss)
            return True
        averager.begin(run.sync_gradients)
        try:
            run.differentiate(loss)
        except BaseException:
            averager.abandon()
            raise
        averager.finish()
        return True

    @hookimpl(optionalhook=True)
    def on_validation_start(self, run: RunContext) -> None:
        assert run.module is not None, "wrap_model sets it"
        if buffers := list(run.module.buffers()):
            run.collectives.replicate(buffers)
