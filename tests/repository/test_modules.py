"""The engine grows no further, and modules import each other in one direction, in the core and in every plugin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Lines of code and modules of the engine (`make weight`). These numbers may only sink: move or merge something first.
ENGINE = (8_236, 108)


def sources() -> list[Path]:
    """Return the Python files of the core and of all plugins."""
    folders = (ROOT / "core" / "stratagem", ROOT / "plugins", ROOT / "contrib")
    return sorted(path for folder in folders for path in folder.rglob("*.py") if not path.name.startswith("test_"))


def test_the_engine_grows_no_further(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import weight

    modules = weight.modules(ROOT / "core" / "stratagem")

    assert sum(map(weight.code_lines, modules)) <= ENGINE[0]
    assert len(modules) <= ENGINE[1]


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
