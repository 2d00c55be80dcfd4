"""Find collective calls that only some ranks make."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Final

from stratagem_migrate.findings import CHANGE, Finding
from stratagem_migrate.source import Source, last_name, short

#: Methods that all ranks must call.
_COLLECTIVE: Final = {
    "save_checkpoint", "barrier", "all_gather", "all_reduce", "broadcast", "fit", "validate", "test", "predict",
}  # fmt: skip
_RANKS: Final = {"global_rank", "local_rank", "rank", "node_rank", "proc_rank"}


def guarded(source: Source) -> Iterator[Finding]:
    """Yield a finding for each collective call under a condition on the rank."""
    for node in source.nodes:
        if isinstance(node, ast.If) and (condition := _rank_condition(node.test)):
            yield from _collectives_in(source, _guarded_statements(source, node, condition), short(node.test))
        elif isinstance(node, ast.FunctionDef) and "rank_zero_only" in map(last_name, node.decorator_list):
            yield from _collectives_in(source, node.body, "@rank_zero_only")


def _rank_condition(test: ast.expr) -> str:
    """Return "zero" if `test` is true only on rank 0, "others" if only on other ranks; else an empty string."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {"zero": "others", "others": "zero"}.get(_rank_condition(test.operand), "")
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next((found for found in map(_rank_condition, test.values) if found), "")
    if last_name(test) == "is_global_zero":
        return "zero"
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and last_name(test.left) in _RANKS:
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value == 0:
            return "zero" if isinstance(test.ops[0], ast.Eq) else "others"
    return ""


def _guarded_statements(source: Source, node: ast.If, condition: str) -> Iterable[ast.AST]:
    """Return the statements that only some ranks run: the branch, and those after ``if not zero: return``."""
    reached: list[ast.AST] = [*node.body, *node.orelse]
    leaves = bool(node.body) and isinstance(node.body[-1], ast.Return | ast.Continue | ast.Raise)
    if condition == "others" and leaves:
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(source.parents[node], block, [])
            if isinstance(statements, list) and node in statements:
                reached += statements[statements.index(node) + 1 :]
    return reached


def _collectives_in(source: Source, statements: Iterable[ast.AST], condition: str) -> Iterator[Finding]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_collective(source, node):
                why = "otherwise it waits for the other ranks forever"
                if node.func.attr == "save_checkpoint":
                    why = "on some ranks only it is an error after a minute; only rank 0 writes the file anyway"
                yield source.finding(
                    node, CHANGE, f"{node.func.attr} under {condition!r}", "all ranks call it", why,
                )  # fmt: skip


def _is_collective(source: Source, node: ast.Call) -> bool:
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr == "log":
        return any(keyword.arg == "sync_dist" and source.literal(keyword.value) is True for keyword in node.keywords)
    owner = short(node.func.value, 1000)
    of_the_run = (
        any(word in owner for word in ("trainer", "strategy", "collectives", "distributed", "dist")) or owner == "self"
    )
    return node.func.attr in _COLLECTIVE and (of_the_run or source.is_trainer(node.func.value))
