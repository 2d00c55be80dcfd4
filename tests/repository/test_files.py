"""What the files name that people and services look for in a repository: commands, paths, versions, requirements."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from stratagem.cli import parser

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
#: Files with text or commands that no other test reads.
FILES = [
    *GITHUB.glob("*.*"),
    *GITHUB.glob("ISSUE_TEMPLATE/*"),
    *(ROOT / name for name in (".pre-commit-config.yaml", "Dockerfile", ".devcontainer/devcontainer.json")),
]
#: How a command stands in these files: quoted, in a block, or as an instruction.
_COMMAND = r'(?:[`"]|^    |RUN |entry: )'
_INSTRUCTIONS = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def project(folder: str = "") -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]


def found(pattern: str) -> set[str]:
    return {match for path in FILES for match in re.findall(pattern, path.read_text(), re.MULTILINE)}


# --- Commands and paths ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", sorted(found(rf"{_COMMAND}stratagem ([a-z][a-z -]*)")))
def test_a_command_of_the_program_exists(line):
    here = parser()
    for word in line.split():
        if word.startswith("--"):
            assert word in here._option_string_actions
        else:
            (choices,) = [each.choices for each in here._actions if isinstance(each, argparse._SubParsersAction)]
            here = choices[word]


def test_targets_of_make_exist():
    targets = found(rf"{_COMMAND}make ([\w./-]+)")
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)

    assert {"lint", "types", "test-changed", ".venv/.installed", ".venv/.installed-dev"} <= targets
    assert done.returncode == 0, done.stderr


def test_paths_exist():
    named = {GITHUB / path for path in found(r"\]\(([^)#]+)\)")} | {ROOT / path for path in found(r"`(docs/[\w./]+)`")}

    assert GITHUB / "../docs/deepspeed.md" in named
    assert [str(path) for path in named if not path.exists()] == []


def test_dependabot_reads_every_distribution():
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    (folders,) = [update["directories"] for update in updates if update["package-ecosystem"] == "pip"]
    read = {path for folder in folders for path in ROOT.glob(f"{folder[1:]}/pyproject.toml".lstrip("/"))}

    assert read == {
        path for part in ("", "core/", "plugins/*/", "contrib/*/") for path in ROOT.glob(f"{part}pyproject.toml")
    }


# --- One value in several files ----------------------------------------------------------------------------------


def test_the_citation_is_that_of_the_package():
    citation, package = yaml.safe_load((ROOT / "CITATION.cff").read_text()), project()

    assert [citation[name] for name in ("title", "abstract", "license", "repository-code")] == [
        package["name"], package["description"], package["license"], package["urls"]["Source"],
    ]  # fmt: skip


def test_maintainers_have_one_address():
    owners = (GITHUB / "CODEOWNERS").read_text().split()[-1]

    assert found(r"[\w.]+@\w[\w.]+\w") == {owners}


def test_versions_of_python_are_those_that_ci_tests():
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    named = found(r"python:(\d+\.\d+)") | set(re.findall(r"python:(\d+\.\d+)", str(jobs)))

    assert project()["requires-python"] == f">={tested[0]}"
    assert "3.12" in named
    assert named <= set(tested)


def test_the_recipe_of_conda_is_that_of_the_core():
    recipe, core = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text()), project("core")
    builder = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["build-system"]["requires"]
    python = f"python{core['requires-python']}"

    assert recipe["package"]["name"] == core["name"]
    assert recipe["context"]["version"] == core["version"]
    assert same(recipe["requirements"]["run"]) == same([python, *core["dependencies"]])
    assert same(recipe["requirements"]["host"]) == same([python, "pip", *builder])
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script) for script in core["scripts"].items()]
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (core["description"], core["license"])


def same(lines: list[str]) -> dict[str, str]:
    """Return ranges of versions by name, with the names of PyPI."""
    requirements = [Requirement(re.sub("^pytorch ", "torch ", line)) for line in lines]
    return {each.name: str(each.specifier) for each in requirements}


# --- Forms -------------------------------------------------------------------------------------------------------


def test_containers_are_read():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    words = [line.split()[0] for line in lines if not line.startswith("#")]

    assert set(words) <= _INSTRUCTIONS
    assert (words[0], lines[-1]) == ("FROM", 'CMD ["stratagem", "doctor"]')
    assert json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["image"].startswith("python:")


@pytest.fixture
def decisions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "site")
    from pages import decisions

    return decisions


def test_the_list_of_decisions_has_all_and_what_replaced_them(decisions):
    folder = ROOT / "docs" / "decisions"
    replaced = re.findall(r"^\| (\d+) .*eplaced by \[(\d+)\]\((\S+)\) \|$", decisions.page(ROOT), re.MULTILINE)

    assert (folder / "README.md").read_text() == decisions.page(ROOT), "run `python scripts/site/pages/decisions.py`"
    assert [
        row for row in replaced if row[1] <= row[0] or not row[2].startswith(row[1]) or not (folder / row[2]).exists()
    ] == []


def test_a_decision_that_was_replaced_says_by_which(decisions, tmp_path):
    folder = tmp_path / "docs" / "decisions"
    folder.mkdir(parents=True)
    (folder / "0009-before.md").write_text(
        "# 0009: Before\n\nIn part replaced by [0046](0046-now.md): where.\n\nText.\n"
    )
    (folder / "0046-now.md").write_text("# 0046: Now\n\nText.\n")

    assert decisions.page(tmp_path).endswith(
        "| 0009 | [Before](0009-before.md) | in part replaced by [0046](0046-now.md) |\n"
        "| 0046 | [Now](0046-now.md) | holds |\n"
    )


def test_decisions_have_the_same_headings_in_one_order():
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    headings = {path.name: re.findall("^## (.+)$", path.read_text(), re.MULTILINE) for path in pages}

    assert len(pages) > 20
    assert {
        name: found for name, found in headings.items() if found != ["Decision", "Considered", "Consequences"]
    } == {}


def test_numbers_of_decisions_that_are_named_are_those_of_pages():
    numbers = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    listing = ["git", "grep", "-hoIE", r"decisions?[ /][0-9]{4}\b", "--", "*.md", "*.py", "*.toml", "Makefile"]
    named = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")

    assert {name[-4:] for name in named if name} - numbers == set()
