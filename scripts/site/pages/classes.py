"""Pages of classes: mkdocstrings writes each member from its signature, its docstring and its `#:` comment."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import griffe

from pages.comments import Comments
from pages.text import required

MODULE = """# Module

`stratagem.Module` is a torch module with the steps of training, validation, test and prediction. Override
`training_step` and `configure_optimizers`, and other methods as needed.
"""

DATAMODULE = """# DataModule

`stratagem.DataModule` has the loaders of a run, and what downloads and prepares their data. Pass one to `trainer.fit`
instead of loaders.
"""

BASES = """# Base classes of plugins

A plugin derives from the class of its kind. Its attrs fields are its options, its `@hookimpl` methods implement
[hooks](../hooks.md); the methods below are called before a process starts. [Writing a plugin](../writing-a-plugin.md)
shows how to use them.
"""

CONTEXT = """# What hooks receive

The arguments `run` and `trainer` of [hooks](../hooks.md), and what they give access to: the processes, collective
operations, the mesh. What `trainer` has is on the page of the [trainer](trainer.md).
"""

OF_PLUGINS = (
    *(f"stratagem.api.kinds.{name}" for name in (
        "Plugin", "Strategy", "Precision", "Environment", "Launcher", "Accelerator", "CheckpointFormat",
    )),
    "stratagem_buckets.CommHook", "stratagem_trainer.api.kinds.Callback", "stratagem_trainer.api.kinds.Logger",
    "stratagem.api.kinds.Command",
    "stratagem.api.kinds.Kind",
)  # fmt: skip
OF_HOOKS = (
    *(f"stratagem.api.{path}" for path in (
        "context.RunContext", "run_parts.RunStep", "run_parts.RunSaver", "run_parts.RunStack", "world.World",
        "world.Collectives", "group_services.GroupServices", "group_services.KeyValueStore", "world.Mesh",
        "kinds.PrecisionPolicy", "capabilities.Capabilities",
    )),
    "stratagem_buckets.Bucket",
)  # fmt: skip
OF_MODULES = {
    "Steps, optimizers, logging, checkpoints": "stratagem_trainer.module.Module",
    "Events": "stratagem_trainer.api.events.EventMethods",
    "Before and after a call": "stratagem_trainer.api.events.ModuleEvents",
    "The trainer, this process, parameters": "stratagem_trainer.module_access.ModuleAccess",
}

#: Attributes that every class of plugins sets.
OF_ALL_KINDS = {"kind", "capabilities", "identified_by_options"}


def pages(root: Path) -> dict[str, str]:
    """Return the pages by path."""
    module = [f"## {title}\n\n{members(root, path)}" for title, path in OF_MODULES.items()]
    bases = [_class(root, path, () if path.endswith(".Plugin") else OF_ALL_KINDS) for path in OF_PLUGINS]
    return {
        "reference/module.md": "\n".join([MODULE, *module]),
        "reference/datamodule.md": f"{DATAMODULE}\n{members(root, 'stratagem_trainer.datamodule.DataModule', level=2)}",
        "reference/bases.md": "\n".join([BASES, *bases]),
        "reference/context.md": "\n".join([CONTEXT, *(_class(root, path) for path in OF_HOOKS)]),
    }


def members(
    root: Path, path: str, without: tuple[str, ...] | set[str] = (), level: int = 3, attributes: bool = True,
    only: tuple[str, ...] = (),
) -> str:  # fmt: skip
    """Return a directive of mkdocstrings for each public member that the class at `path` defines, or for `only` some.

    Raises:
        MissingTextError: a member has no docstring and no ``#:`` comment.
    """
    directives = []
    for name, member in _class_at(root, path).members.items():
        if (
            name.startswith("_")
            or name in without
            or (only and name not in only)
            or member.is_alias
            or not (attributes or member.is_function)
        ):
            continue
        required(member.docstring.value if member.docstring else "", f"{path}.{name}")
        directives.append(f"::: {path}.{name}\n    options:\n      heading_level: {level}\n")
    return "\n".join(directives)


def _class(root: Path, path: str, without: tuple[str, ...] | set[str] = ()) -> str:
    """Return the section of a class: its docstring, then its members."""
    docstring = _class_at(root, path).docstring
    required(docstring.value if docstring else "", path)
    head = f"::: {path}\n    options:\n      members: false\n"
    return f"{head}\n{members(root, path, without)}"


def _class_at(root: Path, path: str) -> griffe.Object:
    package, _, rest = path.partition(".")
    found = _package(root, package)[rest]
    assert isinstance(found, griffe.Object)
    return found


@cache
def _package(root: Path, name: str) -> griffe.Object:
    """Return a package, read without an import."""
    found = griffe.load(
        name, search_paths=[str(root / folder) for folder in ("core", "plugins/trainer", "plugins/libraries")],
        extensions=griffe.load_extensions(Comments()), submodules=True,
    )  # fmt: skip
    assert isinstance(found, griffe.Object)
    return found
