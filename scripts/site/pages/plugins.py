"""A page for each kind, and for each strategy: plugins with their package, a sentence, and their options."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen

from pages.examples import example
from pages.text import anchor, code_span, option, prose, required
from stratagem.api.options import options
from stratagem.discovery import registry
from stratagem.discovery.registry import Entry
from stratagem.errors import ConfigError, shown
from stratagem.stack.construction import make
from stratagem_devtools.descriptions import describe
from stratagem_plugin_checks import class_of

TITLES = {
    "strategy": "Strategies", "precision": "Precisions", "comm_hook": "Communication hooks",
    "environment": "Environments", "launcher": "Launchers", "accelerator": "Accelerators",
    "checkpoint": "Checkpoint formats", "callback": "Callbacks", "logger": "Loggers",
}  # fmt: skip

#: A plugin of each kind that can be chosen without options.
EXAMPLES = {
    "strategy": "ddp", "precision": "bf16-mixed", "comm_hook": "powersgd", "environment": "slurm", "launcher": "spawn",
    "accelerator": "cuda", "checkpoint": "sharded", "callback": "learning_rate_monitor", "logger": "tensorboard",
}  # fmt: skip

#: The kind whose plugins have a page each, with an example of each option, and those of them that are listed first.
SPLIT, FIRST = "strategy", ("ddp", "fsdp", "parallel", "deepspeed")
#: Headings of the list of these pages, by the folder of the package.
GROUPS = {"": "For most runs", "plugins": "Others", "contrib": "Engines outside torch, each a package of its own"}

INTRODUCTION = """# {title}

Choose {one} by name, `Trainer({argument}="{name}")`; with options in a mapping,
`Trainer({argument}={{"name": "{name}", ...}})`; or pass an instance of its class from `stratagem.{module}`.
[All plugins]({up}plugins.md) compares the plugins of all kinds.
"""


@frozen
class Listed:
    """A plugin of this repository: its entry point, and the folder of its package."""

    entry: Entry
    folder: Path

    @property
    def target(self) -> Any:
        return self.entry.load()

    @property
    def is_preset(self) -> bool:
        return not isinstance(self.target, type)


def pages(root: Path) -> dict[str, str]:
    """Return the pages by path."""
    found = {}
    for kind in registry.kinds():
        classes = by_class([each for each in all_plugins(root) if each.entry.kind == kind])
        if kind == SPLIT:
            found[path_of(kind)] = "\n".join([_introduction(kind), *_list(classes)])
            for cls, plugins in classes.items():
                found[path_of(kind, plugins)] = "\n".join(_section(kind, cls, plugins, 1))
        else:
            sections = [line for cls, plugins in classes.items() for line in _section(kind, cls, plugins, 2)]
            found[path_of(kind)] = "\n".join([_introduction(kind), *sections])
    return found


def with_pages(nav: Any, root: Path) -> Any:
    """Return `nav` with a page for each strategy below the list of them."""
    if isinstance(nav, list):
        return [with_pages(item, root) for item in nav]
    if isinstance(nav, dict):
        return {title: with_pages(value, root) for title, value in nav.items()}
    if nav != path_of(SPLIT):
        return nav
    classes = by_class([each for each in all_plugins(root) if each.entry.kind == SPLIT])
    return [nav, *({plugins[0].entry.name: path_of(SPLIT, plugins)} for plugins in classes.values())]


def path_of(kind: str, plugins: list[Listed] | None = None) -> str:
    """Return the path of the page of `kind`, or of the page of the class that `plugins` stand for."""
    folder = f"reference/plugins/{registry.kinds()[kind].module.replace('_', '-')}"
    if kind != SPLIT:
        return f"{folder}.md"
    return f"{folder}/{anchor(plugins[0].entry.name) if plugins else 'index'}.md"


def addresses(root: Path) -> dict[tuple[str, str], str]:
    """Return the page and anchor of each plugin, by kind and name."""
    listed = all_plugins(root)
    return {
        (kind, each.entry.name): f"{path_of(kind, plugins)}#{anchor(each.entry.name)}"
        for kind in registry.kinds()
        for plugins in by_class([each for each in listed if each.entry.kind == kind]).values()
        for each in plugins
    }


def all_plugins(root: Path) -> list[Listed]:
    """Return the plugins of `plugins/` and `contrib/`; a package of `contrib/` need not be installed."""
    found = []
    for path in sorted([*root.glob("plugins/*/pyproject.toml"), *root.glob("contrib/*/pyproject.toml")]):
        if path.parent.name == "template":
            continue
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        project = tomllib.loads(path.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():
            kind = group.removeprefix("stratagem.")
            for name, value in points.items() if kind in registry.kinds() else ():
                entry = Entry(
                    kind=kind, name=name, value=value, distribution=project["name"], version=project["version"]
                )
                found.append(Listed(entry, path.parent.relative_to(root)))
    return found


def _introduction(kind: str) -> str:
    name, title = EXAMPLES[kind], TITLES[kind]
    one = "a strategy" if kind == "strategy" else f"{'an' if title[0] in 'AE' else 'a'} {title.lower()[:-1]}"
    return INTRODUCTION.format(
        title=title,
        one=one,
        argument=registry.argument_of(kind),
        name=name,
        module=registry.kinds()[kind].module,
        up="../" * path_of(kind).count("/"),
    )


def _list(classes: dict[type, list[Listed]]) -> Iterator[str]:
    """Yield a list item for each class, with all names that stand for it, below headings."""
    group = None
    for cls, plugins in classes.items():
        first = plugins[0]
        folder = "" if first.entry.name in FIRST else first.folder.parts[0]
        if folder != group:
            yield f"## {GROUPS[folder]}\n"
            group = folder
        ids = "".join(f'<a id="{anchor(each.entry.name)}"></a>' for each in plugins)
        yield f"* {ids}[`{first.entry.name}`]({Path(path_of(SPLIT, plugins)).name}): {_summary(SPLIT, cls, plugins)}"
    yield ""


def by_class(listed: list[Listed]) -> dict[type, list[Listed]]:
    """Return the plugins of each class, those that are the class itself before presets of it."""
    found: dict[type, list[Listed]] = {}
    for each in sorted(listed, key=lambda each: (each.is_preset, each.entry.name)):
        found.setdefault(_class_of(each), []).append(each)
    first = {cls: plugins[0] for cls, plugins in found.items()}
    return {cls: found[cls] for cls in sorted(found, key=lambda cls: _position(first[cls]))}


def _position(plugin: Listed) -> tuple[int, bool, str]:
    name = plugin.entry.name
    rank = FIRST.index(name) if plugin.entry.kind == SPLIT and name in FIRST else len(FIRST)
    return rank, plugin.folder.parts[0] == "contrib", name


def _class_of(plugin: Listed) -> type:
    try:
        return class_of(plugin.entry)
    except ConfigError:  # a preset for devices that this machine does not have
        return type(plugin.entry.name, (), {"__doc__": inspect.getdoc(plugin.target)})


def _summary(kind: str, cls: type, plugins: list[Listed]) -> str:
    """Return a sentence about the plugins of `cls`."""
    first = plugins[0]
    if first.is_preset and not options(cls):
        text = required(inspect.getdoc(first.target), f"{kind} {first.entry.name}")
        return prose(text.removeprefix("Return ").capitalize())
    return prose(required(describe(first.entry)["summary"], f"{kind} {first.entry.name}"))


def _section(kind: str, cls: type, plugins: list[Listed], level: int) -> list[str]:
    """Return the lines about a class below a heading of `level`: names, package, options."""
    first, owner = plugins[0], plugins[0].entry.name
    names = [each for each in plugins if not each.is_preset] or plugins
    title = ", ".join(f"`{each.entry.name}`" for each in names)
    ids = "".join(f'<a id="{anchor(each.entry.name)}"></a>' for each in plugins[1:])
    parts = [f"{'#' * level} {title} {{ #{anchor(owner)} }}\n", ids + "\n" if ids else ""]
    parts.append(_summary(kind, cls, plugins) + "\n")
    if first.is_preset and not options(cls):
        return [*parts, _package(first, "")]
    parts.append(_package(first, cls.__name__))
    presets = [each for each in plugins if each.is_preset and each not in names]
    if presets or first.is_preset:
        parts += ["Names with options that are set:\n", *(_preset(each, cls) for each in presets or plugins), ""]
    for each in describe(first.entry)["options"]:
        parts.append(option(each["name"], prose(each["type"]), each["default"], each["doc"], owner, level + 1))
        shown_call = example([plugin.entry for plugin in plugins], cls, each["name"]) if kind == SPLIT else ""
        parts.append(f"```python\n{shown_call}\n```\n" if shown_call else "")
    return [*parts, "" if options(cls) else "It has no options.\n"]


def _package(plugin: Listed, cls: str) -> str:
    """Return the line with the package, how to install it, and the class."""
    installed = plugin.folder.parts[0] != "contrib"
    command = f"pip install {plugin.entry.distribution if installed else plugin.folder.as_posix()}"
    return f'<p class="package" markdown="1">{f"Class `{cls}`, " if cls else ""}`{command}`</p>\n'


def _preset(plugin: Listed, cls: type) -> str:
    """Return the list item of a name that stands for options."""
    preset, default = make(plugin.entry, {}), options(cls)
    changed = [
        f"{name}={shown(getattr(preset, field.name), None)}"
        for name, field in default.items()
        if shown(getattr(preset, field.name), None) != shown(_default(field), None)
    ]
    return f"* `{plugin.entry.name}`: " + (", ".join(map(code_span, changed)) or "another name, with the same options")


def _default(field: Any) -> Any:
    factory = getattr(field.default, "factory", None)
    return field.default if factory is None or field.default.takes_self else factory()
