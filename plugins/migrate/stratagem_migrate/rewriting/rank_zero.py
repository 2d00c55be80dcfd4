"""Rewrite ``@rank_zero_only`` on methods that know the rank."""

from __future__ import annotations

import ast
from typing import Any

from stratagem_migrate.rewriting.edits import Edits, with_statements_first
from stratagem_migrate.source import Source, methods

_Function = ast.FunctionDef | ast.AsyncFunctionDef
GUARD = "if not trainer.is_global_zero:\n    return None"


def decorator_of(source: Source, method: _Function) -> ast.expr | None:
    """Return the decorator ``@rank_zero_only`` of a method that has no other; else None."""
    if len(method.decorator_list) != 1 or not isinstance(method, ast.FunctionDef):
        return None
    (decorator,) = method.decorator_list
    name = source.qualified(decorator)
    is_theirs = source.lightning(decorator) is not None or name.startswith("lightning_utilities.")
    return decorator if is_theirs and name.rpartition(".")[2] == "rank_zero_only" else None


def rewrite_rank_zero(edits: Edits) -> None:
    """Rewrite the methods of modules: on other ranks than 0 they return at once."""
    for cls in edits.source.of_role("module"):
        for method in methods(cls):
            decorator = decorator_of(edits.source, method)
            if decorator is not None and not _yields(method) and not _runs_in_constructor(cls, method.name):
                edits.replaced.add(decorator)
                edits.at(method, _guarded)


def _guarded(function: Any) -> Any:
    leading = [*function.leading_lines, *(line for each in function.decorators for line in each.leading_lines)]
    plain = function.with_changes(decorators=[], leading_lines=leading, lines_after_decorators=[])
    return with_statements_first(plain, ["if self.global_rank != 0:\n    return None"])


def _yields(method: _Function) -> bool:
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(method))


def _runs_in_constructor(cls: ast.ClassDef, name: str) -> bool:
    """Whether the constructor mentions the method: there the module has no trainer, and does not know its rank."""
    constructors = (each for each in methods(cls) if each.name == "__init__")
    return any(
        isinstance(node, ast.Attribute) and node.attr == name for each in constructors for node in ast.walk(each)
    )
