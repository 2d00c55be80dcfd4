"""Names that this repository's packages provide pass the kit, as `stratagem plugins check NAME` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem_testing import command
from stratagem_testing.command import check

ROOT = Path(__file__).parents[2]
OURS = "\n".join(path.read_text() for path in ROOT.glob("plugins/*/pyproject.toml"))
#: Needs a device, or DeepSpeed's asynchronous I/O, which are not here.
NOT_BY_NAME = {"gpu", "deepspeed_stage_3_offload_nvme"}

ENTRIES = [
    entry
    for entry in registry.entries()
    if entry.kind in registry.kinds() and f'name = "{entry.distribution}"' in OURS and entry.name not in NOT_BY_NAME
]


@pytest.mark.sweep(
    reason="The kit runs as a program of its own for each of these names, which takes minutes; make test runs it for one or"
    " more classes of most kinds, in tests/conformance."
)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_it_passes(entry):
    """A strategy's name stands for a class and options; test_strategies.py has each class in one process too."""
    rows = check(entry, quiet=True)

    assert len(rows) >= 5
    assert [row for row in rows if row["outcome"] == "failed"] == []


@pytest.mark.when_changed(
    "plugins/testing/", guard="tests/conformance/test_presets.py::test_each_check_is_that_of_the_plugin_that_is_named"
)
@pytest.mark.slow
def test_options_and_tolerance_take_the_place_of_what_the_package_states():
    entry = registry.find("comm_hook", "int8")
    wrong = check(entry, quiet=True, training_tolerance=1e-9)
    right = check(entry, {"error_feedback": False}, quiet=True, tolerance=2e-2, training_tolerance=2e-2)

    assert {row["check"].partition("[")[0] for row in wrong if row["outcome"] == "failed"} >= {"test_trains"}
    assert [row for row in right if row["outcome"] == "failed"] == []


def test_a_missing_option_and_an_attribute_of_no_check_are_one_line(monkeypatch):
    entry = registry.find("callback", "early_stopping")
    with pytest.raises(ConfigError, match="EarlyStoppingConformance has no tolerance"):
        check(entry, tolerance=1.0)
    monkeypatch.setattr(command, "conformance_class", lambda entry: registry.kinds()[entry.kind].conformance)
    with pytest.raises(ConfigError, match="callbacks.early_stopping lacks the option 'monitor'"):
        check(entry)


@pytest.mark.slow
def test_each_check_is_that_of_the_plugin_that_is_named():
    by_kind = {entry.kind: entry for entry in ENTRIES if entry.kind in ("accelerator", "environment")}
    accelerator, environment = (
        {row["check"] for row in check(by_kind[kind], quiet=True, world_sizes=(1,))}
        for kind in ("accelerator", "environment")
    )

    assert accelerator
    assert environment
    assert accelerator != environment
