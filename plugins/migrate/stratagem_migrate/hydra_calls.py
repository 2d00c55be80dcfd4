"""Find trainers that hydra builds with objects: OmegaConf copies instances of attrs classes, which plugins are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stratagem_migrate.findings import CHANGE, Finding
from stratagem_migrate.source import Source, short

#: Arguments of the Trainer that take instances of plugins.
_OBJECTS: Final = ("callbacks", "logger", "strategy", "plugins", "precision", "profiler", "environment")


def instantiated(source: Source) -> Iterator[Finding]:
    """Yield a finding for each ``instantiate(cfg.trainer, callbacks=callbacks)``."""
    for node in calls(source):
        objects = ", ".join(f"{each.arg}=..." for each in node.keywords if each.arg in _OBJECTS)
        name = short(node.func)
        yield source.finding(
            node, CHANGE, short(node), f"{name}({short(node.args[0])}, _partial_=True)({objects})",
            "hydra would copy the objects into its configuration, where they lose their class",
        )  # fmt: skip


def calls(source: Source) -> Iterator[ast.Call]:
    """Yield the calls of hydra that build a trainer with objects."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or source.qualified(node.func) not in _INSTANTIATE or len(node.args) != 1:
            continue
        is_trainer = "trainer" in short(node.args[0]).lower()
        if is_trainer and any(each.arg in _OBJECTS for each in node.keywords):
            yield node


def are_objects(source: Source, node: ast.Call) -> bool:
    """Whether all arguments are objects, as far as the source tells: no part of a configuration that hydra builds."""
    return all(
        each.arg is not None
        and not each.arg.startswith("_")
        and isinstance(each.value, ast.Name | ast.List | ast.Constant)
        and not _is_configuration(source, each.value)
        for each in node.keywords
    )


def _is_configuration(source: Source, value: ast.expr) -> bool:
    """Whether a variable is assigned an attribute or an item, such as ``cfg.callbacks``."""
    return isinstance(value, ast.Name) and any(
        isinstance(node, ast.Assign | ast.AnnAssign)
        and any(isinstance(each, ast.Name) and each.id == value.id for each in _targets(node))
        and isinstance(node.value, ast.Attribute | ast.Subscript)
        for node in source.nodes
    )


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


_INSTANTIATE: Final = ("hydra.utils.instantiate", "hydra.utils.call", "hydra._internal.instantiate.instantiate")
