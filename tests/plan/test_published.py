"""How far predictions are from published and measured step times; no formula has a number that was fitted to them.

The figures stand in docs/planner-time.md. The width of the interval follows from these errors; whether it holds is tested on each
source with the width that follows from all others.
"""

from __future__ import annotations

import pytest

from plan.evaluation import (
    inside,
    kendall,
    mean_and_median,
    measured_here,
    published,
    quantiles,
    throughputs,
    without_its_source,
)
from stratagem_plan.cost import HIGH, LOW

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs():
    return published()


@pytest.fixture(scope="module")
def own():
    return measured_here()


@pytest.fixture(scope="module")
def told(runs):
    return [case for case in runs if case.told]


def test_step_times_of_runs_that_are_told_in_full(told):
    mean, median = mean_and_median(told)

    assert len(told) == 37
    assert len({case.source for case in told}) == 5
    assert mean <= 0.13  # 11.2 %
    assert median <= 0.07  # 5.6 %


def test_step_times_of_all_runs(runs):
    mean, median = mean_and_median(runs)

    assert len(runs) == 70
    assert mean <= 0.18  # 15.8 %
    assert median <= 0.10  # 8.6 %


def test_gpt_3_on_1024_devices(runs):
    (gpt_3,) = [case for case in runs if case.row["id"] == "r91"]

    assert gpt_3.real == 32.0
    assert abs(gpt_3.error) <= 0.10  # -7.6 %


def test_measured_steps_that_the_device_bounds(own):
    """Three are bounded by the host: checkpointing and FSDP of small layers."""
    by_host = [case for case in own if case.error < -0.3]
    mean, _ = mean_and_median([case for case in own if case not in by_host])

    assert len(by_host) == 3
    assert mean <= 0.08  # 6.5 %


def test_the_interval_is_what_the_errors_give(told, own):
    low, high = quantiles(told + own)

    assert pytest.approx(low, abs=0.01) == LOW
    assert pytest.approx(high, abs=0.01) == HIGH


def test_the_interval_holds_for_sources_that_it_was_not_made_from(told, own):
    held = [holds for _, holds in without_its_source(told + own)]

    assert sum(held) / len(held) >= 0.85  # 35 of 37


def test_the_interval_holds_for_runs_whose_source_does_not_tell_all(runs):
    others = [inside(case, LOW, HIGH) for case in runs if not case.told]

    assert sum(others) / len(others) >= 0.6


def test_ranking(runs, told):
    """Of pipelines and of all runs; ZeRO-3 over hundreds of nodes was slower than its links allow, and ranks too high."""
    table_2 = [case for case in runs if case.source == "arXiv 2104.04473 table 2"]
    pipelines = [case for case in table_2 if case.row["strategy"] == "parallel"]

    assert kendall(throughputs(pipelines)) >= 0.9  # 1.0
    assert kendall([(case.real, case.predicted) for case in told]) >= 0.85  # 0.93
    assert [kendall(throughputs([case for case in table_2 if size in case.name])) for size in ("174.6B", "529.6B")] == [
        pytest.approx(-0.2),
        pytest.approx(-0.6),
    ]
