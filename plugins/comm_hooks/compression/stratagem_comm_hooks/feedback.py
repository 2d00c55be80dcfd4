"""The base of hooks that owe: their memory, forward by forward, and across a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.per_run import PerRun
from stratagem_comm_hooks.lossy import Lossy
from stratagem_comm_hooks.owed import Owed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor
    from torch.optim import Optimizer

    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class Feedback(Lossy):
    """A hook that remembers what it has not sent, and how many steps were made."""

    _debts: PerRun[Owed] = field(init=False, factory=lambda: PerRun(Owed), repr=False)

    def owed(self, run: RunContext) -> Owed:
        """Return what this rank owes in `run`."""
        return self._debts.of(run)

    @hookimpl
    def step_context(self, stage: str, run: RunContext) -> None:
        if stage == "train":
            self.owed(run).begin()

    @hookimpl(wrapper=True)
    def scale_loss(self, loss: Tensor, run: RunContext) -> Generator[None, Tensor, Tensor]:
        scaled = yield
        if run.policy.loss_scaling:
            self.owed(run).follow(scaled.detach().double() / loss.detach().double())
        return scaled

    @hookimpl(wrapper=True)
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Tensor] | None, run: RunContext
    ) -> Generator[None, bool, bool]:
        stepped = yield from super().optimizer_step(optimizer, closure, run)
        if not stepped:
            self.owed(run).clear()
        return stepped

    def drop(self, bad: Any, run: RunContext) -> None:
        self.owed(run).drop(bad)

    def statistics(self, run: RunContext) -> dict[str, float]:
        return {"error_norm": self.owed(run).norm()}

    def rank_state(self, run: RunContext) -> dict[str, Any]:
        return {"steps": self.steps(run), "owed": self.owed(run).state()}

    def load_rank_states(self, states: list[dict[str, Any]], run: RunContext) -> None:
        """Go on where the ranks stopped; where their number has changed, owe as much as they did."""
        self._watches.of(run).steps = states[0]["steps"]
        if len(states) == run.world_size:
            loaded = Owed.of_state(states[run.rank]["owed"], run.device)
        elif run.shards_parameters:
            return  # what was owed belongs to shards that are cut otherwise now
        else:
            loaded = Owed.mean([Owed.of_state(state["owed"], run.device) for state in states])
        owed = self.owed(run)
        owed.rests, owed.chunks, owed.scale = loaded.rests, loaded.chunks, loaded.scale
