"""The picture of the house in docs/architecture.md agrees with the imports."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def house(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import house

    return house


@pytest.mark.slow
def test_the_picture_is_that_of_the_code(house):
    assert house.PICTURE.read_text() == house.picture(), "run `python scripts/house.py`"
    assert "(pictures/house.svg)" in (ROOT / "docs" / "architecture.md").read_text()


def test_it_has_every_layer_and_every_package(house):
    layers = {path.parent.name for path in (ROOT / "core" / "stratagem").glob("*/__init__.py")}

    assert layers | {"cli", "errors"} == set(house.layers())
    assert len(house.packages()) >= len(list(ROOT.glob("plugins/**/pyproject.toml")))


def test_imports_are_found_where_they_are(house, tmp_path):
    path = tmp_path / "some.py"
    path.write_text("""
from __future__ import annotations
import stratagem_ddp.words
from stratagem import errors
from stratagem.api.kinds import Plugin
if TYPE_CHECKING:
    from stratagem.stack.plugins import Stack
def f():
    import stratagem.config.settings
    from . import other
""")

    found = house.imports([path])

    assert {name for name, is_needed in found.items() if is_needed} == {
        "__future__", "stratagem_ddp", "stratagem.errors", "stratagem.api", "stratagem.config"
    }  # fmt: skip
    assert found["stratagem.stack"] is False
