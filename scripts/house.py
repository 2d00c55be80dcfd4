"""Draw the house, docs/pictures/house.svg: the layers of the engine, and which of them each package imports.

    python scripts/house.py

Rows are the layers of the engine from top to bottom, and below them the packages that others import. Columns are the
packages of plugins/. A dot: a module of the column's package imports one of the row's; a ring: for its types alone.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "house.svg"
_ENGINE = ROOT / "core" / "stratagem"
_LEFT, _TOP, _CELL = 250, 150, 22


def layers() -> list[str]:
    """Return the folders of the engine, and its program, from the top layer to the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = next(
        each["layers"] for each in contracts if each["type"] == "layers" and each["containers"] == ["stratagem"]
    )
    names = [name.strip() for layer in listed for name in layer.split("|")]
    return [name for name in names if name in ("cli", "errors") or (_ENGINE / name).is_dir()]


def packages() -> dict[str, list[Path]]:
    """Return the modules of each import package of plugins/, by its name; the Trainer comes first."""
    found: dict[str, list[Path]] = {}
    for project in ROOT.glob("plugins/**/pyproject.toml"):
        for path in sorted(project.parent.glob("stratagem_*")):
            modules = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            if path.name != "stratagem_testing":  # the kit alone imports what it is told of a plugin
                modules = [module for module in modules if module.name != "conformance.py"]
            if path.is_dir() or path.suffix == ".py":
                found[path.stem] = [each for each in modules if "templates" not in each.parts]
    return dict(sorted(found.items(), key=lambda item: (item[0] != "stratagem_trainer", item[0])))


def imports(modules: list[Path]) -> dict[str, bool]:
    """Return what `modules` import, as ``stratagem.api`` or ``stratagem_ddp``, and whether not only for types."""
    found: dict[str, bool] = {}
    for path in modules:
        for name, is_needed in _imported(ast.parse(path.read_text()), is_needed=True):
            first, _, rest = name.partition(".")
            key = f"stratagem.{rest.partition('.')[0]}" if first == "stratagem" else first
            found[key] = found.get(key, False) or is_needed
    return found


def _imported(node: ast.AST, *, is_needed: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_needed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module == "stratagem":
            yield from ((f"stratagem.{alias.name}", is_needed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module, is_needed
        else:
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imported(child, is_needed=is_needed and not for_types)


def picture() -> str:
    """Return the picture as SVG."""
    columns = {name: imports(modules) for name, modules in packages().items()}
    shared = [name for name in columns if any(name in found for other, found in columns.items() if other != name)]
    rows = [(f"stratagem.{name}", name) for name in layers()] + [(name, _title(name)) for name in shared]
    width, height = _LEFT + _CELL * len(columns) + 40, _TOP + _CELL * len(rows) + 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">',
        "<title>The layers of the engine, and the packages that import them</title>",
        "<style>text{font:12px system-ui;fill:#888}line{stroke:#8884}",
        "circle{stroke:#4a7bd0;fill:none}.dot{fill:#4a7bd0}</style>",
    ]
    for x, name in enumerate(columns):
        at = _LEFT + _CELL * x + _CELL // 2
        drawn.append(f'<text transform="translate({at + 4} {_TOP - 8}) rotate(-60)">{escape(_title(name))}</text>')
        drawn.append(f'<line x1="{at}" y1="{_TOP}" x2="{at}" y2="{height - 10}"/>')
    for y, (key, title) in enumerate(rows):
        at = _TOP + _CELL * y + _CELL // 2
        if key.startswith("stratagem."):
            drawn.append(
                f'<rect x="60" y="{at - 10}" width="{_LEFT - 70}" height="20" rx="3" fill="#4a7bd022" stroke="#8888"/>'
            )
        drawn.append(f'<text x="{_LEFT - 18}" y="{at + 4}" text-anchor="end">{escape(title)}</text>')
        drawn.append(f'<line x1="{_LEFT}" y1="{at}" x2="{width - 40}" y2="{at}"/>')
        for x, (name, found) in enumerate(columns.items()):
            if key in found and key != name:
                kind = "dot" if found[key] else "ring"
                drawn.append(f'<circle cx="{_LEFT + _CELL * x + _CELL // 2}" cy="{at}" r="5" class="{kind}"/>')
    return "\n".join([*drawn, "</svg>", ""])


def _title(name: str) -> str:
    return name.removeprefix("stratagem_").replace("_", " ")


def main() -> int:
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
