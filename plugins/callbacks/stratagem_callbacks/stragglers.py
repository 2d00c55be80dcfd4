"""Name the rank that makes the others wait, and what it is slow in."""

from __future__ import annotations

import socket
import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field

from stratagem.api import GRADIENT_BUCKETS, hookimpl
from stratagem.api.validators import at_least, more_than
from stratagem.errors import ConfigError
from stratagem_callbacks.logged_metrics import log
from stratagem_callbacks.rank_times import (
    BACKWARD,
    NEXT_BATCH,
    OPTIMIZER_STEP,
    OUTSIDE,
    PHASES,
    REST,
    TRAINING_STEP,
    WAITING,
    DeviceClock,
    HostClock,
    Straggler,
    stragglers,
    told,
)
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

_DO = {
    NEXT_BATCH: "give its loader more workers, and look at its part of the data, its disk and what else runs there",
    TRAINING_STEP: "compare its batches and its device with those of others, and look what else runs there",
}


@define(eq=False, kw_only=True)
class Stragglers(Callback):
    """Warn of a rank that makes the others wait, with the phase in which it is slow; logs the slowest rank.

    It compares the time that is a rank's own: next batch, training_step, backward until the last gradient is computed,
    and optimizer step. A phase in which collectives begin is left out, since the rank may wait there for another one:
    `ddp` leaves out nothing; `ddp_sharded` the optimizer step; `fsdp` forward and backward, unless the model is one
    unit, whose forward counts; `parallel` with more than replicas the same; `deepspeed` the optimizer step, in stages 1
    and 2 backward if gradients fill more than one bucket, in stage 3 forward and backward. SyncBatchNorm, or a module's
    own collectives, take forward and backward out. It cannot tell a slow network, nor what a rank loses within a phase
    that is left out. On devices it reads events; that was not run on a GPU yet.
    """

    #: Optimizer steps over which times are added up. A rank is named after two times as many in which it was slow.
    every_n_steps: int = field(default=50, validator=at_least(1))
    #: A rank is a straggler if steps are longer by this share than with the median of all ranks.
    threshold: float = field(default=0.2, validator=more_than(0))

    roles: ClassVar[frozenset[str]] = frozenset({"rank-times"})

    #: None outside of a fit.
    _clock: HostClock | None = field(init=False, default=None, repr=False)
    _hosts: list[str] = field(init=False, factory=list)
    #: Collectives for which no rank waits.
    _flags: Any = field(init=False, default=None, repr=False)
    #: The optimizer steps before this window, and at its end; whether it is the first one, of one step.
    _began: int = field(init=False, default=0)
    _until: int = field(init=False, default=0)
    _warms_up: bool = field(init=False, default=True)
    #: The times of all ranks, on their way.
    _sent: Any = field(init=False, default=None)
    #: Seconds of each phase in a step, of each rank: (ranks, phases); and the phases that were compared.
    _times: list[list[float]] = field(init=False, factory=list)
    _compared: list[int] = field(init=False, factory=list)
    #: The rank and the phase of each straggler in the window before, and those that were warned of.
    _before: set[tuple[int, int]] = field(init=False, factory=set)
    _warned: set[tuple[int, int]] = field(init=False, factory=set)
    #: What the progress bar shows.
    _shown: str = field(init=False, default="")
    #: Whether gradients are sent while backward computes others.
    _overlaps: bool = field(init=False, default=False)
    _handles: list[Any] = field(init=False, factory=list, repr=False)

    def rank_times(self) -> tuple[list[str], list[list[str]]]:
        """Return the titles and the rows of a table: milliseconds of each phase in a step, of each rank."""
        titles = [
            f"{phase}, not compared" if self._is_left_out(number) else phase for number, phase in enumerate(PHASES)
        ]
        rows = zip(self._hosts, self._times, strict=False)
        return ["Rank", "Host", *(f"{title} (ms)" for title in titles)], [
            [str(rank), host, *(f"{1e3 * each:.1f}" for each in seconds)] for rank, (host, seconds) in enumerate(rows)
        ]

    def _is_left_out(self, phase: int) -> bool:
        return phase < WAITING and phase not in self._compared

    # --- What this rank does -----------------------------------------------------------------------------------------

    @hookimpl(wrapper=True)
    def wrap_model(self, module: nn.Module, run: RunContext) -> Generator[None, nn.Module, nn.Module]:
        if run.stage == "train":
            self._release()
            # What the strategy wraps around it, such as a broadcast of buffers, is not the rank's own.
            before = module.register_forward_pre_hook(self._on_forward)
            self._handles = [before, module.register_forward_hook(self._after_forward)]
        return (yield)

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @hookimpl(trylast=True)
    def on_train_start(self, trainer: TrainerView, run: RunContext) -> None:
        if run.environment.simulated:
            return
        if run.world_size == 1:
            raise ConfigError(
                "stragglers is chosen and the run has one process", expected="several processes", do="drop it"
            )
        self._hosts = run.collectives.all_gather_object(socket.gethostname())
        self._flags = run.collectives.duplicate("flags")
        self._overlaps = run.provides(GRADIENT_BUCKETS) and not run.shards_parameters
        self._began, self._until, self._warms_up = trainer.global_step, trainer.global_step + 1, True
        self._sent, self._times, self._before, self._warned, self._shown = None, [], set(), set(), ""
        self._clock = HostClock() if run.device.type == "cpu" else DeviceClock(run.device)
        self._clock.enter(NEXT_BATCH)

    def _enter(self, phase: int) -> None:
        if self._clock is not None:
            self._clock.enter(phase)

    @hookimpl(trylast=True)
    def on_train_epoch_start(self) -> None:
        self._enter(NEXT_BATCH)

    @hookimpl(tryfirst=True)
    def on_train_batch_start(self) -> None:
        self._enter(REST)

    def _on_forward(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments[0] == "training_step":
            self._enter(TRAINING_STEP)

    def _after_forward(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if arguments[0] == "training_step":
            self._enter(REST)

    @hookimpl(trylast=True)
    def on_before_backward(self, loss: torch.Tensor) -> None:
        if self._clock is not None:
            if loss.requires_grad:  # else a pipeline has differentiated it
                loss.register_hook(self._on_gradient)
            self._clock.enter(BACKWARD)

    def _on_gradient(self, gradient: torch.Tensor) -> None:
        """Have autograd call `_after_gradients` first of what it calls at its end, where DDP waits for the others."""
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._after_gradients)

    def _after_gradients(self) -> None:
        if self._clock is not None and self._clock.phase == BACKWARD:
            self._clock.enter(WAITING, waits=not self._overlaps)

    @hookimpl(tryfirst=True)
    def on_after_backward(self, run: RunContext) -> None:
        self._enter(TRAINING_STEP if run.manual else REST)

    @hookimpl(trylast=True)
    def on_before_optimizer_step(self) -> None:
        self._enter(OPTIMIZER_STEP)

    @hookimpl(tryfirst=True)
    def on_before_zero_grad(self, run: RunContext) -> None:
        self._enter(TRAINING_STEP if run.manual else REST)

    @hookimpl(tryfirst=True)
    def on_validation_start(self) -> None:
        self._enter(OUTSIDE)

    on_train_epoch_end = on_validation_start

    @hookimpl(trylast=True)
    def on_validation_end(self) -> None:
        self._enter(NEXT_BATCH)

    @hookimpl(trylast=True)
    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self._clock is not None:
            if trainer.global_step >= self._until:
                self._exchange(trainer, self._clock)
            self._clock.enter(NEXT_BATCH)

    @hookimpl
    def on_train_end(self, trainer: TrainerView) -> None:
        self._clock = None
        self._compare(trainer)

    @hookimpl
    def on_exception(self) -> None:
        self._clock = self._sent = None

    @hookimpl
    def teardown(self) -> None:
        self._release()

    # --- What all ranks do -------------------------------------------------------------------------------------------

    def _exchange(self, trainer: TrainerView, clock: HostClock) -> None:
        """Compare the times of the window before, and send those of this one. Collective."""
        self._compare(trainer)
        step, times, warms_up = trainer.global_step, clock.take(self._flags.group), self._warms_up
        if times is not None and not warms_up:
            count = step - self._began
            per_step = [each / count for each in times]
            self._sent = self._flags.unchecked.all_gather_async(torch.tensor(per_step, dtype=torch.float64))
        self._began, self._until, self._warms_up = step, step + self.every_n_steps, False

    def _compare(self, trainer: TrainerView) -> None:
        """Compare what was sent last, on all ranks."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        rows = sent.wait().view(len(self._hosts), -1).tolist()
        self._times = [row[: len(PHASES)] for row in rows]
        self._compared = told([row[len(PHASES) :] for row in rows])
        if trainer.run.mesh.num_data_shards < len(rows):  # ranks that share samples send each other what they compute
            self._compared = [phase for phase in self._compared if phase not in (TRAINING_STEP, BACKWARD)]
        found = stragglers(self._times, self._compared, self.threshold)
        again = [each for each in found if (each.rank, each.phase) in self._before]
        self._before = {(each.rank, each.phase) for each in found}
        self._show(trainer, again)
        for each in again:
            if each.rank == trainer.global_rank:
                _keep_for_postmortem(self._sentence(each))
            if trainer.is_global_zero and (each.rank, each.phase) not in self._warned:
                self._warned.add((each.rank, each.phase))
                warnings.warn(self._sentence(each), stacklevel=2)

    def _show(self, trainer: TrainerView, found: list[Straggler]) -> None:
        trainer.published.bar.pop(self._shown, None)
        if found:
            slowest = found[0]
            self._shown = f"slowest: rank {slowest.rank}, {PHASES[slowest.phase]} +%"
            trainer.published.bar[self._shown] = 100 * (slowest.seconds / max(slowest.median, 1e-6) - 1)
        share = found[0].share if found else 0.0
        log(trainer, {"stragglers/count": float(len(found)), "stragglers/slower_by": share}, trainer.global_step)

    def _sentence(self, found: Straggler) -> str:
        return (
            f"rank {found.rank} (host {self._hosts[found.rank]}) is slower than the others: {PHASES[found.phase]} "
            f"takes {_in_ms(found.seconds)} a step where the median is {_in_ms(found.median)}, and steps are "
            f"{found.share:.0%} longer for that; {_DO.get(found.phase, _DO[TRAINING_STEP])}"
        )


def _keep_for_postmortem(sentence: str) -> None:
    from stratagem_evidence import Recorder

    if Recorder.active is not None:
        Recorder.active.note(sentence)


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{1e3 * seconds:,.0f} ms"
