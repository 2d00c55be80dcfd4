"""The scripts of docs/gallery.md train, draw their pictures, and are what the page shows."""

from __future__ import annotations

import os
import re
import struct
import sys
from pathlib import Path

import pytest

from programs import scripts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gallery.md").read_text()
NAMES = re.findall(r"^    python examples/(\w+)\.py$", PAGE, re.MULTILINE)


def size(picture: Path) -> tuple[int, int]:
    """Return the width and height of a PNG file, in pixels."""
    return struct.unpack(">II", picture.read_bytes()[16:24])


@pytest.mark.when_changed(
    "examples/",
    "docs/gallery",
    guard="tests/repository/test_gallery.py::test_the_code_of_the_page_is_that_of_the_script",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_draws_its_picture(name, tmp_path):
    done = scripts.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")], cwd=tmp_path, capture_output=True, text=True,
        timeout=500, check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert size(tmp_path / f"{name}.png") == size(ROOT / "docs" / "gallery" / f"{name}.png")


def test_the_page_has_every_picture_and_the_pictures_are_small():
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "gallery").iterdir()}

    assert sorted(pictures) == sorted(NAMES)
    assert max(pictures.values()) < 60_000


@pytest.mark.parametrize(
    ("name", "code"), [*zip(NAMES, re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL), strict=True)]
)
def test_the_code_of_the_page_is_that_of_the_script(name, code):
    script = (ROOT / "examples" / f"{name}.py").read_text()
    assert "".join(code.split()) in "".join(script.split())  # the page has another indentation
    assert len(code.splitlines()) <= 10
