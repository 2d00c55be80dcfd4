"""Find uses that no name of Lightning shows: steps that are switched off, -1 from hooks, ranks asked elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from stratagem_migrate.findings import CHANGE, CHECK, Finding
from stratagem_migrate.source import Source, constant, short

#: How to switch a step off.
_STEPS: Final = {
    "training_step": "Trainer(limit_train_batches=0)",
    "validation_step": "Trainer(limit_val_batches=0)",
    "test_step": "Trainer(limit_test_batches=0)",
    "predict_step": "Trainer(limit_predict_batches=0)",
}
_RANK_ZERO: Final = ("rank_zero_only", "rank_zero_info", "rank_zero_warn", "rank_zero_debug", "rank_zero_deprecation")


def switched_off(source: Source) -> Iterator[Finding]:
    """Find ``model.validation_step = None``, with which Lightning does not validate."""
    for node in source.nodes:
        if not (isinstance(node, ast.Assign) and constant(node.value) is None and source.is_about_lightning):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr in _STEPS:
                yield source.finding(node, CHANGE, short(node), _STEPS[target.attr], "a step is a method, never None")


def minus_one(source: Source) -> Iterator[Finding]:
    """Find hooks that return -1 to stop: here only a module's `on_train_batch_start` may."""
    for role in ("module", "callback"):
        for method in source.methods_of(role):
            stops = role == "module" and method.name == "on_train_batch_start"
            if method.name.startswith("on_") and not stops:
                yield from _returns_minus_one(source, method)


def _returns_minus_one(source: Source, method: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and node.value is not None and constant(node.value) == -1:
            yield source.finding(
                node, CHECK, "return -1", "trainer.should_stop = True",
                "-1 skips the rest of an epoch only from on_train_batch_start of a module",
            )  # fmt: skip


def utilities(source: Source) -> Iterator[Finding]:
    """Find functions of `lightning_utilities` that ask Lightning for the rank."""
    for node in source.nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            package, _, last = source.qualified(node).rpartition(".")
            if package.startswith("lightning_utilities") and last in _RANK_ZERO:
                instead = "stratagem.rank_zero_only" if last == "rank_zero_only" else "if trainer.is_global_zero:"
                yield source.finding(node, CHANGE, short(node), instead, "without Lightning no rank is set")


def copied_lists(source: Source) -> Iterator[Finding]:
    """Find ``trainer.callbacks.append(callback)``, which changes a copy."""
    for node in source.nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(
                    attr="append" | "extend" | "insert" | "remove",
                    value=ast.Attribute(attr="callbacks" | "loggers" as name, value=owner),
                )
            ):
                if source.is_trainer(owner) and source.is_about_lightning:
                    argument = {"callbacks": "callbacks", "loggers": "logger"}[name]
                    yield source.finding(node, CHANGE, short(node), f"Trainer({argument}=[...])",
                                         f"trainer.{name} is a copy")  # fmt: skip


def private_of_loggers(source: Source) -> Iterator[Finding]:
    """Find ``trainer.logger._log_graph = True``: attributes of Lightning's `TensorBoardLogger`."""
    for statement in assigned_to_loggers(source):
        yield source.finding(statement, CHANGE, short(statement), "leave it out", "no logger here reads it")


def assigned_to_loggers(source: Source) -> Iterator[ast.Assign]:
    for node in source.nodes:
        match node:
            case ast.Assign(targets=[ast.Attribute(attr="_log_graph" | "_default_hp_metric")]):
                if source.is_about_lightning:
                    yield node
