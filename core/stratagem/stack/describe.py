"""Describe plugins: options with types, defaults and their ``#:`` docs, capabilities, hooks."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from stratagem.api.capabilities import Capabilities
from stratagem.api.kinds import Environment, Plugin
from stratagem.api.options import describe as describe_type
from stratagem.api.options import option_types, options, redact
from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import ConfigError, StratagemError, nearest, shown
from stratagem.stack.construction import make
from stratagem.stack.plugin_hooks import hook_functions, hook_implementations, hook_specifications
from stratagem.stack.plugin_table import bold, width, wrapped
from stratagem.stack.plugins import Choice

if TYPE_CHECKING:
    from stratagem.config.settings import RunSettings
    from stratagem.stack.plugins import Stack


def describe(entry: Entry) -> dict[str, Any]:
    """Load the plugin of `entry` and return its description as plain data."""
    target = entry.load()
    is_class = isinstance(target, type)
    plugin = None if is_class else make(entry, {})
    cls = target if is_class else type(plugin)
    capabilities = capabilities_of(cls if plugin is None else plugin)
    return {
        "kind": entry.kind,
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "summary": _first_sentence(cls),
        "options": [_option(cls, name, field, plugin) for name, field in options(cls).items()],
        "provides": sorted(capabilities.provides),
        "requires": sorted(capabilities.requires),
        "conflicts": sorted(capabilities.conflicts),
        **_by_role(hook_implementations(cls, of_class=True)),
    }


def capabilities_of(plugin: Any) -> Capabilities:
    """Return the capabilities of a plugin; of a class, those with default options."""
    found = getattr(plugin, "capabilities", None)
    if isinstance(plugin, type) and isinstance(found, property):
        found = plugin().capabilities
    return found if isinstance(found, Capabilities) else Capabilities()


def option_docs(cls: type[Any]) -> dict[str, str]:
    """Return the ``#:`` comments above the fields of `cls` and its bases, by field name; empty without source code."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docs |= _own_docs(base)
    return docs


@functools.cache  # to find a class in its file takes milliseconds, and each option asks
def _own_docs(cls: type[Any]) -> dict[str, str]:
    try:
        source = inspect.getsource(cls) if cls is not object else ""
    except (OSError, TypeError):
        return {}
    docs: dict[str, str] = {}
    for match in re.finditer(r"((?:^[ \t]*#:.*\n)+)^[ \t]*(\w+)[ \t]*:", source, re.MULTILINE):
        lines = [line.strip().removeprefix("#:").strip() for line in match[1].strip().splitlines()]
        docs[match[2]] = " ".join(lines)
    return docs


def explain_stack(stack: Stack, settings: RunSettings) -> dict[str, Any]:
    """Return the resolved stack as plain data, plugins in the order in which they act."""
    return {
        "processes": {
            "per_node": stack.num_processes,
            "nodes": stack.num_nodes,
            "devices": list(stack.devices),
        },
        "arguments": {
            name: {"value": shown(redact(name, getattr(settings, name)), None), "origin": origin}
            for name, origin in sorted(settings.origins.items())
            if name not in registry.arguments() and hasattr(settings, name)
        },
        "plugins": [_explain_choice(choice, stack) for choice in stack.choices()],
    }


def render_stack(explained: dict[str, Any]) -> str:
    """Return `explained` as a tree for people."""
    processes = explained["processes"]
    lines = [f"{processes['per_node']} process(es) on each of {processes['nodes']} node(s)"]
    if len(processes["devices"]) != processes["per_node"]:
        lines[0] += f", each with {len(processes['devices'])} devices"
    lines += [f"  {name} = {entry['value']}  ({entry['origin']})" for name, entry in explained["arguments"].items()]
    for plugin in explained["plugins"]:
        package = f"{plugin['distribution']} {plugin['version']}" if plugin["distribution"] else "no package"
        lines.append(f"+ {plugin['kind']} {plugin['name']}  ({package}; {plugin['reason']})")
        lines += [f"|   {o['name']} = {o['value']}  ({o['origin']})" for o in plugin["options"]]
        for title in ("provides", "requires", "conflicts", "answers", "wraps", "acts"):
            if plugin[title]:
                lines.append(f"|   {title}: {', '.join(plugin[title])}")
        if plugin["stands_down"]:
            lines.append("|   its hooks are not called: the strategy applies this precision itself")
    return "\n".join(lines)


def _explain_choice(choice: Choice, stack: Stack) -> dict[str, Any]:
    plugin = choice.plugin
    capabilities = capabilities_of(plugin)
    return {
        "kind": choice.kind,
        "name": choice.name,
        "distribution": choice.entry.distribution if choice.entry else None,
        "version": choice.entry.version if choice.entry else None,
        "reason": choice.reason,
        "options": [
            {
                "name": name,
                "value": shown(redact(name, getattr(plugin, option.name, None)), None),
                "origin": choice.origins.get(name, "default"),
            }
            for name, option in options(type(plugin)).items()
        ],
        "provides": sorted(capabilities.provides),
        "requires": sorted(capabilities.requires),
        "conflicts": sorted(capabilities.conflicts),
        **_by_role(hook_implementations(plugin)),
        "stands_down": stack.precision_absorbed and choice is stack.precision,
    }


def unread_arguments(stack: Stack, settings: RunSettings, words: Sequence[str]) -> list[str]:
    """Return a sentence for each Trainer argument in `words` of the command line that the run does not use."""
    sentences = []
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, text = word.removeprefix("--").partition("=")
        text = text if equals else "" if following.startswith("--") else following
        name, dot, option = name.replace("-", "_").partition(".")
        if (
            not word.startswith("--")
            or not text
            or name not in (registry.dotted() if dot else option_types(type(settings)))
        ):
            continue
        choices = [choice for choice in stack.choices() if choice.kind == registry.arguments().get(name, name)]
        if dot:
            values = [
                (getattr(choice.plugin, option, None), choice.origins.get(option, "default")) for choice in choices
            ]
        else:
            origin = settings.origins.get(name, "default")
            values = [(choice.name, origin) for choice in choices] or [(getattr(settings, name), origin)]
        if any(origin == "command line" or str(value).lower() == text.lower() for value, origin in values):
            continue
        used = " and ".join(f"{shown(value)} ({origin})" for value, origin in values) or "nothing"
        error = ConfigError(
            f"the command line has {word if equals else f'{word} {text}'} and the run uses {used}",
            expected="a script that reads it",
            do="create the trainer with stratagem.Trainer.from_cli(), or pass the value to Trainer(...)",
        )
        sentences.append(str(error))
    return sentences


def check_entry(entry: Entry) -> str | None:
    """Return one sentence about what is wrong with an installed plugin; None if nothing is."""
    try:
        if entry.kind == "command":
            entry.load()
            return None
        target = entry.load()
        cls = target if isinstance(target, type) else type(make(entry, {}))
    except ConfigError:
        return None  # a preset that cannot be built on this machine
    except StratagemError as error:
        return str(error)
    return check_class(cls, entry.kind)


def check_class(cls: type[Any], kind: str) -> str | None:
    """Return one sentence about what is wrong with a plugin class of `kind`; None if nothing is."""
    base = registry.kinds()[kind].base
    if not issubclass(cls, base):
        return f"{cls.__name__} is not a stratagem.{base.__name__}."
    if problem := _check_options(cls):
        return problem
    known = hook_specifications()
    for hook, marker in hook_implementations(cls, of_class=True).items():
        if hook not in known:
            return f"it implements {hook!r}, which is not a hook; {nearest(hook, known) or 'see docs/hooks.md'}."
        given = set(inspect.signature(getattr(cls, hook)).parameters) - {"self"}
        unknown = given - set(inspect.signature(hook_functions()[hook]).parameters)
        if unknown:
            return f"its {hook} takes {', '.join(sorted(unknown))}, which that hook does not pass."
        if marker["wrapper"] and not inspect.isgeneratorfunction(getattr(cls, hook)):
            return f"its {hook} is a wrapper without a yield."
    return _check_detect(cls) if issubclass(cls, Environment) else None


def _check_detect(cls: type[Environment]) -> str | None:
    declared = str(inspect.get_annotations(cls.detect).get("return"))
    if "str" not in re.findall(r"\w+", declared):
        return None
    return (
        f"its detect() is declared to return {declared!r}, which is ignored; return a stratagem.api.Evidence, or None."
    )


def _check_options(cls: type[Any]) -> str | None:
    decorate = "decorate it with @define(eq=False, kw_only=True)"
    if not attrs.has(cls):
        return f"{cls.__name__} has no attrs options; {decorate}."
    fields = {field.name for field in attrs.fields(cls)}
    for owner in cls.__mro__:
        for name, annotation in inspect.get_annotations(owner).items():
            if issubclass(owner, Plugin) and name not in fields and "ClassVar" not in str(annotation):
                return f"{owner.__name__}.{name} is annotated, but not an attrs field; {decorate}, or use ClassVar."
    if "__init__" in vars(cls) and "__attrs_attrs__" not in vars(cls):
        return f"{cls.__name__} has its own __init__, so its options are unknown; {decorate}."
    if cls.__eq__ is not object.__eq__:
        return f"{cls.__name__} defines __eq__, so two equal ones would count as one plugin; {decorate}."
    return None


def render(description: dict[str, Any]) -> str:
    """Return `description` as text for people."""
    origin = f"{description['distribution']} {description['version']}, {description['value']}"
    title = f"{description['kind']} {description['name']}"
    lines = [bold(title), wrapped(f"({origin})", "  "), wrapped(description["summary"], "  ")]
    if width() is None:
        lines[:2] = [f"{title}  ({origin})"]
    if description["options"]:
        lines.append(bold("options:"))
        for option in description["options"]:
            head = f"{option['name']} = {as_written(option['default'])}  ({option['type']})"
            lines.append(wrapped(head, "  ", "      "))
            lines += [wrapped(option["doc"], "      ")] if option["doc"] else []
    for title in ("provides", "requires", "conflicts", "answers", "wraps", "acts"):
        if description[title]:
            lines.append(wrapped(f"{title}: {', '.join(description[title])}", "", "  "))
    return "\n".join(lines)


def as_written(default: str) -> str:
    """Return a default as it is written on a command line and in a run file."""
    return {"True": "true", "False": "false", "None": "not set"}.get(default, default)


def _option(cls: type[Any], name: str, field: attrs.Attribute[Any], preset: Any) -> dict[str, str]:
    default = default_text(field) if preset is None else shown(getattr(preset, field.name), None)
    return {
        "name": name,
        "type": describe_type(option_types(cls)[name]),
        "default": default,
        "doc": option_docs(cls).get(field.name, ""),
    }


def default_text(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "(required)"
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "(computed)" if default.takes_self else shown(default.factory(), None)
    return shown(default, None)


def _by_role(implemented: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of `implemented` hooks by role: answered, wrapped, or called for all plugins that have it."""
    specifications = hook_specifications()
    roles: dict[str, list[str]] = {"answers": [], "wraps": [], "acts": []}
    for name, marker in sorted(implemented.items()):
        answered = specifications.get(name, {}).get("firstresult")
        roles["wraps" if marker["wrapper"] else "answers" if answered else "acts"].append(name)
    return roles


def _first_sentence(cls: type[Any]) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    return text.split(". ")[0].rstrip(".") + "." if text else ""
