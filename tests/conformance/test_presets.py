"""Every name that this repository's packages provide passes the kit, as `stratagem plugins check NAME` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.api.kinds import KINDS
from stratagem.stack import registry
from stratagem_testing.command import check

ROOT = Path(__file__).parents[2]
OURS = "\n".join(path.read_text() for path in ROOT.glob("plugins/*/*/pyproject.toml"))
#: Cannot be made from a name alone, or needs a device, or a model with experts (test_parallel.py has one).
NOT_BY_NAME = {"lambda", "gpu", "expert_parallel"}

ENTRIES = [
    entry
    for entry in registry.entries()
    if entry.kind in KINDS and f'name = "{entry.distribution}"' in OURS and entry.name not in NOT_BY_NAME
]


@pytest.mark.sweep(
    reason="The kit runs as a program of its own for each of these names, which takes minutes; make test runs it for one or"
    " more classes of most kinds, in tests/conformance."
)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_it_passes(entry):
    rows = check(entry, (1, 2), quiet=True)

    assert len(rows) >= 5
    assert [row for row in rows if row["outcome"] == "failed"] == []
