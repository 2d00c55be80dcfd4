"""Automatic optimization through a closure: the module's own step, or LBFGS; the module's own batch transfer.

[Note: the closure]
`Module.optimizer_step` gets a closure. Calling it runs `training_step`, zeroes the gradients in the first batch of an
accumulation window (`on_before_zero_grad`, `optimizer_zero_grad`), and differentiates (`on_before_backward`,
`backward`, `on_after_backward`). ``optimizer.step(closure)`` calls it, then `on_before_optimizer_step`,
`configure_gradient_clipping`, and steps through strategy and precision. Earlier batches of a window only call the
closure. An optimizer that evaluates the model itself, such as LBFGS, is stepped in this way, too. Elsewhere the loop
does the same in fewer calls, and zeroes the gradients after each step (`TrainLoop._train`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stratagem.errors import ConfigError
from stratagem.stack.plugin_hooks import hook_implementations
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.module import overrides
from stratagem_trainer.optimizer_handle import averaging

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.runtime.context import Context
    from stratagem_trainer.batches import ResumableBatches
    from stratagem_trainer.fit_state import FitState
    from stratagem_trainer.module import Module

#: Methods that make training follow [Note: the closure] if the module defines one.
STEP_METHODS = ("optimizer_step", "optimizer_zero_grad")


class Loop(Protocol):
    """What a step uses of the training loop."""

    state: FitState
    run: Context
    train_batches: ResumableBatches
    accumulate: int
    closes_over: bool
    clip: Callable[[Optimizer], Any] | None
    before_step: Callable[..., None] | None
    before_zero_grad: Callable[..., None] | None

    def forward_backward(self, batch: Any, batch_idx: int, sync: bool) -> Any: ...

    def count_step(self, stepped: bool) -> None: ...


class ClosureStep:
    """Trains one batch at a time for a loop, see [Note: the closure]."""

    def __init__(self, loop: Loop, optimizer: Optimizer) -> None:
        self.loop, self.run, self.optimizer = loop, loop.run, optimizer
        self.module: Module = loop.state.module
        self._handle = _Handle(self)
        self._of_hooks = self.run.stack.strategy.hook_context() or contextlib.nullcontext()
        self._batch_idx = 0
        self._zero_is_due = False
        self._was_evaluated = False
        self._stepped = True
        self._outputs: Any = None

    def __call__(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Train `batch`, and step if it ends its window (`sync`); return what `training_step` returned."""
        loop = self.loop
        self._batch_idx, self._was_evaluated, self._stepped = batch_idx, False, True
        if sync:
            closure = functools.partial(self._evaluate_outside, batch)
            with self._of_hooks:
                self.module.optimizer_step(loop.state.position.epoch, batch_idx, self._handle, closure)
            if not self._was_evaluated:
                raise ConfigError(
                    f"{type(self.module).__name__}.optimizer_step did not call its closure, which computes the loss",
                    expected="optimizer.step(closure=optimizer_closure), or optimizer_closure()",
                    do="call one of them in every step",
                )
            loop.train_batches.close_window()
            loop.count_step(self._stepped)
        else:
            self._evaluate(batch, sync)
        outputs, self._outputs = self._outputs, None
        return outputs

    def zero_if_due(self) -> None:
        """Zero the gradients if a window begins."""
        if self._zero_is_due:
            self._zero_is_due = False
            if self.loop.before_zero_grad is not None:
                self.loop.before_zero_grad(optimizer=self.optimizer)
            self.module.optimizer_zero_grad(self.loop.state.position.epoch, self._batch_idx, self.optimizer)

    def step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Do what ``optimizer.step(closure, **options)`` of the handle does."""
        loop, run, optimizer = self.loop, self.run, self.optimizer
        if loop.closes_over:
            if loop.before_step is not None:
                loop.before_step(optimizer=optimizer)
            clip = None if loop.clip is None else functools.partial(loop.clip, optimizer)
            averaged = None if closure is None else averaging(closure, run.collectives, before=clip)
            self._stepped = run.step.optimizer_step(optimizer, averaged, **options)
            return None
        loss = None if closure is None else closure()
        if loop.before_step is not None:
            loop.before_step(optimizer=optimizer)
        if loop.clip is not None:
            loop.clip(optimizer)
        self._stepped = run.step.optimizer_step(optimizer, **options)
        return loss

    def _evaluate_outside(self, batch: Any) -> Any:
        """Run the closure as the model runs everywhere else: outside of what hooks run in."""
        self._of_hooks.__exit__(None, None, None)
        try:
            return self._evaluate(batch, sync=True)
        finally:
            self._of_hooks.__enter__()

    def _evaluate(self, batch: Any, sync: bool) -> Any:
        """Run the closure; return the loss, None for a skipped batch."""
        loop = self.loop
        self._zero_is_due = self._batch_idx % loop.accumulate == 0
        with torch.enable_grad():
            outputs = loop.forward_backward(batch, self._batch_idx, sync)
        if outputs is None and loop.closes_over:
            raise ConfigError(
                f"training_step returned None under {type(self.optimizer).__name__}, which evaluates the model itself",
                expected="a loss", do="return the loss, multiplied by zero to skip a batch",
            )  # fmt: skip
        self.zero_if_due()  # a skipped batch has no backward
        self._outputs, self._was_evaluated = outputs, True
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        return loss.detach() if isinstance(loss, torch.Tensor) else loss


class _Handle:
    """The optimizer as `Module.optimizer_step` gets it: `step` goes through the hooks, all else is the optimizer's."""

    def __init__(self, steps: ClosureStep) -> None:
        self._steps, self.optimizer = steps, steps.optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Call `closure`, clip, step with the `options` of the optimizer's own `step`; return the loss."""
        return self._steps.step(closure, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def clipping(state: FitState) -> Callable[[Optimizer], Any] | None:
    """Return what clips an optimizer's gradients before a step: the module's own method, the settings, or None."""
    run, module, settings = state.run, state.module, state.settings
    value, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
    if run.manual:
        return None
    if overrides(module, "configure_gradient_clipping"):
        configure = state.events.within(module.configure_gradient_clipping)

        def configured(optimizer: Optimizer) -> None:
            run.step.unscale(optimizer)
            configure(optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm)

        return configured
    if value is None:
        return None
    by_norm = algorithm == "norm"
    return functools.partial(
        run.clip_gradients, max_norm=value if by_norm else None, max_value=None if by_norm else value
    )


def clip_together(state: FitState, clip: Callable[[Optimizer], Any]) -> None:
    """Clip the gradients of all optimizers: by their common norm, or else each by `clip`."""
    run, limit = state.run, state.settings.gradient_clip_val
    own = overrides(state.module, "configure_gradient_clipping")
    if own or limit is None or state.settings.gradient_clip_algorithm != "norm":
        for optimizer in run.optimizers:
            clip(optimizer)
        return
    norms = [float(run.clip_gradients(optimizer, max_norm=math.inf)) for optimizer in run.optimizers]
    total = math.hypot(*norms)
    if limit < total < math.inf:  # inf: the precision skips the step, or `finite` ends the run
        for optimizer, norm in zip(run.optimizers, norms, strict=True):
            # torch divides the limit by the norm and 1e-6; all optimizers get the same factor.
            run.clip_gradients(optimizer, max_norm=(norm + 1e-6) * limit / (total + 1e-6))


# --- Batches -----------------------------------------------------------------------------------------------------


def use_custom_methods(state: FitState, datamodule: Any) -> None:
    """Have the run use the module's, or its data module's, methods for backward and for moving batches.

    Raises:
        ConfigError: the strategy moves batches itself.
    """
    run, module = state.run, state.module
    run.step.custom_backward = module.backward if overrides(module, "backward") else None
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    before, move, after = (_chosen(name, module, datamodule, run) for name in names)
    if move is not None:
        _check_core_moves(move, run)
        run.custom_transfer = lambda batch: move(batch, run.device, state.dataloader_idx)
    if before is None and after is None:
        return
    transfer = run.hooks.transfer_batch

    def transfer_between(batch: Any, run: Context) -> Any:
        if before is not None:
            batch = before(batch, state.dataloader_idx)
        batch = transfer(batch=batch, run=run)
        return batch if after is None else after(batch, state.dataloader_idx)

    run.hooks.transfer_batch = transfer_between


def forget_custom_methods(run: Context) -> None:
    """Undo `use_custom_methods`."""
    run.step.custom_backward = run.custom_transfer = run.step.before_backward = run.step.after_backward = None
    run.hooks.bind()


def _chosen(name: str, module: Module, datamodule: Any, run: Context) -> Callable[..., Any] | None:
    """Return the method of the data module, else of the module; None if neither defines it."""
    own = getattr(module, name) if overrides(module, name) else None
    if datamodule is None or not overrides(datamodule, name, DataModule):
        return own
    if own is not None and run.is_global_zero:
        warnings.warn(
            f"{type(module).__name__} and {type(datamodule).__name__} both define {name}: the data module's is called",
            stacklevel=2,
        )
    method: Callable[..., Any] = getattr(datamodule, name)
    return method


def _check_core_moves(move: Any, run: Context) -> None:
    for choice in run.stack.active():
        marker = hook_implementations(choice.plugin).get("transfer_batch")
        if marker is not None and not marker["wrapper"]:
            raise ConfigError(
                f"{type(move.__self__).__name__ if hasattr(move, '__self__') else 'the module'} defines "
                f"transfer_batch_to_device, and {choice} moves batches itself",
                expected="one of the two", do="use on_before_batch_transfer or on_after_batch_transfer instead",
            )  # fmt: skip
