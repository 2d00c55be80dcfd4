"""Find devices by name, and environment variables of Lightning."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stratagem_migrate.findings import CHANGE, CHECK, Finding
from stratagem_migrate.source import Source, short


def devices(source: Source) -> Iterator[Finding]:
    """Find tensors that a module or a callback moves to a named device."""
    for role in ("module", "callback", "data"):
        for cls in source.of_role(role):
            for node in ast.walk(cls):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_move(source, node):
                    yield source.finding(
                        node, CHECK, short(node), "self.device, or register_buffer in __init__",
                        "batches and the module are on the right device already",
                    )  # fmt: skip


def _is_move(source: Source, node: ast.Call) -> bool:
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "cuda":
        return "torch" not in source.qualified(node.func.value).split(".")[:1]
    if node.func.attr != "to" or not node.args:
        return False
    target = node.args[0]
    literal = source.literal(target)
    if isinstance(literal, str):
        return literal.partition(":")[0] in ("cuda", "cpu", "mps", "xla")
    named = isinstance(target, ast.Name) and "device" in target.id.lower()
    return named or source.qualified(getattr(target, "func", target)) == "torch.device"


def variables(source: Source) -> Iterator[Finding]:
    """Find environment variables of Lightning."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("PL_"):
            new = variable(node.value)
            note = "" if new else "stratagem does not read it"
            yield source.finding(node, CHANGE if new else CHECK, f'"{node.value}"', new, note)


def variable(name: str) -> str:
    if name.startswith("PL_TRAINER_"):
        return f'"STRATAGEM_TRAINER_{name.removeprefix("PL_TRAINER_")}"'
    known = {"PL_GLOBAL_SEED": "STRATAGEM_SEED", "PL_SEED_WORKERS": "STRATAGEM_SEED_WORKERS"}
    return f'"{known[name]}"' if name in known else ""
