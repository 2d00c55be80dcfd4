"""Of the options of plugins, complete only those of the plugin that is chosen on the line.

What shtab writes offers ``--trainer.strategy.OPTION`` for the options of all strategies. After
``--trainer.strategy ddp`` only those of `ddp` are meant. Each shell gets a table of the options that a plugin takes,
and a filter.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from stratagem.api.options import option_types
from stratagem.discovery import registry
from stratagem.errors import StratagemError

_Options = dict[tuple[str, registry.Entry], Mapping[str, Any]]

#: What completes a line: the filter, which calls shtab's function.
FUNCTION = "_stratagem_of_chosen"

#: Subcommands that read a run file and its options.
COMMANDS = ("fit", "validate", "test", "predict")


@cache
def options_by_choice() -> _Options:
    """Return options with types of each installed plugin whose options a command line sets, by kind and entry."""
    from stratagem_plugin_checks import class_of  # with torch

    found = {}
    for kind in registry.dotted():
        for entry in registry.entries(registry.arguments().get(kind, kind)):
            with contextlib.suppress(StratagemError):  # a broken package, or one for another machine, has no options
                found[kind, entry] = option_types(class_of(entry))
    return found


def of_chosen(script: str, shell: str) -> str:
    """Return shtab's `script` for `shell`, with the filter."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](script, options_by_choice())


def _filter(shell: str, **values: str) -> str:
    """Return the filter for `shell`, with `values` where its file has their names, as in ``@TABLE@``."""
    text = (files("stratagem_fit") / f"chosen_options.{shell}").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], text)


def _bash(script: str, options: _Options) -> str:
    table = " ".join(f"['{kind} {entry.name}']=' {' '.join(taken)} '" for (kind, entry), taken in options.items())
    body, complete, rest = script.rpartition("\ncomplete ")
    return f"{body}\n\n{_filter('bash', TABLE=table)}{complete}{rest.replace('_shtab_stratagem ', f'{FUNCTION} ')}"


def _zsh(script: str, options: _Options) -> str:
    table = " ".join(f"'{kind} {entry.name}' ' {' '.join(taken)} '" for (kind, entry), taken in options.items())
    body, condition, end = script.rpartition("\nif [[ $zsh_eval_context")
    wrapper = _filter("zsh", TABLE=table, COMMANDS=" ".join(COMMANDS))
    return f"{body}\n\n{wrapper}{condition}{end.replace('_shtab_stratagem ', f'{FUNCTION} ')}"


def _fish(script: str, options: _Options) -> str:
    cases = "\n".join(
        f"    case '{kind} {entry.name}'\n      contains -- $argv[2] {' '.join(taken)}"
        for (kind, entry), taken in options.items()
    )
    condition = re.compile(r"(-n '_shtab_stratagem_using \w+)(' -l trainer\.(\w+)\.(\w+) )")
    body, first, end = script.partition("\ncomplete -c stratagem -e")
    return f"{body}\n\n{_filter('fish', CASES=cases)}{first}{condition.sub(_with_condition, end)}"


def _with_condition(found: re.Match[str]) -> str:
    return f"{found[1]}; and _stratagem_takes {found[3]} {found[4]}{found[2]}"
