"""Write how many lines of code each distribution may have: `make ceilings`, where lines were moved or removed.

    python scripts/ceilings.py

Writes what `make weight` counts into `tests/repository/code_lines.toml`. A distribution may have gained what another
one lost; a sum, or the number of modules of the core, that would rise is refused.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from weight import ROOT, code_lines, modules

FILE = ROOT / "tests" / "repository" / "code_lines.toml"
#: Numbers by name: code lines of each distribution, modules, sums.
Counts = dict[str, dict[str, int]]
_HEADER = """\
# How many lines of code each distribution has at most, as `make weight` counts them. These numbers may only be lowered:
# a distribution that needs more takes it from another one in the same commit. `make ceilings` writes the file. After a
# merge: `git checkout --ours tests/repository/code_lines.toml`, then `make ceilings`.
"""


def read() -> Counts:
    return tomllib.loads(FILE.read_text())


def count() -> Counts:
    """Return what the repository has."""
    core = modules(ROOT / "core" / "stratagem")
    folders = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
    lines = {"core": _lines(core), **{folder.name: _lines(modules(folder)) for folder in folders}}
    lines["contrib"] = _lines(modules(ROOT / "contrib"))
    return {"lines": lines, "modules": {"core": len(core)}, "sums": sums(lines)}


def sums(lines: dict[str, int]) -> dict[str, int]:
    """Return the sum of the core and plugins/, and that with contrib/."""
    return {"core_and_plugins": sum(lines.values()) - lines["contrib"], "everything": sum(lines.values())}


def excesses(found: Counts, ceilings: Counts) -> list[str]:
    """Return a sentence for each number that is too large, for what has no ceiling, and for a ceiling of nothing."""
    names = {(table, name) for table in ("lines", "modules") for name in found[table].keys() | ceilings[table].keys()}
    wrong = []
    for table, name in sorted(names):
        number, ceiling = found[table].get(name, 0), ceilings[table].get(name, 0)
        what = "lines of code" if table == "lines" else "modules"
        if name not in found[table]:
            wrong.append(f"{name} has a ceiling of {ceiling:,} {what} and does not exist; run `make ceilings`")
        elif number > ceiling:
            wrong.append(
                f"{name} has {number:,} {what}; its ceiling is {ceiling:,}; remove or move {number - ceiling:,}, "
                "or take as many from another distribution in this commit and run `make ceilings`"
            )
    for name, total in sums(ceilings["lines"]).items():
        if (more := total - ceilings["sums"][name]) > 0:
            wrong.append(
                f"the ceilings of {name} sum to {total:,}; expected {total - more:,}; lower others by {more:,}"
            )
    return wrong


def main() -> None:
    found, before = count(), read()
    grown = [
        f"{name} would rise from {before[table][name]:,} to {number:,} {table.replace('sums', 'lines')}"
        for table in ("modules", "sums")
        for name, number in found[table].items()
        if number > before[table][name]
    ]
    if grown:
        raise SystemExit("\n".join([*grown, *excesses(found, before), "nothing was written"]))
    FILE.write_text(as_text(found))


def as_text(found: Counts) -> str:
    """Return the file: a number in each line, so that branches that change different ones merge."""
    tables = (f"[{table}]\n" + "".join(f"{name} = {n:_}\n" for name, n in found[table].items()) for table in found)
    return "\n".join([_HEADER, *tables])


def _lines(paths: list[Path]) -> int:
    return sum(map(code_lines, paths))


if __name__ == "__main__":
    sys.exit(main())
