"""Rewrite attributes and methods of modules and trainers that have another name here."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import libcst as cst

from stratagem_migrate import installed, other_uses, own, strategies, trainers
from stratagem_migrate.devices_and_env import variable
from stratagem_migrate.rewriting import call_arguments
from stratagem_migrate.rewriting.edits import Edits, code, expression
from stratagem_migrate.source import UNKNOWN, Source, constant, methods

#: Attributes of a module that one expression replaces.
_SELF: Final = ("on_gpu", "on_tpu", "use_ddp", "datamodule")
#: Attributes of a trainer that one expression replaces.
_TRAINER: Final = (
    "training_type_plugin", "precision_plugin", "root_gpu", "root_device", "proc_rank", "running_sanity_check",
    "progress_bar_dict",
)  # fmt: skip
#: Attributes of a trainer's strategy that one expression on the trainer replaces.
_STRATEGY: Final = ("root_device", "model", "is_global_zero", "global_rank", "world_size")


def rewrite_on_self(edits: Edits) -> None:
    """Rewrite what modules read of themselves, and the arguments of their own methods."""
    for cls in edits.source.of_role("module"):
        stored = _attributes(edits.source, cls)
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute) and own.is_self(node.value) and isinstance(node.ctx, ast.Load):
                name = node.attr
                if name in _SELF and stored is not None and name not in stored:
                    edits.replace(node, own.SELF[name][0])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and own.is_self(node.func.value):
                _rewrite_own_call(edits, node, node.func.attr)
        _rewrite_stored_hparams(edits, cls)


def _attributes(source: Source, cls: ast.ClassDef) -> set[str] | None:
    """Return what a class and its bases in this file set and define; None if it has a base elsewhere."""
    found = own.stored(cls) | {method.name for method in methods(cls)}
    for base in cls.bases:
        name = ast.unparse(base)
        if name in source.classes and source.classes[name] is not cls:
            inherited = _attributes(source, source.classes[name])
            if inherited is None:
                return None
            found |= inherited
        elif source.known(base) is None:
            return None
    return found


def _rewrite_own_call(edits: Edits, node: ast.Call, method: str) -> None:
    if method in ("log", "log_dict"):
        values = 2 if method == "log" else 1
        rest = node.args[values:]
        names = own.LOG_ORDER[: len(rest)]
        if rest and len(names) == len(rest) and not any(isinstance(each, ast.Starred) for each in node.args):
            edits.at(node, lambda call: call_arguments.name_positional(call, names, values))
        _drop_keywords(edits, node, _LOG_DROPPED, installed.log_options())
    elif method == "optimizers":
        _drop_keywords(edits, node, {"use_pl_optimizer": _is(True)}, frozenset())
    elif method == "save_hyperparameters":
        known = frozenset(installed.parameters("Module", "save_hyperparameters"))
        _drop_keywords(edits, node, {"frame": _is(None)}, known)


def _rewrite_stored_hparams(edits: Edits, cls: ast.ClassDef) -> None:
    """Rewrite ``self.hparams = hparams`` in the constructor."""
    for method in methods(cls):
        if method.name != "__init__":
            continue
        arguments = {each.arg for each in method.args.args[1:]}
        for statement in method.body:
            match statement:
                case ast.Assign(targets=[ast.Attribute(attr="hparams") as target], value=ast.Name(id=name)):
                    if own.is_self(target.value) and name in arguments:
                        edits.line(statement, _saved(name))


def _saved(name: str) -> Callable[[Any], Any]:
    new = cst.Expr(expression(f"self.save_hyperparameters({name})"))
    return lambda line: line.with_changes(body=[new])


# --- Trainers ----------------------------------------------------------------------------------------------------


def rewrite_on_trainers(edits: Edits) -> None:
    """Rewrite what is read of trainers, and the arguments of their methods."""
    source = edits.source
    if not source.is_about_lightning:
        return
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and source.is_trainer(node.value):
            _rewrite_attribute(edits, node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if source.is_trainer(node.func.value):
                _rewrite_stage(edits, node, node.func.attr)
            if node.func.attr == "load_from_checkpoint":
                _rewrite_loading(edits, node)
        elif isinstance(node, ast.If):
            _rewrite_guard(edits, node)
    for statement in other_uses.assigned_to_loggers(source):
        edits.remove(statement)
    for mesh, axis in strategies.named_axes(source):
        if axis in strategies.AXES:
            edits.replace(mesh.slice, f'"{strategies.AXES[axis]}"')


def _rewrite_attribute(edits: Edits, node: ast.Attribute) -> None:
    parent, source = edits.source.parents.get(node), edits.source
    if node.attr in source.set_on_trainers:
        return
    if node.attr in trainers.STRATEGIES and isinstance(parent, ast.Attribute):
        call = source.parents.get(parent)
        if parent.attr == "barrier" and isinstance(call, ast.Call) and call.func is parent:
            edits.at(call, lambda old: expression(f"{_trainer_of(old.func)}.run.collectives.barrier()", old))
        elif parent.attr == "broadcast" and isinstance(call, ast.Call) and call.func is parent:
            if len(call.args) == 1 and not call.keywords:
                edits.at(parent, lambda old: expression(f"{_trainer_of(old)}.run.collectives.broadcast_object", old))
        elif parent.attr in _STRATEGY:
            new = trainers.STRATEGY[parent.attr].removeprefix("trainer.")
            edits.at(parent, lambda old: expression(f"{_trainer_of(old)}.{new}", old))
        elif node.attr == "training_type_plugin":
            edits.at(node, lambda old: expression(f"{code(old.value)}.strategy", old))
    elif node.attr == "get_model" and isinstance(parent, ast.Call) and not parent.args:
        edits.at(parent, lambda old: expression(f"{code(old.func.value)}.module", old))
    elif node.attr in _TRAINER:
        new = trainers.TRAINER[node.attr][0].removeprefix("trainer.")
        edits.at(node, lambda old: expression(f"{code(old.value)}.{new}", old))


def _trainer_of(strategys: Any) -> str:
    """Return the code of ``trainer`` in ``trainer.strategy.barrier``."""
    return code(strategys.value.value)


def _rewrite_stage(edits: Edits, node: ast.Call, method: str) -> None:
    if method not in trainers.STAGES:
        return
    known = frozenset(installed.parameters("Trainer", method))
    given = {each.arg for each in node.keywords}
    for keyword in node.keywords:
        new = trainers.KEYWORDS.get(keyword.arg or "")
        if keyword.arg is not None and keyword.arg not in known and new in known and new not in given:
            edits.at(node, partial(call_arguments.rename, old=keyword.arg, new=new))
    _drop_keywords(edits, node, {"weights_only": _is(None, False), "verbose": _is(True)}, known - {"weights_only"})


def _rewrite_loading(edits: Edits, node: ast.Call) -> None:
    known = frozenset(installed.parameters("Module", "load_from_checkpoint"))
    _drop_keywords(edits, node, {"weights_only": _always, "hparams_file": _is(None)}, known - {"weights_only"})


def _rewrite_guard(edits: Edits, node: ast.If) -> None:
    """Rewrite ``if trainer.is_global_zero: trainer.save_checkpoint(path)``: all ranks call it."""
    match node:
        case ast.If(
            test=ast.Attribute(attr="is_global_zero", value=owner),
            body=[ast.Expr(value=ast.Call(func=ast.Attribute(attr="save_checkpoint", value=saver)))],
            orelse=[],
        ):
            above = edits.source.parents.get(node)
            is_elif = isinstance(above, ast.If) and node in above.orelse
            if edits.source.is_trainer(owner) and edits.source.is_trainer(saver) and not is_elif:
                edits.at(node, _unguarded)


def _unguarded(block: Any) -> Any:
    if not isinstance(block.body, cst.IndentedBlock):
        return block
    statement: Any = block.body.body[0]
    comments = [cst.EmptyLine(comment=block.body.header.comment)] if block.body.header.comment is not None else []
    after = [each for each in block.body.footer if each.comment is not None]
    lines = [*block.leading_lines, *comments, *statement.leading_lines, *after]
    return statement.with_changes(leading_lines=lines)


# --- Functions ---------------------------------------------------------------------------------------------------


def rewrite_functions(edits: Edits) -> None:
    """Rewrite arguments of `seed_everything`, and environment variables."""
    for node in edits.source.nodes:
        if isinstance(node, ast.Call) and (edits.source.known(node.func) or "").endswith("seed_everything"):
            if len(node.args) == 2 and not any(isinstance(each, ast.Starred) for each in node.args):
                edits.at(node, lambda call: call_arguments.name_positional(call, ["workers"], 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and edits.source.is_about_lightning:
            _rewrite_variable(edits, node)


def _rewrite_variable(edits: Edits, node: ast.Constant) -> None:
    value = str(node.value)
    new = variable(value) if value.startswith("PL_") else ""
    if new and not isinstance(edits.source.parents.get(node), ast.JoinedStr):
        plain = new.strip('"')
        edits.at(node, lambda old: old.with_changes(value=old.value.replace(value, plain)))


def _drop_keywords(
    edits: Edits, node: ast.Call, dropped: dict[str, Callable[[ast.expr], bool]], known: frozenset[str]
) -> None:
    """Remove keywords that are not `known`, where their values let them do nothing."""
    for keyword in node.keywords:
        name = keyword.arg
        if name is not None and name not in known and name in dropped and dropped[name](keyword.value):
            edits.at(node, partial(call_arguments.remove, name=name))


def _always(_: ast.expr) -> bool:
    return True


def _is(*values: Any) -> Callable[[ast.expr], bool]:
    def check(value: ast.expr) -> bool:
        literal = constant(value)
        return literal is not UNKNOWN and any(literal is each or literal == each for each in values)

    return check


#: Options of `log` that were removed.
_LOG_DROPPED: Final = dict.fromkeys(("tbptt_reduce_fx", "tbptt_pad_token"), _always) | {
    "sync_dist_op": _is(None, "mean"),
    "enable_graph": _is(False),
    "metric_attribute": _is(None),
    "sync_dist_group": _is(None),
}
