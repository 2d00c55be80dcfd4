"""Fragments of docs/changes become a section of CHANGELOG.md."""

from __future__ import annotations

import datetime
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DAY = datetime.date(2026, 1, 2)


@pytest.fixture(scope="module")
def changelog():
    specification = importlib.util.spec_from_file_location("changelog", ROOT / "scripts" / "changelog.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs" / "changes").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    return tmp_path


def write(repository, **fragments):
    for name, text in fragments.items():
        (repository / "docs" / "changes" / f"{name.replace('_', '.')}.md").write_text(text)


def test_lists_and_paragraphs_become_items_by_kind_and_id(changelog, repository):
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2025-12-31)\n\n### Added\n\n* All.\n")
    write(repository, **{
        "0003_fixed": "A first\nline.\n\nAnother paragraph.\n",
        "0002_added": "* One.\n* Two, on\n  two lines.\n",
        "0001_fixed": "Zero.\n",
    })  # fmt: skip
    changelog.release(repository, "0.2.0", DAY)

    assert (repository / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## 0.2.0 (2026-01-02)\n\n"
        "### Added\n\n* One.\n* Two, on\n  two lines.\n\n"
        "### Fixed\n\n* Zero.\n* A first\n  line.\n* Another paragraph.\n\n"
        "## 0.1.0 (2025-12-31)\n\n### Added\n\n* All.\n"
    )
    assert list((repository / "docs" / "changes").iterdir()) == []


@pytest.mark.parametrize(
    ("fragments", "version", "message"),
    [
        ({"0001_added": "One."}, "0.3.0", "VERSION is '0.3.0'; expected '0.2.0'"),
        ({}, "0.2.0", "docs/changes is empty"),
        ({"0001_improved": "One."}, "0.2.0", "docs/changes has 0001.improved.md; expected <id>.<added"),
    ],
)
def test_what_cannot_be_released_is_refused_and_kept(changelog, repository, fragments, version, message):
    write(repository, **fragments)
    before = sorted(repository.rglob("*"))
    with pytest.raises(SystemExit, match=message):
        changelog.release(repository, version, DAY)

    assert sorted(repository.rglob("*")) == before


def test_a_version_is_released_once(changelog, repository):
    write(repository, **{"0001_added": "One."})
    changelog.release(repository, "0.2.0", DAY)
    write(repository, **{"0002_added": "Two."})

    with pytest.raises(SystemExit, match="has 0.2.0 already"):
        changelog.release(repository, "0.2.0", DAY)
    assert "Two" not in (repository / "CHANGELOG.md").read_text()


def test_the_fragments_of_this_repository_have_names_that_are_read(changelog):
    assert all(list(changelog.items(path.read_text())) for path in changelog.fragments(ROOT))
