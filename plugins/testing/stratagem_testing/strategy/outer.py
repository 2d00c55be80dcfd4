"""The check of an outer strategy: teams of one rank train as copies of the model in one process do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem_testing.expectations import expect_weights
from stratagem_testing.reference import Batch, Net, joined_batches, loss_of
from stratagem_testing.strategy.base import StrategyChecks
from stratagem_testing.training import train, weights_on_all_ranks

#: Gets the step, from 1, and the trained parameters of each team; what it writes into them is what a sync does.
Meet = Callable[[int, list[list[Tensor]]], None]
_BATCHES, _BATCH = 12, 24


class OuterChecks(StrategyChecks):
    """A strategy whose replicas differ between two syncs; for other strategies there is nothing to check."""

    def meet(self, step: int, teams: list[list[Tensor]]) -> None:
        """Do to the trained parameters of all `teams` what the strategy does after optimizer step `step`, from 1.

        Override it for an outer strategy; `averaging` returns such a function.
        """
        raise NotImplementedError

    def test_teams_train_as_copies_in_one_process(self, several: int) -> None:
        """The average of the teams' parameters after 12 steps."""
        if not self._is_outer or type(self).meet is OuterChecks.meet:
            pytest.skip("not an outer strategy, or its class of checks has no meet(step, teams)")
        batches = joined_batches(_BATCHES, _BATCH)
        reference = Copies(several, self.maker(Net)).train(batches, self.meet)

        results = self.run_in(train, several, self.maker(Net), batches, self._arguments(several))

        look = "compare what the strategy does after each step with `meet` of its class of checks"
        weights, limit = weights_on_all_ranks(results, look), self.tolerance
        expect_weights(weights, reference.average(), "teams in one process", limit, look, "tolerance")


# --- The reference -----------------------------------------------------------------------------------------------


class Copies:
    """As many models as teams, each trained on its chunk of every batch; see `Meet`."""

    def __init__(self, teams: int, make: Callable[[], Any] = Net) -> None:
        self.models = [make() for _ in range(teams)]
        self.optimizers = [model.configure_optimizers() for model in self.models]
        self.step = 0

    def train(
        self, batches: list[Batch], meet: Meet, accumulate: int = 1, max_norm: float | None = None,
        together_until: int = 0,
    ) -> Copies:  # fmt: skip
        """Train; until the step `together_until` the gradients are averaged, too."""
        for window in range(0, len(batches), accumulate):
            chosen = batches[window : window + accumulate]
            for place, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                for x, y in chosen:
                    x, y = x.chunk(len(self.models))[place], y.chunk(len(self.models))[place]
                    (loss_of(model(x), y) / len(chosen)).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            self.step += 1
            if self.step <= together_until:
                self._average_gradients()
            for optimizer in self.optimizers:
                optimizer.step()
            with torch.no_grad():
                meet(self.step, [list(model.parameters()) for model in self.models])
        return self

    def _average_gradients(self) -> None:
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([parameter.grad for parameter in same]).mean(0)
            for parameter in same:
                parameter.grad = mean.clone()

    def average(self) -> dict[str, Tensor]:
        """Return the average of the models."""
        states = [model.state_dict() for model in self.models]
        return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


def averaging(period: int, start: int = 0) -> Meet:
    """Return a `Meet` that averages all teams every `period` steps, and after each step until `start`."""

    def meet(step: int, teams: list[list[Tensor]]) -> None:
        if step <= start or (step - start) % period == 0:
            mix(teams, torch.full((len(teams), len(teams)), 1 / len(teams)))

    return meet


def mix(teams: list[list[Tensor]], weights: Tensor) -> None:
    """Give each team the sum of all, weighted by its row."""
    for same in zip(*teams, strict=True):
        stacked = torch.stack(list(same))
        for parameter, row in zip(same, weights, strict=True):
            parameter.copy_(torch.tensordot(row, stacked, 1))
