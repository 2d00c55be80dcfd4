"""Base class of hooks with error feedback: keeps the residuals of a run, and saves them in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.per_run import PerRun
from stratagem_comm_hooks.error_feedback import ErrorFeedback
from stratagem_comm_hooks.lossy import LossyHook

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.api import RunContext

#: The key of the residuals in checkpoints.
_KEY: Final = "owed"  # a name that stays


@define(eq=False, kw_only=True)
class FeedbackHook(LossyHook):
    """A lossy hook that adds what it did not send to the next step; see [Note: error feedback]."""

    _feedback: PerRun[ErrorFeedback] = field(init=False, factory=lambda: PerRun(ErrorFeedback), repr=False)

    def feedback(self, run: RunContext) -> ErrorFeedback:
        """Return this rank's residuals in `run`."""
        return self._feedback.of(run)

    @hookimpl
    def step_context(self, stage: str, run: RunContext) -> None:
        if stage == "train":
            self.feedback(run).begin()

    @hookimpl(wrapper=True)
    def scale_loss(self, loss: Tensor, run: RunContext) -> Generator[None, Tensor, Tensor]:
        scaled = yield
        feedback = self.feedback(run)
        if run.policy.loss_scaling:
            feedback.follow(scaled.detach().double() / loss.detach().double())
        # The scale is known in the last backward of a window; rounding twice would make a resumed run another one.
        if run.sync_gradients and run.gradient_scale != feedback.gradient_scale:
            feedback.rescale(run.gradient_scale)
        return scaled

    @hookimpl(wrapper=True)
    def step_optimizers(
        self, optimizers: list[Optimizer], closure: Callable[[], Tensor] | None, run: RunContext
    ) -> Generator[None, bool, bool]:
        stepped = yield from super().step_optimizers(optimizers, closure, run)
        if not stepped:
            self.feedback(run).clear()
        return stepped

    def drop(self, bad: Any, run: RunContext) -> None:
        self.feedback(run).drop(bad)

    def statistics(self, run: RunContext) -> dict[str, float]:
        return {"error_norm": self.feedback(run).norm()}

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        return {"steps": self.steps(run), _KEY: self.feedback(run).state()}

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        """Restore this rank's residuals; with another number of ranks, give each rank the mean of all."""
        self._checks.of(run).steps = states[0]["steps"]
        if len(states) == run.world_size:
            loaded = ErrorFeedback.of_state(states[run.rank][_KEY], run.device)
        elif run.shards_parameters:
            return  # the residuals belong to shards that are now divided differently
        else:
            loaded = ErrorFeedback.mean([ErrorFeedback.of_state(state[_KEY], run.device) for state in states])
        feedback = self.feedback(run)
        feedback.residuals, feedback.chunks, feedback.scale = loaded.residuals, loaded.chunks, loaded.scale
        feedback.gradient_scale = loaded.gradient_scale
