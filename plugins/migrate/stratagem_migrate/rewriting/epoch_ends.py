"""Rewrite ``validation_epoch_end(self, outputs)``: the module collects the outputs of its steps in a list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import libcst as cst
from attrs import frozen

from stratagem_migrate.rewriting.edits import Edits, with_statements_first
from stratagem_migrate.source import Source, methods

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@frozen
class _Stage:
    """The names of one stage."""

    epoch_end: str
    step: str
    outputs: str
    on_start: str
    on_batch_end: str
    on_end: str


_STAGES: Final = tuple(
    _Stage(f"{name}_epoch_end", f"{name}_step", f"{name}_step_outputs", f"on_{event}_epoch_start",
           f"on_{event}_batch_end", f"on_{event}_epoch_end")
    for name, event in (("training", "train"), ("validation", "validation"), ("test", "test"))
)  # fmt: skip


def rewrite_epoch_ends(edits: Edits) -> None:
    """Rewrite each such method whose class shows everything that it needs."""
    for cls in edits.source.of_role("module"):
        own = {each.name: each for each in methods(cls)}
        for stage in _STAGES:
            if stage.epoch_end in own and _is_certain(edits.source, cls, own, stage):
                _rewrite(edits, cls, own, stage)


def _is_certain(source: Source, cls: ast.ClassDef, own: dict[str, _Function], stage: _Stage) -> bool:
    method, step = own[stage.epoch_end], own.get(stage.step)
    arguments = method.args
    plain = len(arguments.args) == 2 and not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs)
    if not plain or step is None or stage.on_end in own or method.decorator_list:
        return False
    if any(each.arg in ("dataloader_idx", "optimizer_idx", "hiddens") for each in step.args.args):
        return False
    if any(isinstance(node, ast.Return) and node.value is not None for node in _own_nodes(method)):
        return False
    collects = own.get(stage.on_batch_end)
    if collects is not None and (stage.step == "training_step" or len(collects.args.args) < 2):
        return False
    names = {stage.epoch_end, stage.outputs}
    used = any(
        (isinstance(node, ast.Attribute) and node.attr in names) or (isinstance(node, ast.Name) and node.id in names)
        for node in source.nodes
    )
    relatives = [each for each in source.classes.values() if each is not cls and _are_related(source, each, cls)]
    hooks = {stage.on_start, stage.on_batch_end, stage.on_end, stage.epoch_end, stage.step}
    return not used and not any(each.name in hooks for other in relatives for each in methods(other))


def _are_related(source: Source, one: ast.ClassDef, other: ast.ClassDef) -> bool:
    def bases(cls: ast.ClassDef, seen: frozenset[str]) -> Iterator[str]:
        for base in cls.bases:
            name = ast.unparse(base).rpartition(".")[2]
            if name not in seen:
                yield name
                if name in source.classes:
                    yield from bases(source.classes[name], seen | {name})

    return other.name in bases(one, frozenset()) or one.name in bases(other, frozenset())


def _own_nodes(method: _Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of functions inside it."""
    waiting: list[ast.AST] = list(method.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _rewrite(edits: Edits, cls: ast.ClassDef, own: dict[str, _Function], stage: _Stage) -> None:
    inherits = any(edits.source.known(base) is None for base in cls.bases)
    outputs = own[stage.epoch_end].args.args[1].arg
    before: list[str] = []
    for name, statements, header in (
        (stage.on_start, [f"self.{stage.outputs} = []"], "self"),
        (stage.on_batch_end, _collect(stage, own.get(stage.on_batch_end)), "self, outputs, batch, batch_idx"),
    ):
        if name in own:
            edits.at(own[name], partial(with_statements_first, statements=statements))
        else:
            if inherits:  # a class in between may define it, too
                statements = [f"super().{name}({header.removeprefix('self').removeprefix(', ')})", *statements]
            body = "\n    ".join(line for each in statements for line in each.split("\n"))
            before.append(f"def {name}({header}):\n    {body}\n")
    if stage.step == "training_step":
        edits.add_import("import torch")
    edits.at(own[stage.epoch_end], lambda function: _epoch_end(function, stage, outputs, before))


def _collect(stage: _Stage, method: _Function | None) -> list[str]:
    """Return the statements that keep the output of a batch, as Lightning did."""
    name = method.args.args[1].arg if method is not None and len(method.args.args) > 1 else "outputs"
    if stage.step != "training_step":
        return [f"if {name} is not None:\n    self.{stage.outputs}.append({name})"]
    detached = "value.detach() if isinstance(value, torch.Tensor) else value"
    lines = (
        f"if {name} is not None:",
        f'    values = {name} if isinstance({name}, dict) else {{"loss": {name}}}',
        f"    self.{stage.outputs}.append(",
        f"        {{key: {detached} for key, value in values.items()}}",
        "    )",
    )
    return ["\n".join(lines)]


def _epoch_end(function: Any, stage: _Stage, outputs: str, before: list[str]) -> Any:
    parameters = function.params.params[:1]
    parameters = [parameters[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
    ended = function.with_changes(
        name=function.name.with_changes(value=stage.on_end), params=function.params.with_changes(params=parameters)
    )
    take = f"{outputs}, self.{stage.outputs} = self.{stage.outputs}, []"
    ended = with_statements_first(ended, [take])
    new = [cst.parse_statement(each) for each in before]
    if not new:
        return ended
    blank = cst.EmptyLine(indent=False)
    rest = [each.with_changes(leading_lines=[blank]) for each in new[1:]]
    comments = [each for each in function.leading_lines if each.comment is not None]
    first = new[0].with_changes(leading_lines=[each for each in function.leading_lines if each.comment is None])
    return cst.FlattenSentinel([first, *rest, ended.with_changes(leading_lines=[blank, *comments])])
