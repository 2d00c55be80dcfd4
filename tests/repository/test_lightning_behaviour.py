"""What docs/lightning-api.md calls the same behaves the same: programs run under Lightning and under stratagem."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from . import lightning_programs
from .test_lightning_api import environment, sections

PROGRAMS = Path(lightning_programs.__file__)


def test_a_program_shows_each_name_that_the_page_calls_the_same():
    shown, page = set().union(*lightning_programs.SHOWN.values()), sections()

    assert {(title, name) for title, (same, _) in page.items() for name in same} - shown == set()
    assert shown - {(title, name) for title, (same, others) in page.items() for name in (*same, *others)} == set()


@pytest.mark.slow
def test_a_program_uses_each_name_that_it_shows():
    called = {(PLACES[place], name) for place, name in calls_of_hooks()}
    used = {(section, name) for program, shown in lightning_programs.SHOWN.items() for section, name in shown
            if name in names_in(program)}  # fmt: skip

    same = {(title, name) for title, (same, _) in sections().items() for name in same}
    assert same - used - called == set()


PLACES = {"module": "LightningModule", "callback": "Callback"}


def calls_of_hooks():
    """Return the hooks that programs see called, which they record without naming them: (place, name)."""
    api, found = lightning_programs.library("stratagem"), []
    for program in ("hooks_of_fit", "hooks_of_evaluation"):
        with tempfile.TemporaryDirectory() as folder:
            found += lightning_programs.PROGRAMS[program](api, Path(folder))
    return {tuple(call[:2]) for call in found}


def names_in(program, seen=None):
    """Return the attributes, keywords, methods and words that are in a program and in what it uses of its module."""
    seen = set() if seen is None else seen
    seen.add(program)
    found = set()
    for node in (each for part in DEFINED[program] for each in ast.walk(part)):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.update(text.split())
            case ast.Name(id=name) if name in DEFINED and name not in seen:
                found |= names_in(name, seen)
    return found


#: The body of each function of the programs' module.
DEFINED = {each.name: each.body for each in ast.parse(PROGRAMS.read_text()).body if isinstance(each, ast.FunctionDef)}


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
    return isinstance(value, list) and len(value) > 1 and value[0] in ("module", "callback")


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
