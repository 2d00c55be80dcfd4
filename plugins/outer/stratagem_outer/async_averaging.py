"""Average parameters while training continues, and apply the result a few steps later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from torch import Tensor

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_outer.outer_strategy import OuterStrategy
from stratagem_process_group.messages import SENDER, flatten, group_into_messages, unflatten

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class AsyncAveragingStrategy(OuterStrategy):
    """The parameters of step k are averaged while step k+1 and the following are computed. When the round ends, each
    process adds the difference between the average and what it had sent, which keeps its own steps since then.

    Results depend only on the options: a slow link makes a step wait, and changes no number. Holds two more copies of
    the trained parameters during a round. The method is Bagua's (Gan et al., VLDB 2021), with rounds counted in steps
    instead of seconds.
    """

    path: ClassVar[str] = "strategy.async_averaging"

    #: Optimizer steps from the start of a round to the start of the next. More steps send less.
    interval_steps: int = field(default=8, validator=at_least(1))
    #: Steps after which a round's average is applied. More steps hide a slower link, and apply an older average.
    delay_steps: int = field(default=4, validator=at_least(1))

    #: For each message of the current round: names, the tensor that was sent, and the future of its average.
    _pending: list[tuple[list[str], Tensor, Any]] = field(init=False, factory=list)
    #: Differences to be added to the parameters at the end of the round.
    _corrections: dict[str, Tensor] = field(init=False, factory=dict)
    _round_ends_at: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.delay_steps > self.interval_steps:
            raise ConfigError(
                f"{self.path}.delay_steps is {self.delay_steps} with interval_steps={self.interval_steps}",
                expected="at most interval_steps, since there is one round at a time", do="raise interval_steps",
            )  # fmt: skip

    def _starts_round(self) -> bool:
        return self.steps % self.interval_steps == 0

    def is_sync_step(self) -> bool:
        return self._starts_round() or self.steps == self._round_ends_at

    def sync(self, run: RunContext) -> None:
        if self.steps == self._round_ends_at:
            self._end_round()
            mine = self.local_parameters()
            for name, change in self._corrections.items():
                mine[name].add_(change.to(mine[name].device))
            self._corrections = {}
        if self._starts_round():
            self._round_ends_at = self.steps + self.delay_steps
            self._start_round(run)

    def _start_round(self, run: RunContext) -> None:
        mine = self.local_parameters()
        for names in group_into_messages(mine):
            sent = flatten(mine, names, run.device)
            with self.sync_group.traffic.sent_by(SENDER):
                self._pending.append((names, sent, self.sync_group.average_async(sent.clone())))

    def _end_round(self) -> None:
        """Wait for the current round, if there is one."""
        mine = self.local_parameters()
        for names, sent, future in self._pending:
            self._corrections |= unflatten(future.wait().sub_(sent), mine, names)
        self._pending = []

    def finish_pending_sync(self) -> None:
        self._end_round()
        self._corrections = {}  # their sum over the teams is zero, so they do not change the average

    def reset_sync_state(self) -> None:
        self._pending, self._corrections, self._round_ends_at = [], {}, 0

    def rank_sync_state(self) -> dict[str, Any]:
        self._end_round()
        return {"round_ends_at": self._round_ends_at, "corrections": self._corrections}

    def load_rank_sync_state(self, state: dict[str, Any]) -> None:
        self._round_ends_at, self._corrections = state["round_ends_at"], state["corrections"]
