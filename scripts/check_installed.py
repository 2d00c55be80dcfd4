"""Check installed distributions: run by release.py with the Python of a clean environment.

    python -P check_installed.py NAME [NAME ...] [--kit]

Imports every module, loads every entry point, and with --kit runs the conformance kit on the first plugin of each kind
in each of its Python packages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from importlib.metadata import Distribution, EntryPoint, distribution, distributions
from pathlib import Path

#: Modules that need the kit.
OF_THE_KIT = ".conformance"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--kit", action="store_true")
    arguments = parser.parse_args()
    refuse_editable()
    for name in arguments.names:
        chosen = distribution(name)
        modules = import_all(chosen)
        points = [point for point in chosen.entry_points if point.group.startswith("stratagem.")]
        plugins = first_of_each_kind([(point, point.load()) for point in points])
        checks = run_kit(chosen, plugins) if arguments.kit else 0
        print(f"{len(modules)} modules, {len(points)} entry points, {checks} checks of the kit")
    return 0


def refuse_editable() -> None:
    for each in distributions():
        origin = json.loads(each.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            raise SystemExit(f"{each.name} is installed editable; expected a wheel")


def import_all(chosen: Distribution) -> list[str]:
    """Import the modules of `chosen`, and return their names."""
    tops = {path.parts[0].removesuffix(".py") for path in chosen.files or () if path.suffix == ".py"}
    names = sorted(tops)
    for top in sorted(tops):
        module = importlib.import_module(top)
        if not Path(str(module.__file__)).is_relative_to(sys.prefix):
            raise SystemExit(f"{top} is imported from {module.__file__}; expected below {sys.prefix}")
        names += [found.name for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{top}.")]
    names = [name for name in names if not name.endswith(("__main__", OF_THE_KIT))]  # importing one runs the program
    for name in names:
        importlib.import_module(name)
    if not names:
        raise SystemExit(f"{chosen.name} has no modules")
    return names


def first_of_each_kind(loaded: list[tuple[EntryPoint, object]]) -> list[EntryPoint]:
    """Return the first plugin of each kind and package; a preset is a function, and its class is checked anyway."""
    first: dict[tuple[str, str], EntryPoint] = {}
    for point, target in loaded:
        if isinstance(target, type) and point.group != "stratagem.command":
            first.setdefault((point.group, point.module.partition(".")[0]), point)
    return list(first.values())


def run_kit(chosen: Distribution, points: list[EntryPoint]) -> int:
    """Return how many checks passed."""
    from stratagem.discovery import registry
    from stratagem_testing.command import check

    passed = 0
    for point in points:
        entry = registry.find(point.group.removeprefix("stratagem."), f"{chosen.name}:{point.name}")
        rows = check(entry, quiet=True)
        failed = [row for row in rows if row["outcome"] == "failed"]
        if failed or not rows:
            raise SystemExit(
                "\n".join([f"the kit fails {point.name}", *(f"{r['check']}: {r['reason']}" for r in failed)])
            )
        passed += sum(row["outcome"] == "passed" for row in rows)
    return passed


if __name__ == "__main__":
    sys.exit(main())
