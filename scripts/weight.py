"""Print how many lines of code each package has: `make weight`.

    python scripts/weight.py [FOLDER ...]

A line counts if it holds a token, unless all of its tokens are comments or docstrings.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def code_lines(path: Path) -> int:
    """Return how many lines of the module at `path` are code."""
    text = path.read_text()
    documented: set[int] = set()
    quoted: set[int] = set()  # within a text of several lines a line that is empty, or begins with #, is code
    for node in ast.walk(ast.parse(text)):
        documented.update(_docstring(node))
        if isinstance(node, ast.Constant | ast.JoinedStr):
            quoted.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    bare = {number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    return len(lines) - len(documented | (bare - quoted))


def _docstring(node: ast.AST) -> range:
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if not documented or ast.get_docstring(node, clean=False) is None:
        return range(0)
    first = node.body[0]
    return range(first.lineno, (first.end_lineno or first.lineno) + 1)


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def packages() -> list[Path]:
    """Return the folders of the repository that are counted apart: the engine, its layers, each package, the tests."""
    engine = ROOT / "core" / "stratagem"
    layers = sorted(path for path in engine.iterdir() if (path / "__init__.py").exists())
    plugins = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    return [engine, *layers, ROOT / "plugins", *plugins, ROOT / "contrib", ROOT / "tests", ROOT / "benchmarks"]


def main(arguments: list[str]) -> int:
    print(f"{'code lines':>10} {'modules':>8}  folder")
    for folder in [Path(argument).resolve() for argument in arguments] or packages():
        found = modules(folder)
        print(f"{sum(map(code_lines, found)):10,} {len(found):8}  {folder.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
