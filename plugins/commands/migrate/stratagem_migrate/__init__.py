"""``stratagem migrate``: list the lines to change in a script that was written for Lightning 1.x or 2.x."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_migrate import arguments as trainer_arguments
from stratagem_migrate import definitions, devices_and_env, imports, own, ranks, trainers
from stratagem_migrate.findings import CERTAINTIES, CHANGE, CHECK, SAME, Finding
from stratagem_migrate.source import Source, read

#: Functions that take a script and yield findings; the order does not matter.
RULES = (
    imports.imports, imports.references, imports.plugin_calls, trainer_arguments.trainer_calls,
    definitions.module_methods, definitions.optimizers, definitions.callbacks,
    own.on_self, trainers.on_trainer, trainers.loading, trainers.unshuffled, trainers.seeds,
    ranks.guarded, devices_and_env.devices, devices_and_env.variables,
)  # fmt: skip


class Migrate(Command):
    """The command ``stratagem migrate``: parses scripts; does not import, run or change them."""

    help = "list the lines to change in a script written for Lightning"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("paths", nargs="+", metavar="FILE", help="a script, or a folder of scripts")
        parser.add_argument("--all", action="store_true", help="also list lines that need no change")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def run(self, arguments: argparse.Namespace) -> int:
        scripts = _scripts(arguments.paths)
        found = [finding for path in scripts for finding in examine(read(path))]
        if arguments.json:
            shown = [each for each in found if arguments.all or each.certainty != SAME]
            print(json.dumps([attrs.asdict(finding) for finding in shown], indent=2))
        else:
            print(render(found, arguments.all))
        return int(any(finding.certainty == CHANGE for finding in found))


def examine(source: Source) -> list[Finding]:
    """Return the findings about a script, in the order of its lines."""
    return sorted({finding for rule in RULES for finding in rule(source)})


def render(found: Sequence[Finding], everything: bool = False) -> str:
    """Return findings as text, grouped by certainty."""
    groups = {certainty: [each for each in found if each.certainty == certainty] for certainty in CERTAINTIES}
    lines = []
    for certainty, findings in groups.items():
        if findings and (certainty != SAME or everything):
            lines += [f"{certainty} ({CERTAINTIES[certainty]}):", *(f"  {finding}" for finding in findings), ""]
    changes, checks, same = (len(groups[certainty]) for certainty in (CHANGE, CHECK, SAME))
    stays = "" if everything or not same else f"; {same} stay as they are (--all shows them)"
    lines.append(f"{changes or 'nothing'} to change, {checks or 'nothing'} to check{stays}")
    return "\n".join(lines)


def _scripts(paths: Iterable[str]) -> list[Path]:
    """Return the scripts of `paths`, including those in folders.

    Raises:
        ConfigError: a folder has no scripts.
    """
    scripts: dict[Path, None] = {}
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path} is a folder without a .py file", expected="scripts", do="check the path")
        scripts |= dict.fromkeys(inside)
    return list(scripts)
