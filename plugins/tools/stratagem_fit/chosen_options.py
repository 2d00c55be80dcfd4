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


_BASH = """
# The options of plugins that a line may set: those of the plugins that it chooses.
declare -gA _stratagem_takes=({table})
{function}() {{
  _shtab_stratagem "$@"
  local -A chosen=()
  local i word value kept=() rest takes
  for ((i = 0; i < COMP_CWORD; i++)); do
    word="${{COMP_WORDS[i]}}"
    [[ $word == --trainer.* ]] || continue
    value="${{COMP_WORDS[i + 1]}}"
    [[ $value == "=" ]] && value="${{COMP_WORDS[i + 2]}}"
    [[ $word == *=* ]] && value="${{word#*=}}" word="${{word%%=*}}"
    chosen["${{word#--trainer.}}"]="$value"
  done
  for word in "${{COMPREPLY[@]}}"; do
    rest="${{word#--trainer.}}"
    if [[ $word == --trainer.?*.?* ]]; then
      takes="${{_stratagem_takes["${{rest%%.*}} ${{chosen["${{rest%%.*}}"]}}"]}}"
      [[ -n $takes && $takes != *" ${{rest#*.}} "* ]] && continue
    fi
    kept+=("$word")
  done
  COMPREPLY=("${{kept[@]}}")
}}
"""


def _bash(script: str, options: _Options) -> str:
    table = " ".join(f"['{kind} {entry.name}']=' {' '.join(taken)} '" for (kind, entry), taken in options.items())
    body, complete, rest = script.rpartition("\ncomplete ")
    wrapper = _BASH.format(table=table, function=FUNCTION)
    return f"{body}\n{wrapper}{complete}{rest.replace('_shtab_stratagem ', f'{FUNCTION} ')}"


_ZSH = """
# The options of plugins that a line may set: those of the plugins that it chooses.
typeset -gA _stratagem_takes=({table})
{function}() {{
  local -A chosen
  local i word name array spec rest takes kind key
  for ((i = 1; i < CURRENT; i++)); do
    word=$words[i]
    if [[ $word == --trainer.*=* ]]; then
      chosen[${{${{word%%=*}}#--trainer.}}]=${{word#*=}}
    elif [[ $word == --trainer.* ]]; then
      chosen[${{word#--trainer.}}]=$words[i+1]
    fi
  done
  for name in {commands}; do
    array=_shtab_stratagem_${{name}}_options
    local -a kept=()
    for spec in "${{(@P)array}}"; do
      rest=${{${{spec%%\\[*}}#--trainer.}}
      if [[ $spec == --trainer.?*.?*\\[* ]]; then
        kind=${{rest%%.*}}
        key="$kind $chosen[$kind]"
        takes=$_stratagem_takes[$key]
        [[ -n $takes && $takes != *" ${{rest#*.}} "* ]] && continue
      fi
      kept+=("$spec")
    done
    local -a $array
    set -A $array "${{kept[@]}}"
  done
  _shtab_stratagem "$@"
}}
"""


def _zsh(script: str, options: _Options) -> str:
    table = " ".join(f"'{kind} {entry.name}' ' {' '.join(taken)} '" for (kind, entry), taken in options.items())
    body, condition, end = script.rpartition("\nif [[ $zsh_eval_context")
    wrapper = _ZSH.format(table=table, function=FUNCTION, commands=" ".join(COMMANDS))
    return f"{body}\n{wrapper}{condition}{end.replace('_shtab_stratagem ', f'{FUNCTION} ')}"


_FISH = """
# Condition helper: true if the plugin of kind $argv[1] that the line chooses takes the option $argv[2].
function _stratagem_takes
  set -l tokens (commandline -opc)
  set -l chosen
  for i in (seq (count $tokens))
    if test "$tokens[$i]" = "--trainer.$argv[1]"
      set chosen $tokens[(math $i + 1)]
    else if string match -q -- "--trainer.$argv[1]=*" "$tokens[$i]"
      set chosen (string split -m 1 -f 2 = -- "$tokens[$i]")
    end
  end
  switch "$argv[1] $chosen"
{cases}
    case '*'
      return 0
  end
end
"""


def _fish(script: str, options: _Options) -> str:
    cases = "\n".join(
        f"    case '{kind} {entry.name}'\n      contains -- $argv[2] {' '.join(taken)}"
        for (kind, entry), taken in options.items()
    )
    condition = re.compile(r"(-n '_shtab_stratagem_using \w+)(' -l trainer\.(\w+)\.(\w+) )")
    body, first, end = script.partition("\ncomplete -c stratagem -e")
    return f"{body}\n{_FISH.format(cases=cases)}{first}{condition.sub(_with_condition, end)}"


def _with_condition(found: re.Match[str]) -> str:
    return f"{found[1]}; and _stratagem_takes {found[3]} {found[4]}{found[2]}"
