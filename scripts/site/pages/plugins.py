"""A page for each kind: every plugin of this repository with its package, a sentence, and its options."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path
from typing import Any

from attrs import frozen

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

INTRODUCTION = """# {title}

Choose {one} by name, `Trainer({argument}="{name}")`; with options in a mapping,
`Trainer({argument}={{"name": "{name}", ...}})`; or pass an instance of its class from `stratagem.{module}`.
[All plugins](../../plugins.md) compares the plugins of all kinds.
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
    listed = all_plugins(root)
    return {
        path_of(kind): _page(kind, [each for each in listed if each.entry.kind == kind]) for kind in registry.kinds()
    }


def path_of(kind: str) -> str:
    """Return the path of the page of `kind`."""
    return f"reference/plugins/{registry.kinds()[kind].module.replace('_', '-')}.md"


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


def _page(kind: str, listed: list[Listed]) -> str:
    name, title = EXAMPLES[kind], TITLES[kind]
    assert name in {each.entry.name for each in listed}
    one = "a strategy" if kind == "strategy" else f"{'an' if title[0] in 'AE' else 'a'} {title.lower()[:-1]}"
    parts = [
        INTRODUCTION.format(
            title=title, one=one, argument=registry.argument_of(kind), name=name, module=registry.kinds()[kind].module
        )
    ]
    for cls, plugins in by_class(listed).items():
        parts += _section(kind, cls, plugins)
    return "\n".join(parts)


def by_class(listed: list[Listed]) -> dict[type, list[Listed]]:
    """Return the plugins of each class, those that are the class itself before presets of it."""
    found: dict[type, list[Listed]] = {}
    for each in sorted(listed, key=lambda each: (each.is_preset, each.entry.name)):
        found.setdefault(_class_of(each), []).append(each)
    first = {cls: plugins[0] for cls, plugins in found.items()}
    order = sorted(found, key=lambda cls: (first[cls].folder.parts[0] == "contrib", first[cls].entry.name))
    return {cls: found[cls] for cls in order}


def _class_of(plugin: Listed) -> type:
    try:
        return class_of(plugin.entry)
    except ConfigError:  # a preset for devices that this machine does not have
        return type(plugin.entry.name, (), {"__doc__": inspect.getdoc(plugin.target)})


def _section(kind: str, cls: type, plugins: list[Listed]) -> list[str]:
    first = plugins[0]
    names = [each for each in plugins if not each.is_preset] or plugins
    title = ", ".join(f"`{each.entry.name}`" for each in names)
    ids = "".join(f'<a id="{anchor(each.entry.name)}"></a>' for each in plugins[1:])
    parts = [f"## {title} {{ #{anchor(first.entry.name)} }}\n", ids + "\n" if ids else ""]
    if first.is_preset and not options(cls):
        text = required(inspect.getdoc(first.target), f"{kind} {first.entry.name}")
        return [*parts, prose(text.removeprefix("Return ").capitalize()) + "\n", _package(first, "")]
    described = describe(first.entry)
    summary = required(described["summary"], f"{kind} {first.entry.name}")
    parts += [prose(summary) + "\n", _package(first, cls.__name__)]
    presets = [each for each in plugins if each.is_preset and each not in names]
    if presets or first.is_preset:
        parts += ["Names with options that are set:\n", *(_preset(each, cls) for each in presets or plugins), ""]
    owner = first.entry.name
    parts += [
        option(each["name"], prose(each["type"]), each["default"], each["doc"], owner) for each in described["options"]
    ]
    return [*parts, "" if described["options"] else "It has no options.\n"]


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
