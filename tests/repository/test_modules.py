"""No distribution grows further, and modules import each other in one direction, in the core and in every plugin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources() -> list[Path]:
    """Return the Python files of the core and of all plugins."""
    folders = (ROOT / "core" / "stratagem", ROOT / "plugins", ROOT / "contrib")
    return sorted(path for folder in folders for path in folder.rglob("*.py") if not path.name.startswith("test_"))


@pytest.fixture
def ceilings(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import ceilings

    return ceilings


@pytest.mark.slow
def test_no_distribution_grows_further(ceilings):
    wrong = ceilings.excesses(ceilings.count(), ceilings.read())

    assert wrong == [], "\n".join(wrong)


LIMITS = {
    "lines": {"core": 100, "ddp": 20, "contrib": 7},
    "modules": {"core": 3},
    "sums": {"core_and_plugins": 120, "everything": 127},
}


@pytest.mark.parametrize(
    ("lines", "limits", "messages"),
    [
        ({"core": 100, "ddp": 20, "contrib": 7}, {}, []),
        ({"core": 90, "ddp": 20, "contrib": 7}, {}, []),
        (
            {"core": 99, "ddp": 21, "contrib": 7},
            {},
            [
                "ddp has 21 lines of code; its ceiling is 20; remove or move 1, or take as many from another distribution "
                "in this commit and run `make ceilings`"
            ],
        ),
        ({"core": 99, "ddp": 21, "contrib": 7}, {"core": 99, "ddp": 21}, []),
        (
            {"core": 99, "ddp": 21, "contrib": 7},
            {"ddp": 21},
            [
                "the ceilings of core_and_plugins sum to 121; expected 120; lower others by 1",
                "the ceilings of everything sum to 128; expected 127; lower others by 1",
            ],
        ),
        (
            {"core": 99, "contrib": 27},
            {},
            ["contrib has 27", "ddp has a ceiling of 20 lines of code and does not exist"],
        ),
        ({"core": 99, "ddp": 20, "contrib": 7, "new": 1}, {}, ["new has 1 lines of code; its ceiling is 0"]),
    ],
)
def test_what_needs_more_takes_it_from_another(ceilings, lines, limits, messages):
    found = {"lines": lines, "modules": {"core": 3}}
    wrong = ceilings.excesses(found, {**LIMITS, "lines": {**LIMITS["lines"], **limits}})

    assert len(wrong) == len(messages)
    assert all(sentence.startswith(message) for sentence, message in zip(wrong, messages, strict=True))


def test_a_sum_that_would_rise_is_not_written(ceilings, monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "FILE", tmp_path / "code_lines.toml")
    ceilings.FILE.write_text("[lines]\ncore = 100\nddp = 20\ncontrib = 7\n\n[modules]\ncore = 3\n\n"
                             "[sums]\ncore_and_plugins = 120\neverything = 127\n")  # fmt: skip
    monkeypatch.setattr(ceilings, "count", lambda: {**LIMITS, "sums": {"core_and_plugins": 121, "everything": 127}})
    with pytest.raises(SystemExit, match="core_and_plugins would rise from 120 to 121 lines\nnothing was written"):
        ceilings.main()

    lines = {"core": 95, "ddp": 23, "contrib": 9}
    monkeypatch.setattr(ceilings, "count", lambda: {**LIMITS, "lines": lines, "sums": ceilings.sums(lines)})
    ceilings.main()

    assert ceilings.read() == {**LIMITS, "lines": lines, "sums": {"core_and_plugins": 118, "everything": 127}}


def test_comments_and_docstrings_weigh_nothing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import weight

    path = tmp_path / "some.py"
    path.write_text(
        '"""Text.\n\nMore."""\n\n# why\nx = """a\nb"""\n\n\ndef f():\n    """Text."""\n    return x  # so\n'
    )

    assert weight.code_lines(path) == 4


@pytest.mark.slow
def test_modules_import_each_other_without_cycles():
    """Imports for annotations count: a reader follows them too."""
    modules = {dotted(path): path for path in sources()}
    imports = {name: imported_by(name, path, set(modules)) for name, path in modules.items()}

    assert cycles(imports) == []


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}, [["a", "b"], ["c", "d"]]),
    ],
)
def test_cycles_are_found(imports, expected):
    assert cycles(imports) == expected


def dotted(path: Path) -> str:
    """Return the name under which `path` is imported."""
    parts = [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").is_file():
            break
        parts.insert(0, folder.name)
    return ".".join(parts).removesuffix(".__init__")


def imported_by(name: str, path: Path, modules: set[str]) -> set[str]:
    """Return those of `modules` that `name` imports anywhere: at the top, in functions and for annotations."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            levels_up = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*levels_up, *filter(None, [node.module])]) if node.level else node.module or ""
            found |= {f"{base}.{each.name}" if f"{base}.{each.name}" in modules else base for each in node.names}
    return (found & modules) - {name}


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that reach each other, each sorted."""
    reached = {name: _reached(name, imports) for name in imports}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in imports}
    return sorted(sorted(cycle) for cycle in found if len(cycle) > 1)


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached, ahead = {start}, [start]
    while ahead:
        new = imports[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached
