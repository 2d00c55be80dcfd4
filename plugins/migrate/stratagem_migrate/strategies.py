"""Find strategies of the script's own, and axes of Lightning's device mesh."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stratagem_migrate.findings import CHANGE, Finding
from stratagem_migrate.names import NAMES
from stratagem_migrate.source import Source, constant, methods

#: Axes of the mesh of `ModelParallelStrategy` with other names here.
AXES: Final = {"tensor_parallel": "tensor"}
_BY_HAND: Final = "a strategy plugin, docs/strategy-in-60-lines.md"


def subclasses(source: Source) -> Iterator[Finding]:
    """Find classes that derive from a strategy of Lightning: none of its methods is called."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            if is_strategy(source, base):
                yield source.finding(node, CHANGE, f"class {node.name}({ast.unparse(base)})", *_instead(node))


def is_strategy(source: Source, base: ast.expr) -> bool:
    """Whether an expression names a strategy of Lightning."""
    counterpart = NAMES.get((source.lightning(base) or "").rpartition(".")[2])
    return counterpart is not None and (counterpart.name == "Strategy" or (counterpart.plugin or "?")[0] == "strategy")


def _instead(cls: ast.ClassDef) -> tuple[str, str]:
    if "configure_ddp" in {method.name for method in methods(cls)}:
        options = "find_unused_parameters, static_graph, gradient_as_bucket_view, bucket_cap_mb, ddp_comm_hook"
        return (
            'strategy={"name": "ddp", ...}',
            f"its options {options} replace configure_ddp; for more write {_BY_HAND}",
        )
    return _BY_HAND, "methods of Lightning's strategies are not called"


def axes(source: Source) -> Iterator[Finding]:
    """Find axes of the device mesh that have another name."""
    for node, axis in named_axes(source):
        mesh = ast.unparse(node.value)
        if axis in AXES:
            yield source.finding(node, CHANGE, f'{mesh}["{axis}"]', f'{mesh}["{AXES[axis]}"]')
        elif axis == "data_parallel":
            yield source.finding(
                node, CHANGE, f'{mesh}["{axis}"]', "leave it out, with the fully_shard that uses it",
                "ParallelStrategy(shard=...) shards the layers itself, by its auto_wrap_policy",
            )  # fmt: skip


def named_axes(source: Source) -> Iterator[tuple[ast.Subscript, str]]:
    """Yield each ``self.device_mesh["tensor_parallel"]`` with the name of the axis."""
    for node in source.nodes:
        match node:
            case ast.Subscript(value=ast.Attribute(attr="device_mesh" | "_device_mesh")):
                if source.is_about_lightning:
                    yield node, str(constant(node.slice))
