"""Two features of a training step that meet train as a plain loop of torch does, or are refused with a sentence."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from . import features, outcomes
from .outcomes import REFUSED, Outcome

ROOT = Path(__file__).parents[2]


def ids(combinations):
    return [pytest.param(each, id=features.title(each)) for each in combinations]


def check(combination, found):
    refusal = REFUSED.get(features.title(combination), "")

    assert found == Outcome(refusal=refusal), (
        "a refusal that is right is noted by `python -m pairs.refusals` (in tests)"
    )


# --- One process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ids((each,) for each in features.FEATURES))
def test_a_feature_equals_a_plain_loop_which_differs_without_it(feature):
    check(feature, outcomes.outcome(feature))
    assert outcomes.invisible(feature) == []


@pytest.mark.parametrize("pair", ids(features.PAIRS))
def test_a_pair_equals_a_plain_loop_or_is_refused(pair):
    check(pair, outcomes.outcome(pair))


@pytest.mark.sweep(guard="tests/pairs/test_pairs.py::test_a_feature_equals_a_plain_loop_which_differs_without_it")
@pytest.mark.parametrize("pair", ids(each for each in features.PAIRS if features.title(each) not in REFUSED))
def test_both_features_of_a_pair_change_the_plain_loop(pair):
    assert outcomes.invisible(pair) == []


# --- Two processes -------------------------------------------------------------------------------------------------


@functools.cache
def in_two_processes(name):
    """Return the outcomes of all pairs with a comm hook or strategy, which share their processes."""
    folder = Path(tempfile.mkdtemp(prefix="stratagem-test-"))
    try:
        return outcomes.outcomes([each for each in two_process_pairs() if each[-1].name == name], folder)
    finally:
        shutil.rmtree(folder)


def two_process_pairs():
    return [*features.HOOK_PAIRS, *features.STRATEGY_PAIRS]


def grouped(pairs):
    """Return `pairs` as parameters; those with one comm hook or strategy run on one worker."""
    group = "pairs with {}".format
    return [
        pytest.param(each, id=features.title(each), marks=pytest.mark.xdist_group(group(each[-1]))) for each in pairs
    ]


@pytest.mark.when_changed(
    "plugins/comm_hooks/", cases=[features.title(each) for each in features.HOOK_PAIRS if each[-1].name == "int8"]
)
@pytest.mark.slow
@pytest.mark.parametrize("pair", grouped(each for each in features.HOOK_PAIRS if each[-1].name in ("topk", "int8")))
def test_a_pair_with_a_comm_hook_equals_a_plain_loop_or_is_refused(pair):
    check(pair, in_two_processes(pair[-1].name)[features.title(pair)])


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_preloaded")
@pytest.mark.sweep(guard="tests/pairs/test_pairs.py::test_a_pair_with_a_comm_hook_equals_a_plain_loop_or_is_refused")
@pytest.mark.parametrize("pair", grouped(each for each in two_process_pairs() if each[-1].name not in ("topk", "int8")))
def test_a_pair_in_two_processes_equals_a_plain_loop_or_is_refused(pair):
    check(pair, in_two_processes(pair[-1].name)[features.title(pair)])


@pytest.mark.slow
@pytest.mark.usefixtures("deepspeed_preloaded")
@pytest.mark.sweep(guard="tests/pairs/test_pairs.py::test_a_pair_equals_a_plain_loop_or_is_refused")
@pytest.mark.parametrize("feature", features.FEATURES, ids=str)
@pytest.mark.parametrize("strategy", features.STRATEGIES, ids=str)
def test_two_features_and_a_strategy_equal_a_plain_loop_or_are_refused(strategy, feature, tmp_path):
    triples = [each for each in features.TRIPLES if each[0] is feature and each[-1] is strategy]
    found = outcomes.outcomes(triples, tmp_path)

    assert {title: one.differences for title, one in found.items() if one.differences} == {}


# --- The table -----------------------------------------------------------------------------------------------------


def test_the_docs_list_what_is_refused():
    assert outcomes.table() in (ROOT / "docs" / "pairs.md").read_text()


def test_refusals_are_of_pairs_that_are_tried():
    tried = {features.title(each) for each in [*features.PAIRS, *two_process_pairs()]}

    assert REFUSED.keys() <= tried
