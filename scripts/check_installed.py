"""Check installed distributions: run by release.py with the Python of a clean environment.

    python -P check_installed.py NAME [NAME ...] [--kit N [N ...]]

Imports every module, loads every entry point, and with --kit runs the conformance kit, with N processes, on the first
plugin of each kind in each of its Python packages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from importlib.metadata import Distribution, EntryPoint, distribution, distributions
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--kit", type=int, nargs="+", metavar="N")
    arguments = parser.parse_args()
    refuse_editable()
    for name in arguments.names:
        chosen = distribution(name)
        modules = import_all(chosen)
        points = [point for point in chosen.entry_points if point.group.startswith("stratagem.")]
        plugins = first_of_each_kind([(point, point.load()) for point in points])
        checks = run_kit(chosen, plugins, arguments.kit) if arguments.kit else 0
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
    names = [name for name in names if not name.endswith("__main__")]  # importing it runs the program
    for name in names:
        importlib.import_module(name)
    if not names:
        raise SystemExit(f"{chosen.name} has no modules")
    return names


#: Plugins that the kit cannot check by their names alone, and why; tests/conformance checks them with what they need.
NOT_BY_NAME = {
    "ddp2": "takes one process per node",
    "dp": "trains on several devices from one process",
    "post_localsgd": "model_averaging_period has no default",
    "activation_checkpointing": "policy has no default",
    "sync_batchnorm": "the models of the kit have no batch normalization",
}
#: Checks of the kit that a plugin may fail; its own tests say why.
EXEMPT = {"report": "test_its_state_can_be_saved"}  # its state is time, which goes on


def first_of_each_kind(loaded: list[tuple[EntryPoint, object]]) -> list[EntryPoint]:
    """Return the first plugin of each kind and package; a preset is a function, and its class is checked anyway."""
    first: dict[tuple[str, str], EntryPoint] = {}
    for point, target in loaded:
        if isinstance(target, type) and point.group != "stratagem.command" and point.name not in NOT_BY_NAME:
            first.setdefault((point.group, point.module.partition(".")[0]), point)
    return list(first.values())


def run_kit(chosen: Distribution, points: list[EntryPoint], world_sizes: list[int]) -> int:
    """Return how many checks passed."""
    from stratagem.discovery import registry
    from stratagem_testing.command import check

    passed = 0
    for point in points:
        entry = registry.find(point.group.removeprefix("stratagem."), f"{chosen.name}:{point.name}")
        rows = check(entry, world_sizes, quiet=True)
        failed = [row for row in rows if row["outcome"] == "failed" and row["check"] != EXEMPT.get(point.name)]
        if failed or not rows:
            raise SystemExit(
                "\n".join([f"the kit fails {point.name}", *(f"{r['check']}: {r['reason']}" for r in failed)])
            )
        passed += sum(row["outcome"] == "passed" for row in rows)
    return passed


if __name__ == "__main__":
    sys.exit(main())
