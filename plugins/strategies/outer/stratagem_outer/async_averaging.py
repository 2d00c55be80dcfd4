"""Average while training goes on, and take the result a few steps later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, field
from torch import Tensor

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_outer.messages import SENDER, flat, in_messages, pieces
from stratagem_outer.outer_strategy import OuterStrategy

if TYPE_CHECKING:
    from stratagem.api import RunContext


@define(eq=False, kw_only=True)
class AsyncAveragingStrategy(OuterStrategy):
    """The parameters of step k are on their way while step k+1 and the following are computed. When the average is
    due, each process adds the difference to what it had sent: its own progress meanwhile is kept.

    Results depend on nothing but the options: a link that is slow makes a step wait, and changes no number. Holds two
    more copies of the trained parameters while a round is under way. The method is Bagua's (Gan et al., VLDB 2021),
    with rounds that are counted in steps instead of seconds.
    """

    path: ClassVar[str] = "strategy.async_averaging"

    #: Optimizer steps from the beginning of a round to that of the next.
    interval_steps: int = field(default=8, validator=at_least(1))
    #: Steps that a round may take before one waits for it: enough to cover the link, and no more, for an average grows
    #: old.
    delay_steps: int = field(default=4, validator=at_least(1))

    #: Names, what was sent, and the future of its average; for each message of the round that is under way.
    _round: list[tuple[list[str], Tensor, Any]] = field(init=False, factory=list)
    #: What the round that is over is to change.
    _changes: dict[str, Tensor] = field(init=False, factory=dict)
    _due: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.delay_steps > self.interval_steps:
            raise ConfigError(
                f"{self.path}.delay_steps is {self.delay_steps} with interval_steps={self.interval_steps}",
                expected="at most that: one round at a time",
                do="raise interval_steps",
            )

    def _begins(self) -> bool:
        return self._steps % self.interval_steps == 0

    def _meets(self) -> bool:
        return self._begins() or self._steps == self._due

    def _meet(self, run: RunContext) -> None:
        if self._steps == self._due:
            self._end_round()
            mine = self._local()
            for name, change in self._changes.items():
                mine[name].add_(change.to(mine[name].device))
            self._changes = {}
        if self._begins():
            self._due = self._steps + self.delay_steps
            self._begin_round(run)

    def _begin_round(self, run: RunContext) -> None:
        mine = self._local()
        for names in in_messages(mine):
            sent = flat(mine, names, run.device)
            with self._across.traffic.sent_by(SENDER):
                self._round.append((names, sent, self._across.average_async(sent.clone())))

    def _end_round(self) -> None:
        """Wait for the round that is under way, if there is one."""
        mine = self._local()
        for names, sent, future in self._round:
            self._changes |= pieces(future.wait().sub_(sent), mine, names)
        self._round = []

    def _settle(self) -> None:
        self._end_round()
        self._changes = {}  # they add up to nothing over the teams: the average of the models is without them

    def _forget(self) -> None:
        self._round, self._changes, self._due = [], {}, 0

    def _own_memory(self) -> dict[str, Any]:
        self._end_round()
        return {"due": self._due, "changes": self._changes}

    def _remember_own(self, memory: dict[str, Any]) -> None:
        self._due, self._changes = memory["due"], memory["changes"]
