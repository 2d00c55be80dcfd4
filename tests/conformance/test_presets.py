"""Names that this repository's packages provide pass the kit, as `stratagem plugins check NAME` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.discovery import registry
from stratagem_testing.command import check

ROOT = Path(__file__).parents[2]
OURS = "\n".join(path.read_text() for path in ROOT.glob("plugins/*/pyproject.toml"))
#: Needs a device, or DeepSpeed's asynchronous I/O, which are not here, or a model with experts (test_parallel.py has one).
NOT_BY_NAME = {"gpu", "deepspeed_stage_3_offload_nvme", "expert_parallel"}

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
