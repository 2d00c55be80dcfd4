"""One training step: the gradients of a window of batches, then all optimizers, once."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stratagem.api.parameters import needs_closure
from stratagem.api.run_parts import OPTIMIZER_STEP, PHASE, SINCE
from stratagem.errors import ConfigError
from stratagem_trainer import fit_state
from stratagem_trainer.module import overrides
from stratagem_trainer.signatures import takes
from stratagem_trainer.token_loss import SummedLosses, TargetCounts, UnevenTargets

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from stratagem.runtime.context import Context
    from stratagem_trainer.fit_state import FitState
    from stratagem_trainer.progress import Position


class TrainStep:
    """Trains one batch after the other; where a window of accumulated batches ends, all optimizers make one step.

    Under manual optimization `training_step` makes the steps, and `gradients` only calls it.
    """

    def __init__(self, state: FitState, position: Position) -> None:
        """Count the targets of losses that are sums in `position`; emit no events until `listen` is called."""
        run, settings = state.run, state.settings
        self.state, self.run, self.position = state, run, position
        #: Divides the loss of a batch: the number of batches of its accumulation window, or see `token_loss`.
        self.divisor: float = 1
        #: What is stepped where a window ends; none under manual optimization.
        self.optimizers: list[Optimizer] = [] if run.manual else run.optimizers
        #: The optimizer evaluates the model itself, such as LBFGS.
        self.closes_over = any(map(needs_closure, self.optimizers))
        self.sums = SummedLosses(run, position, fit_state.BARRIER_TIMEOUT_S)
        several = settings.accumulate_grad_batches != 1 or run.mesh.num_data_shards > 1
        asked = "loss_normalization" in settings.origins or run.manual
        self.uneven = UnevenTargets() if several and not asked and run.is_global_zero else None
        #: Whether the last step changed parameters, and whether a callback dropped its gradients.
        self.stepped = self.dropped = False
        self.before_step: Callable[..., None] | None = None
        self.before_zero_grad: Callable[..., None] | None = None
        self._with_index = takes(state.module.training_step, 2)
        self._clip = clipping(state)

    def listen(self, targets: TargetCounts | None) -> None:
        """Emit the events of backward, wherever it is called, and of optimizers; check losses by their `targets`."""
        events, step = self.state.events, self.run.step
        self.before_step = events.listener("on_before_optimizer_step")
        self.before_zero_grad = events.listener("on_before_zero_grad")
        step.before_backward = self.before_backward(events.listener("on_before_backward"), targets)
        step.after_backward = events.listener("on_after_backward")
        if self.run.plugins_of("comm_hook") and self.state.sums_losses:
            step.after_forward = self._tell_scale

    def before_backward(
        self, emit: Callable[..., None] | None, targets: TargetCounts | None
    ) -> Callable[..., None] | None:
        """Return what to call before each backward: it checks the loss, and emits the event; None for neither."""
        if targets is None:
            return emit

        def checked(loss: torch.Tensor) -> None:
            if math.isinf(self.divisor):
                targets.check_mean(loss, self.position.batches_done)
            if emit is not None:
                emit(loss=loss)

        return checked

    def train(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Train `batch`, and step if it ends its window (`sync`); return what `training_step` returned."""
        outputs = self.gradients(batch, batch_idx, sync)
        if sync and self.optimizers:
            self.update()
            for optimizer in self.optimizers:
                if self.before_zero_grad is not None:
                    self.before_zero_grad(optimizer=optimizer)
                optimizer.zero_grad()
        return outputs

    def gradients(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Add the gradients of `batch`, the last one of its window if `sync`; return what `training_step` returned."""
        if (train := self.state.train_batch) is not None:
            outputs = train(batch, batch_idx, self.divisor, sync)
        else:
            outputs = self.run.step.train_step(batch, batch_idx, self.divisor, sync, self._with_index)
        if isinstance(outputs, dict) and "count" in outputs:
            self._count(outputs["count"])
        elif self.sums.are_known and outputs is not None:
            self.sums.refuse_uncounted()
        if sync and self.sums.are_known:
            self.sums.correct(self.optimizers, self.divisor)
        return outputs

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        """Clip the gradients, and make one step with all optimizers.

        Args:
            closure: computes the gradients and calls `prepare`, for an optimizer that evaluates the model itself.
            options: of the optimizer's own `step`.
        """
        if closure is None:
            self.prepare()
        optimizers = [] if self.dropped else self.optimizers  # plugins learn of the step, which changes nothing
        self.stepped = self.run.step.step_optimizers(optimizers, closure, **options) and not self.dropped

    def prepare(self) -> None:
        """Tell callbacks that the gradients are complete, which may drop them; clip them."""
        skipped, activity = self.position.skipped_steps, self.run.activity
        activity[SINCE], activity[PHASE] = time.time(), OPTIMIZER_STEP
        if self.before_step is not None:
            for optimizer in self.optimizers:
                self.before_step(optimizer=optimizer)
        self.dropped = self.position.skipped_steps != skipped
        if self._clip is not None and not self.dropped:
            self._clip(self.optimizers)

    def _count(self, count: Any) -> None:
        """Add the `count` that `training_step` returned, unless a chosen `loss_normalization` says how losses count."""
        chosen = self.state.settings.loss_normalization
        if chosen != "batches" or self.closes_over:
            by = f"loss_normalization={chosen!r}" if chosen != "batches" else type(self.optimizers[0]).__name__
            raise ConfigError(
                f"training_step returned a 'count' under {by}", expected="a loss that is a mean, without it",
                do="divide the loss by it",
            )  # fmt: skip
        if self.state.sums_losses:
            self.uneven = None
            self.sums.add(count)

    def _tell_scale(self, outputs: Any) -> None:
        """Tell comm hooks the scale of the gradients that they are about to average; see [Note: loss per token]."""
        if self.run.sync_gradients and isinstance(outputs, dict) and "count" in outputs:
            self.run.gradient_scale = self.sums.scale(outputs["count"], self.divisor, self.run.gradient_scale)


def clipping(state: FitState) -> Callable[[list[Optimizer]], Any] | None:
    """Return what clips the gradients of a step: the module's own method, the settings, or None."""
    run, module, settings = state.run, state.module, state.settings
    value, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
    if run.manual:
        return None
    if overrides(module, "configure_gradient_clipping"):
        configure = state.events.within(module.configure_gradient_clipping)

        def configured(optimizers: list[Optimizer]) -> None:
            for optimizer in optimizers:
                run.step.unscale(optimizer)
                configure(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

        return configured
    if value is None:
        return None
    if algorithm == "norm":
        return functools.partial(_clip_by_norm, run, value)
    return lambda optimizers: [run.clip_gradients(optimizer, max_value=value) for optimizer in optimizers]


def _clip_by_norm(run: Context, limit: float, optimizers: list[Optimizer]) -> None:
    """Clip by the common norm of all gradients."""
    if len(optimizers) == 1:
        run.clip_gradients(optimizers[0], max_norm=limit)
        return
    norms = [float(run.clip_gradients(optimizer, max_norm=math.inf)) for optimizer in optimizers]
    total = math.hypot(*norms)
    if limit < total < math.inf:  # inf: the precision skips the step, or `finite` ends the run
        for optimizer, norm in zip(optimizers, norms, strict=True):
            # torch divides the limit by the norm and 1e-6; all optimizers get the same factor.
            run.clip_gradients(optimizer, max_norm=(norm + 1e-6) * limit / (total + 1e-6))
