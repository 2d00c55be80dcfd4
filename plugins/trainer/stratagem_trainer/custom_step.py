"""Automatic optimization through a closure: the module's own step, or LBFGS; the module's own batch transfer.

[Note: the closure]
`Module.optimizer_step` gets a closure. Calling it runs `training_step`, zeroes the gradients in the first batch of an
accumulation window (`on_before_zero_grad`, `optimizer_zero_grad`), and differentiates (`on_before_backward`,
`backward`, `on_after_backward`). ``optimizer.step(closure)`` calls it, then `on_before_optimizer_step`,
`configure_gradient_clipping`, and steps through strategy and precision. Earlier batches of a window only call the
closure. An optimizer that evaluates the model itself, such as LBFGS, is stepped in this way, too. Elsewhere the loop
does the same in fewer calls, and zeroes the gradients after each step (`TrainStep.train`).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import ConfigError
from stratagem.stack.plugins import hook_implementations
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.module import overrides
from stratagem_trainer.optimizer_handle import averaging
from stratagem_trainer.train_step import TrainStep

if TYPE_CHECKING:
    from stratagem.runtime.context import Context
    from stratagem_trainer.fit_state import FitState
    from stratagem_trainer.module import Module
    from stratagem_trainer.progress import Position
    from stratagem_trainer.token_loss import TargetCounts

#: Methods that make training follow [Note: the closure] if the module defines one.
STEP_METHODS = ("optimizer_step", "optimizer_zero_grad")


class ClosureStep(TrainStep):
    """Trains with one optimizer through closures, see [Note: the closure]."""

    def __init__(self, state: FitState, position: Position) -> None:
        super().__init__(state, position)
        (self.optimizer,) = self.optimizers
        self.module: Module = state.module
        self._handle = _Handle(self)
        self._of_hooks = self.run.stack.strategy.hook_context() or contextlib.nullcontext()
        self._batch_idx = 0
        self._zero_is_due = False
        self._was_evaluated = False
        self._outputs: Any = None

    def before_backward(self, emit: Callable[..., None] | None, targets: TargetCounts | None) -> Callable[..., None]:
        inner = super().before_backward(emit, targets)

        def zeroed(loss: torch.Tensor) -> None:
            self._zero_if_due()
            if inner is not None:
                inner(loss=loss)

        return zeroed

    def train(self, batch: Any, batch_idx: int, sync: bool) -> Any:
        """Train `batch`, and step if it ends its window (`sync`); return what `training_step` returned."""
        self._batch_idx, self._was_evaluated, self.stepped, self.dropped = batch_idx, False, True, False
        if sync:
            closure = functools.partial(self._evaluate_outside, batch)
            with self._of_hooks:
                self.module.optimizer_step(self.position.epoch, batch_idx, self._handle, closure)
            if not self._was_evaluated:
                raise ConfigError(
                    f"{type(self.module).__name__}.optimizer_step did not call its closure, which computes the loss",
                    expected="optimizer.step(closure=optimizer_closure), or optimizer_closure()",
                    do="call one of them in every step",
                )
        else:
            self._evaluate(batch, sync)
        outputs, self._outputs = self._outputs, None
        return outputs

    def _zero_if_due(self) -> None:
        """Zero the gradients if a window begins."""
        if self._zero_is_due:
            self._zero_is_due = False
            if self.before_zero_grad is not None:
                self.before_zero_grad(optimizer=self.optimizer)
            self.module.optimizer_zero_grad(self.position.epoch, self._batch_idx, self.optimizer)

    def step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Do what ``optimizer.step(closure, **options)`` of the handle does."""
        if self.closes_over:
            within = None if closure is None else averaging(closure, self.run.collectives, before=self.prepare)
            self.update(within, **options)
            return None
        loss = None if closure is None else closure()
        self.update(**options)
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
        self._zero_is_due = self._batch_idx % self.state.accumulate_grad_batches == 0
        with torch.enable_grad():
            outputs = self.gradients(batch, self._batch_idx, sync)
        if outputs is None and self.closes_over:
            raise ConfigError(
                f"training_step returned None under {type(self.optimizer).__name__}, which evaluates the model itself",
                expected="a loss", do="return the loss, multiplied by zero to skip a batch",
            )  # fmt: skip
        self._zero_if_due()  # a skipped batch has no backward
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
    run.step.after_forward, run.gradient_scale = None, 1.0
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
