"""Read arguments from a file, the environment and a command line. Each value keeps its origin, for messages.

A later source overrides an earlier one: default, file, environment, command line, code. Each has plugin options:

=============  ======================================  ==================================
               an argument of the Trainer              an option of the chosen strategy
=============  ======================================  ==================================
file           ``max_epochs: 3``                       ``strategy: {name: ddp, timeout: 60}``
environment    ``STRATAGEM_TRAINER_MAX_EPOCHS=3``      ``STRATAGEM_STRATEGY_TIMEOUT=60``
command line   ``--max_epochs 3``                      ``--strategy.timeout 60``
=============  ======================================  ==================================
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.api.paths import as_path
from stratagem.config.settings import PREFIX, Source, option_names
from stratagem.discovery import registry
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, nearest, shown
from stratagem_trainer.settings import TrainerSettings

#: Arguments that choose plugins, beside those of kinds.
_CHOICES = ("plugins", "profiler", "checks")


def put(source: Source, name: str, value: Any) -> None:
    """Set argument or dotted option `name` of `source`; text that chooses plugins is parsed."""
    kind, dot, option = name.partition(".")
    if not dot:
        is_choice = source.text and (name in registry.arguments() or name in _CHOICES)
        source.values[name] = parse_choice(value) if is_choice else value
    elif kind in registry.dotted():
        source.options.setdefault(kind, {})[option] = value
    else:
        known = registry.dotted()
        raise ConfigError(
            f"{source.origin} sets {name!r}", expected=f"an option of {', '.join(known)}", do=nearest(kind, known)
        )


# --- Files -----------------------------------------------------------------------------------------------------------


def from_file(path: str | Path) -> Source:
    """Read a YAML or TOML file whose top level names Trainer arguments.

    Raises:
        ConfigError: no such file, not YAML or TOML, a duplicate key, or not a mapping at the top level.
    """
    path = as_path(path)
    if not path.is_file():
        raise ConfigError(f"configuration file {str(path)!r} does not exist", do="check the path")
    content = _parse(path)
    if content is None:
        raise ConfigError(f"{path} is empty", expected="a mapping of Trainer arguments")
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} has a {type(content).__name__} at its top level", expected="a mapping of Trainer arguments"
        )
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(
                f"{path} has the key {shown(key)} at its top level", expected="names of Trainer arguments"
            )
    layer = Source(f"file {path.name}")
    for name, value in content.items():
        put(layer, name, value)
    return layer


def _parse(path: Path) -> Any:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"configuration file {str(path)!r}", expected="a name that ends in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})", do="check its permissions") from error
    except UnicodeDecodeError as error:
        found = f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at position {error.start})"
        raise ConfigError(found, do="save it as UTF-8") from error
    try:
        return _toml(text, path) if path.suffix == ".toml" else _yaml(text, path)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be read", do="write it with fewer levels") from None


def _toml(text: str, path: Path) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:  # also an integer of too many digits
        raise ConfigError(f"{path} is not TOML ({_one_line(error)})", do="fix that line") from error


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading YAML needs PyYAML", do="run `pip install PyYAML`, or use TOML") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, path)
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        told = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        said = told or _one_line(error)
        raise ConfigError(f"{path} is not YAML{where} ({said})", do="fix that line") from error


#: The most values that a file may have, with every use of an anchor counted.
_MOST_VALUES = 100_000


def _check_nodes(root: Any, path: Path) -> None:
    """Refuse what YAML allows and a configuration does not: duplicate keys, recursive anchors, too many anchors.

    PyYAML keeps the last of two equal keys. It shares the values of anchors, so a small file may become huge later.
    """
    numbers, open_nodes = itertools.count(1), set()

    def check(node: Any) -> None:
        if next(numbers) > _MOST_VALUES:
            raise ConfigError(f"{path} has more than {_MOST_VALUES} values once its anchors are followed",
                              do="write it with fewer uses of anchors")  # fmt: skip
        if id(node) in open_nodes:
            line = node.start_mark.line + 1
            raise ConfigError(f"{path} has an anchor that contains itself (line {line})", do="fix that line")
        open_nodes.add(id(node))
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value) if node.id == "mapping" else ():
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if key.id == "scalar" and name in lines:
                raise ConfigError(
                    f"{path} has {key.value!r} twice (lines {lines[name]} and {line})",
                    expected="each name once in a mapping", do="drop one of them",
                )  # fmt: skip
            lines[name] = line
        for inner in () if node.id == "scalar" else node.value:
            for each in inner if isinstance(inner, tuple) else [inner]:
                check(each)
        open_nodes.discard(id(node))

    check(root)


# --- Environment variables ------------------------------------------------------------------------------------------


def from_environment(variables: Mapping[str, str] = os.environ) -> Source:
    """Read ``STRATAGEM_TRAINER_<ARGUMENT>`` and ``STRATAGEM_<KIND>_<OPTION>``."""
    arguments = option_names(TrainerSettings)
    layer = Source("environment", text=True)
    for variable, text in sorted(variables.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable:
            continue
        if name.startswith("TRAINER_"):
            put(layer, name.removeprefix("TRAINER_").lower(), text)
            continue
        # The longest kind first, in case the name of one kind is a prefix of another's.
        for kind in sorted(registry.dotted(), key=len, reverse=True):
            if name.startswith(f"{kind.upper()}_"):
                put(layer, f"{kind}.{name.removeprefix(f'{kind.upper()}_').lower()}", text)
                break
        else:
            _check_not_misspelt(variable, name, arguments)
    _warn_of_lightning(variables, arguments)
    return layer


def _check_not_misspelt(variable: str, name: str, arguments: Collection[str]) -> None:
    """Refuse a variable that looks like a misspelt argument or option."""
    if name.lower() in arguments and name != "PLUGINS":  # the list of allowed plugins
        raise ConfigError(f"the variable {variable} is set, which nothing reads", do=f"use {PREFIX}TRAINER_{name}")
    if name.startswith("CALLBACK_"):
        raise ConfigError(
            f"the variable {variable} is set, and there may be several callbacks", expected="each callback by name",
            do=f"use {PREFIX}TRAINER_CALLBACKS with JSON",
        )  # fmt: skip
    first = {word.partition("_")[0] for word in ("TRAINER", *(kind.upper() for kind in registry.dotted()))}
    word, _, rest = name.partition("_")
    close = difflib.get_close_matches(word, first, n=1, cutoff=0.8)
    if rest and close and word not in first:
        raise ConfigError(
            f"the variable {variable} is set, which nothing reads", do=f"did you mean {PREFIX}{close[0]}_{rest}"
        )


def _warn_of_lightning(variables: Mapping[str, str], arguments: Collection[str]) -> None:
    """Warn of variables that Lightning reads and stratagem does not; only on local rank 0."""
    if variables.get("LOCAL_RANK", "0") != "0":
        return
    for variable in sorted(variables):
        if variable == "PL_GLOBAL_SEED":
            advice = "call stratagem.seed_everything(number), or set STRATAGEM_SEED"
        elif variable.startswith("PL_TRAINER_") or variable in _LIGHTNING_RUN:
            name = variable.removeprefix("PL_TRAINER_").removeprefix("LT_")
            known = name.lower() in arguments
            advice = f"set {PREFIX}TRAINER_{name}" if known else moved_names("arguments").get(name.lower(), "unset it")
        else:
            continue
        warnings.warn(f"the variable {variable} is set, which Lightning reads and stratagem does not; {advice}",
                      stacklevel=2)  # fmt: skip


#: The variables that `lightning run` sets.
_LIGHTNING_RUN = ("LT_ACCELERATOR", "LT_STRATEGY", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")


# --- Command line ----------------------------------------------------------------------------------------------------


def from_arguments(arguments: Sequence[str]) -> tuple[Source, Path | None, bool]:
    """Read ``--name value``, ``--name=value`` and ``--kind.option value``.

    Returns:
        The source, the path after ``--config`` if any, and whether ``--help`` is in the arguments.
    """
    layer, config, wants_help = Source("command line", text=True), None, False
    for name, value in pairs(["--help" if each == "-h" else each for each in arguments]):
        if name in ("help", "h"):
            wants_help = True
        elif name == "config":
            config = as_path(value or "true")
        else:
            put(layer, name, "true" if value is None else value)
    return layer, config, wants_help


def pairs(words: Sequence[str], flags: Collection[str] = ()) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the text of each ``--name value`` or ``--name=value``; None for a name alone.

    Args:
        flags: names that are never followed by a value.
    """
    rest = list(words)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"command line argument {flag!r}", expected="--name value", do="see --help")
        name, equals, value = flag.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if equals:
            yield name, value
        else:
            yield name, rest.pop(0) if name not in flags and rest and _is_value(rest[0]) else None


def _is_value(word: str) -> bool:
    """Whether `word` is a value rather than an option: -3 and -inf are."""
    is_number = word[1:2] != "-" and not word[1:2].isalpha()
    return not word.startswith("-") or is_number or word.lower() in ("-inf", "-infinity", "-nan")


def parse_choice(text: str) -> Any:
    """Read a plugin choice from text: a name, ``a,b`` for several, JSON, ``true``, ``false`` or ``none``."""
    stripped = text.strip()
    if stripped[:1] in ("{", "["):
        try:
            return json.loads(stripped)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{shown(text)} is not JSON ({_one_line(error)})", expected='such as {"name": "ddp"}'
            ) from error
    words = {"true": True, "false": False, "none": None, "null": None}
    if stripped.lower() in words:
        return words[stripped.lower()]
    names = [name.strip() for name in stripped.split(",") if name.strip()]
    return names if len(names) > 1 else stripped


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def program() -> str:
    """Return the name of the running program, for messages."""
    return Path(sys.argv[0]).name or "python"
