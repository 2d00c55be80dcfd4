"""The kit bites: it passes a correct plugin, and notices every bug that is put into one."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, Counting, Replicated

from stratagem_testing import CallbackConformance, StrategyConformance

#: Bugs that the kit cannot see, and why.
SURVIVORS: dict[str, str] = {}


class TestReplicated(StrategyConformance):
    """The plugin that the mutants are made of, correct and given as an instance."""

    plugin = Replicated()


class TestCounting(CallbackConformance):
    plugin = Counting()


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_kit_notices(mutant):
    caught = mutant.caught_by()

    assert (caught is None) == (mutant.name in SURVIVORS), f"caught by {caught}"


def test_at_least_95_of_a_hundred_are_caught():
    assert len(MUTANTS) >= 40
    assert len(SURVIVORS) / len(MUTANTS) <= 0.05
