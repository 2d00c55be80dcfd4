"""What docs/lightning-api.md calls the same behaves the same: programs run under Lightning and under stratagem."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import lightning_programs
from .test_lightning_api import environment, sections

PROGRAMS = Path(lightning_programs.__file__)


def test_a_program_shows_each_name_that_the_page_calls_the_same():
    shown, page = set().union(*lightning_programs.SHOWN.values()), sections()

    assert {(title, name) for title, (same, _) in page.items() for name in same} - shown == set()
    assert shown - {(title, name) for title, (same, others) in page.items() for name in (*same, *others)} == set()


@pytest.mark.when_changed(
    "docs/lightning-api.md", "tests/repository/lightning_programs.py",
    guard="tests/repository/test_lightning_behaviour.py::test_a_program_shows_each_name_that_the_page_calls_the_same",
)  # fmt: skip
@pytest.mark.slow
def test_each_program_returns_the_same_under_lightning():
    cache = environment(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stratagem")
    theirs, ours = returned(cache / "bin/python", "lightning.pytorch"), returned(sys.executable, "stratagem")

    different = {name: differences(theirs[name], ours[name]) for name in lightning_programs.PROGRAMS}
    assert {name: found[:5] for name, found in different.items() if found} == {}
    refused = [name for name, value in theirs.items() if isinstance(value, str)]
    assert refused == []


def returned(python, library):
    """Return what the programs returned under `library`."""
    own = next(path for path in sys.path if path.endswith("site-packages"))
    result = subprocess.run(
        [python, PROGRAMS, library], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": own}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return {name: only_the_same(value) for name, value in json.loads(result.stdout.splitlines()[-1]).items()}


def only_the_same(value):
    """Return `value` without calls of hooks that the page calls changed, or does not have."""
    if not isinstance(value, list):
        return value
    page = sections()
    same = {"module": page["LightningModule"][0], "callback": page["Callback"][0]}
    return [each for each in value if not (is_call(each) and each[1] not in same[each[0]])]


def is_call(value):
    return isinstance(value, list) and len(value) == 3 and value[0] in ("module", "callback")


def differences(one, other, where=""):
    """Return where two values of JSON differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        parts = enumerate(zip(one, other, strict=True))
        return [found for number, pair in parts for found in differences(*pair, f"{where}[{number}]")]
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    equal = math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4) if numbers else one == other
    return [] if equal else [f"{where}: {one!r} there and {other!r} here"]
