"""Read a run file and the command line after it, and merge them; each value keeps its origin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from stratagem.api.options import convert
from stratagem.api.paths import as_path
from stratagem.config.settings import Source, option_names
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError, nearest
from stratagem_trainer.settings import TrainerSettings
from stratagem_trainer.sources import from_file, pairs, put

#: The top-level keys of a run file.
SECTIONS = ("seed", "model", "data", "trainer", "ckpt_path")
#: The keys of a mapping that describes an object to build.
SPEC_KEYS = ("class_path", "init_args")
#: Flags of the command line, which take no value.
FLAGS = ("print_config", "explain")

_LINE = "command line"


@frozen
class Setting:
    """A value, and where it was set."""

    value: Any
    origin: str
    #: The value is text, to be parsed by the type of its argument.
    text: bool = False


@define(eq=False)
class Spec:
    """An object to build; arguments are settings, other specs, or lists and dictionaries of these."""

    class_path: Setting
    arguments: dict[str, Any] = field(factory=dict)


@define(eq=False, kw_only=True)
class RunFile:
    """The settings of a run, by section."""

    path: Path
    seed: int | None
    model: Spec
    data: Spec | None
    #: Settings of the trainer from the file and the command line; the latter takes precedence.
    trainer: list[Source]
    ckpt_path: str | None
    #: Flags that were given.
    flags: frozenset[str]


def read(path: str | Path, words: Sequence[str]) -> RunFile:
    """Read the run file at `path`, overridden by `words` of the command line.

    Raises:
        ConfigError: no such file, an unknown section or key, or a value of the wrong type.
    """
    path = as_path(path)
    origin = f"file {path.name}"
    sections = _sections(path, origin)
    specs = {name: _section_spec(sections.get(name), origin, name) for name in ("model", "data")}
    plain = {name: Setting(sections.get(name), origin) for name in ("seed", "ckpt_path")}
    file, line, flags = _trainer(sections.get("trainer"), origin), Source(_LINE, text=True), set()
    for name, value in sorted(pairs(words, FLAGS), key=lambda pair: _depth(pair[0])):
        section, _, rest = name.partition(".")
        if name in FLAGS and value is None:
            flags.add(name)
        elif section in specs:
            specs[section] = _override(specs[section], section, rest, _needs_value(name, value))
        elif section == "trainer" and rest:
            put(line, rest, "true" if value is None else value)
        elif name in plain:
            plain[name] = Setting(_needs_value(name, value), _LINE, text=True)
        else:
            raise ConfigError(f"{_LINE} sets {name!r}", expected="a setting of a run file", do=_suggestion(name))
    if specs["model"] is None:
        raise ConfigError(f"{origin} has no model", expected="model: package.module.Class")
    return RunFile(
        path=path, seed=_typed("seed", plain["seed"], int | None), model=specs["model"], data=specs["data"],
        trainer=[file, line], ckpt_path=_typed("ckpt_path", plain["ckpt_path"], str | None),
        flags=frozenset(flags),
    )  # fmt: skip


def parse_text(text: str) -> Any:
    """Return the value of `text` for an argument without a type: parsed as JSON if valid, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None if text.lower() == "none" else {"true": True, "false": False}.get(text.lower(), text)


# --- The file ----------------------------------------------------------------------------------------------------


def _sections(path: Path, origin: str) -> dict[str, Any]:
    try:
        layer = from_file(path)
    except ConfigError as error:
        if not error.found.endswith("at its top level"):
            raise
        raise ConfigError(error.found, expected=f"a mapping with {', '.join(SECTIONS)}") from None
    dotted = [f"{kind}.{option}" for kind, options in layer.options.items() for option in options]
    for name in [*layer.values, *dotted]:
        if name not in SECTIONS:
            raise ConfigError(
                f"{origin} has {name!r} at its top level", expected=", ".join(SECTIONS), do=_suggestion(name)
            )
    return layer.values


def _suggestion(name: str) -> str:
    """Return advice where `name` belongs, or the nearest name."""
    arguments = option_names(TrainerSettings)
    if name.partition(".")[0] in arguments:
        return f"did you mean 'trainer.{name}'"
    first, dot, rest = name.partition(".")
    close = nearest(first, [*SECTIONS, *(flag.replace("_", "-") for flag in FLAGS)])
    if close:
        return close[:-1] + (f".{rest}'" if dot else "'")
    if moved := moved_names("arguments").get(name):
        return moved
    close = nearest(name, arguments)
    return close.replace("'", "'trainer.", 1) if close else "see docs/run-files.md"


def _trainer(content: Any, origin: str) -> Source:
    layer = Source(origin)
    for name, value in _mapping(content if content is not None else {}, "trainer", origin).items():
        put(layer, name, value)
    return layer


def _mapping(content: Any, path: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path} is {content!r} ({origin})", expected="a mapping of names to values")
    return content


def _section_spec(content: Any, origin: str, path: str) -> Spec | None:
    if content is None:
        return None
    if isinstance(content, str):
        return Spec(Setting(content, origin))
    if not isinstance(content, Mapping) or "class_path" not in content:
        keys = [str(key) for key in content] if isinstance(content, Mapping) else []
        hint = next((hint for key in keys if (hint := nearest(key, SPEC_KEYS))), "")
        raise ConfigError(
            f"{path} is {_short(content)} ({origin})",
            expected="package.module.Class, or a mapping with class_path and init_args", do=hint,
        )  # fmt: skip
    return _spec(content, origin, path)


def _spec(content: Mapping[str, Any], origin: str, path: str) -> Spec:
    for key in content:
        if key not in SPEC_KEYS:
            raise ConfigError(
                f"{path} has the key {key!r} next to class_path ({origin})", expected="class_path and init_args",
                do=nearest(str(key), SPEC_KEYS) or "put arguments of the class under init_args",
            )  # fmt: skip
    if not isinstance(content["class_path"], str):
        raise ConfigError(f"{path}.class_path is {content['class_path']!r} ({origin})", expected="package.module.Class")
    given = content.get("init_args")
    arguments = _mapping({} if given is None else given, f"{path}.init_args", origin)
    return Spec(
        Setting(content["class_path"], origin),
        {name: tree(value, origin, f"{path}.{name}") for name, value in arguments.items()},
    )


def tree(value: Any, origin: str, path: str) -> Any:
    """Return `value` with each mapping that has a ``class_path`` as a `Spec`."""
    if isinstance(value, Mapping) and "class_path" in value:
        return _spec(value, origin, path)
    if not _has_spec(value):
        return Setting(value, origin)
    if isinstance(value, Mapping):
        return {key: tree(item, origin, f"{path}.{key}") for key, item in value.items()}
    return [tree(item, origin, f"{path}[{index}]") for index, item in enumerate(value)]


def _has_spec(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "class_path" in value or any(_has_spec(item) for item in value.values())
    return isinstance(value, list) and any(_has_spec(item) for item in value)


# --- The command line --------------------------------------------------------------------------------------------


def _depth(name: str) -> int:
    """Return the sort key of an option: classes are set before their arguments, in any order of the line."""
    return name.removesuffix(".class_path").replace(".init_args.", ".").count(".")


def _needs_value(name: str, value: str | None) -> str:
    if value is None:
        raise ConfigError(f"--{name} has no value", expected=f"--{name} VALUE, or --{name}=VALUE")
    return value


def _override(spec: Spec | None, section: str, rest: str, text: str) -> Spec:
    """Return `spec` with ``--section.rest text`` applied."""
    if rest in ("", "class_path"):
        parsed = parse_text(text) if text.lstrip().startswith("{") else text
        chosen = _section_spec(parsed, _LINE, section)
        assert chosen is not None
        same = spec is not None and spec.class_path.value == chosen.class_path.value
        return spec if same and spec is not None and isinstance(parsed, str) else chosen
    if spec is None:
        raise ConfigError(f"{_LINE} sets {section}.{rest!s} and there is no {section}", do=f"add --{section} CLASS")
    _set(spec.arguments, rest.replace("init_args.", "").split("."), text, section)
    return spec


def _set(arguments: dict[str, Any], names: list[str], text: str, path: str) -> None:
    """Set one of `arguments`, or an argument of one of them."""
    name, *inner = names
    path = f"{path}.{name}"
    present = arguments.get(name, Setting({}, _LINE))
    if not inner:
        value = parse_text(text) if "class_path" in text else None
        is_spec = isinstance(value, dict | list) and _has_spec(value)
        arguments[name] = tree(value, _LINE, path) if is_spec else Setting(text, _LINE, text=True)
    elif inner == ["class_path"]:
        if not (isinstance(present, Spec) and present.class_path.value == text):
            arguments[name] = Spec(Setting(text, _LINE))
    elif isinstance(present, Spec | dict):
        _set(present if isinstance(present, dict) else present.arguments, inner, text, path)
    elif isinstance(present, Setting) and isinstance(present.value, Mapping):
        value = _with_item(present.value, inner, parse_text(text), path)
        arguments[name] = Setting(value, f"{present.origin}, {_LINE}".replace(f"{_LINE}, {_LINE}", _LINE))
    else:
        raise ConfigError(
            f"{_LINE} sets {path}.{'.'.join(inner)} and {path} has no arguments",
            expected=f"a class for {path}", do=f"add --{path}.class_path package.module.Class",
        )  # fmt: skip


def _with_item(mapping: Mapping[str, Any], names: list[str], value: Any, path: str) -> dict[str, Any]:
    name, *inner = names
    if inner and not isinstance(mapping.get(name, {}), Mapping):
        raise ConfigError(f"{_LINE} sets {path}.{'.'.join(names)} and {path}.{name} is not a mapping")
    return {**mapping, name: _with_item(mapping.get(name, {}), inner, value, f"{path}.{name}") if inner else value}


def _typed(name: str, setting: Setting, annotation: Any) -> Any:
    try:
        return convert(setting.value, annotation, name, text=setting.text)
    except ConfigError as error:
        raise ConfigError(f"{error.found} ({setting.origin})", expected=error.expected, do=error.do) from None


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
