"""``stratagem migrate``: list what to change in a project that was written for Lightning 1.x or 2.x, and change it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from stratagem.api import Command
from stratagem.errors import ConfigError
from stratagem_migrate import arguments as trainer_arguments
from stratagem_migrate import (
    definitions,
    devices_and_env,
    files,
    hydra_calls,
    imports,
    other_uses,
    outputs,
    own,
    ranks,
    strategies,
    trainers,
    yaml_files,
)
from stratagem_migrate.findings import CERTAINTIES, CHANGE, CHECK, SAME, Finding
from stratagem_migrate.notebooks import Notebook, about_magics
from stratagem_migrate.source import Elsewhere, Source, content_of
from stratagem_migrate.yaml_files import YamlFile

_File = Source | YamlFile
#: The class of a file, by the end of its name; others are scripts.
_KINDS: Final[dict[str, type[_File]]] = {files.NOTEBOOK: Notebook, **dict.fromkeys(files.YAML, YamlFile)}

#: Functions that take a script and yield findings; the order does not matter.
_RULES: Final = (
    imports.imports, imports.references, imports.plugin_calls, trainer_arguments.trainer_calls,
    definitions.module_methods, definitions.optimizers, definitions.callbacks, definitions.derived,
    own.on_self, trainers.seeds, devices_and_env.devices, devices_and_env.variables, hydra_calls.instantiated,
    other_uses.switched_off, other_uses.minus_one, other_uses.utilities, other_uses.copied_lists,
    other_uses.private_of_loggers,
    outputs.of_training, strategies.subclasses, strategies.axes, about_magics,
)  # fmt: skip

#: Those that a script which does not use Lightning has nothing to do with.
_RULES_ABOUT_LIGHTNING: Final = (trainers.on_trainer, trainers.loading, trainers.unshuffled, ranks.guarded)


class Migrate(Command):
    """The command ``stratagem migrate``: parses scripts and never imports or runs them."""

    help = "list the lines to change in a project written for Lightning, and rewrite them"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("paths", nargs="+", metavar="FILE", help="a script, a notebook, a YAML file, or a folder")
        parser.add_argument("--all", action="store_true", help="also list lines that need no change")
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--json", action="store_true", help="print JSON")
        output.add_argument("--diff", action="store_true", help="print what --write would change")
        output.add_argument("--write", action="store_true", help="rewrite the files, as far as the change is certain")
        parser.add_argument("--force", action="store_true", help="with --write: also files that git cannot restore")

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.force and not arguments.write:
            raise ConfigError("--force was given without --write", do="pass --write, or leave --force out")
        sources, failed = _read_all(files.scripts(arguments.paths))
        if arguments.diff or arguments.write:
            return self._rewrite(sources, arguments) | failed
        found = [source.placed(finding) for source in sources for finding in examine_file(source)]
        if arguments.json:
            shown = [each for each in found if arguments.all or each.certainty != SAME]
            print(json.dumps([attrs.asdict(finding) for finding in shown], indent=2))
        else:
            print(render(found, arguments.all))
        return int(any(finding.certainty == CHANGE for finding in found)) | failed

    def _rewrite(self, sources: Sequence[_File], arguments: argparse.Namespace) -> int:
        rewritten, refused = _rewrite_all(sources)
        changes = [
            files.Rewritten(old.path, old.in_file(old.text), old.in_file(new), old.encoding) for old, new in rewritten
        ]
        if arguments.write:
            files.write(changes, arguments.force)
        for change in changes:
            if change.is_changed:
                print(change.diff() if arguments.diff else f"rewrote {change.path}")
        left = [each for old, new in rewritten for each in _left(old, new, in_new=arguments.write)]
        print(render_left(left))
        return int(any(finding.certainty == CHANGE for finding in left)) | refused


def _read_all(paths: Sequence[Path]) -> tuple[list[_File], int]:
    """Return the files that can be read, and 1 if there are others, which are reported."""
    sources: list[_File] = []
    failed = 0
    for path in paths:
        try:
            content = content_of(path)
            sources.append(_KINDS.get(path.suffix, Source)(path, content))
        except ConfigError as error:
            print(f"stratagem: {error}", file=sys.stderr)
            failed = 1
    return _seen_together(sources), failed


def _seen_together(sources: list[_File]) -> list[_File]:
    """Return the files, each of which knows what the others tell about it."""
    scripts = [each for each in sources if isinstance(each, Source)]
    roles = {name: role for script in scripts for name, role in script.roles.items() if role}
    imported = frozenset(name for script in scripts for name in script.imported)
    elsewhere = Elsewhere(roles, imported)
    if len(scripts) < 2:
        return sources
    return [each.seen_with(elsewhere) if isinstance(each, Source) else each for each in sources]


def _rewrite_all(sources: Sequence[_File]) -> tuple[list[tuple[_File, str]], int]:
    """Return each file with its new text, and 1 if there are some that cannot be rewritten, which are reported."""
    from stratagem_migrate.rewriting import rewrite  # imports libcst

    rewritten, failed = [], 0
    for source in sources:
        try:
            new = rewrite(source) if isinstance(source, Source) else yaml_files.rewrite(source)
        except ConfigError as error:
            print(f"stratagem: {error}", file=sys.stderr)
            new, failed = source.text, 1
        rewritten.append((source, new))
    return rewritten, failed


def _left(old: _File, text: str, in_new: bool) -> list[Finding]:
    """Return what is left to do in a file with the new `text`, with the lines of that text or of the old one."""
    new = old.with_text(text)
    found = [each for each in examine_file(new) if each.certainty != SAME]
    only_old = _only_in_lightning(old)
    if in_new:
        only_old = [attrs.evolve(each, line=files.line_before(text, old.text, each.line)) for each in only_old]
    else:
        found = [attrs.evolve(each, line=files.line_before(old.text, text, each.line)) for each in found]
    return [(new if in_new else old).placed(each) for each in sorted({*found, *only_old})]


def _only_in_lightning(source: _File) -> list[Finding]:
    """Return the checks that only a script for Lightning needs: the rewritten one says what it wants."""
    found = trainer_arguments.trainer_calls(source) if isinstance(source, Source) else ()
    return [each for each in found if each.certainty == CHECK and each.old == trainer_arguments.WITHOUT_LOGGER]


def examine_file(file: _File) -> list[Finding]:
    """Return the findings about a script or a YAML file."""
    return examine(file) if isinstance(file, Source) else yaml_files.examine(file, examine)


def examine(source: Source) -> list[Finding]:
    """Return the findings about a script, in the order of its lines."""
    rules = (*_RULES, *(_RULES_ABOUT_LIGHTNING if source.is_about_lightning else ()))
    return sorted({finding for rule in rules for finding in rule(source)})


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


def render_left(left: Sequence[Finding]) -> str:
    """Return what a rewriting leaves to the user, as text."""
    groups = {
        "left for you": [each for each in left if each.certainty == CHANGE],
        "check (works differently)": [each for each in left if each.certainty == CHECK],
    }
    lines = [
        line for title, found in groups.items() if found for line in (f"{title}:", *(f"  {each}" for each in found), "")
    ]
    changes, checks = map(len, groups.values())
    lines.append(f"{changes or 'nothing'} left to change, {checks or 'nothing'} to check")
    return "\n".join(lines)
