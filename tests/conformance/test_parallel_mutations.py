"""Bugs of strategies that cut the model are noticed by the kit, which passes without them."""

from __future__ import annotations

import pytest
from parallel_mutants import MUTANTS


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/testing/",
    guard="tests/conformance/test_mutations.py::test_the_kit_notices",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_kit_notices(name):
    assert MUTANTS[name].caught()


@pytest.mark.sweep(guard="tests/conformance/test_mutations.py::test_the_kit_notices")
@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_bug_the_check_passes(name):
    assert MUTANTS[name].passes()


def test_there_are_ten():
    assert len(MUTANTS) >= 10
