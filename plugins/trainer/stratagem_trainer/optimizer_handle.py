"""The optimizers of a module that optimizes by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from stratagem.api.run_parts import OPTIMIZER_STEP, PHASE, SINCE
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stratagem.api.world import Collectives
    from stratagem_trainer.fit_state import FitState


class OptimizerHandle:
    """An optimizer to be stepped by hand: `step` goes through the hooks, everything else is the optimizer's."""

    def __init__(self, optimizer: Optimizer, state: FitState) -> None:
        self.optimizer, self._state = optimizer, state

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> bool:
        """Step, counting one optimizer step; return False if an overflow skipped it.

        Args:
            closure: computes the loss and its gradients; the optimizer calls it, once or more often.
            options: of the optimizer's own `step`.
        """
        state, run = self._state, self._state.run

        def before_step() -> None:
            run.activity[SINCE], run.activity[PHASE] = time.time(), OPTIMIZER_STEP
            state.events.emit("on_before_optimizer_step", optimizer=self.optimizer)

        averaged = None if closure is None else averaging(closure, run.collectives, before=before_step)
        skipped = state.position.skipped_steps
        if closure is None:
            before_step()
        dropped = state.position.skipped_steps != skipped
        stepped = run.step.step_optimizers([] if dropped else [self.optimizer], averaged, **options)
        state.position.global_step += 1
        state.position.skipped_steps += not stepped
        return stepped and not dropped

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def handles_of(state: FitState) -> list[OptimizerHandle]:
    """Return the run's optimizers as `Module.optimizers` does; the same objects in each step."""
    if [handle.optimizer for handle in state.handles] != state.run.optimizers:
        state.handles = [OptimizerHandle(optimizer, state) for optimizer in state.run.optimizers]
    return state.handles


@contextlib.contextmanager
def watched_steps(state: FitState, *, counts: bool) -> Iterator[None]:
    """Within, a step that an optimizer makes itself, and not through its handle, is refused where a plugin steps it.

    Args:
        counts: elsewhere it is an optimizer step as any other.
    """
    run, hooks = state.run, []

    def before(optimizer: Any, *_: Any) -> None:
        hook = run.step.stepping_hook
        if not run.step.is_stepping and (hook is not None or optimizer not in run.optimizers):
            who = str(run.stack.strategies[-1]) if hook is None else run.hooks.answering_plugin(hook)
            raise ConfigError(
                f"{type(optimizer).__name__}.step was called on the optimizer that configure_optimizers made, and "
                f"{who} steps it",
                expected="a step of the optimizer that self.optimizers() returns, or that optimizer_step gets",
                do="call step of that one",
            )

    def after(*_: Any) -> None:
        if counts and not run.step.is_stepping:
            state.position.global_step += 1

    for optimizer in run.made_optimizers:
        if hasattr(optimizer, "register_step_pre_hook"):
            hooks += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def averaging(
    closure: Callable[[], Any], collectives: Collectives, before: Callable[[], Any] | None = None
) -> Callable[[], Any]:
    """Return `closure` with its loss averaged over ranks: the optimizer decides by it, the same on all ranks.

    Args:
        before: called between `closure` and the average.
    """

    def averaged() -> Any:
        loss = closure()
        if before is not None:
            before()
        return collectives.all_reduce(loss.detach(), "mean") if isinstance(loss, torch.Tensor) else loss

    return averaged
