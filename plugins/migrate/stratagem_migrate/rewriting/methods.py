"""Rewrite methods of modules and callbacks whose names or arguments are others here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Final

import libcst as cst

from stratagem.discovery.catalog import moved_names
from stratagem_migrate import installed, outputs
from stratagem_migrate.definitions import is_hook_as_it_is
from stratagem_migrate.rewriting.edits import Edits, Renamer, expression, with_statements_first
from stratagem_migrate.rewriting.rank_zero import GUARD, decorator_of
from stratagem_migrate.rewriting.references import Namespace
from stratagem_migrate.source import Source, constant, methods
from stratagem_trainer.events import arguments_of
from stratagem_trainer.module_checks import CALLED_WITH

_Function = ast.FunctionDef | ast.AsyncFunctionDef

#: Methods of modules that have another name and the same meaning.
_RENAMED: Final = {"training_end": "training_step_end", "tng_dataloader": "train_dataloader"}
#: Arguments that Lightning passed once; a method that does not use them can do without.
_FORMER: Final = ("optimizer_idx", "opt_idx", "on_tpu", "using_native_amp", "using_lbfgs", "dataloader_idx", "unused")
_WITHOUT_FORMER: Final = (
    "optimizer_step", "optimizer_zero_grad", "backward", "lr_scheduler_step", "configure_gradient_clipping",
    "on_before_optimizer_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad",
)  # fmt: skip


def rewrite_module_methods(edits: Edits) -> None:
    """Rename methods of modules, and drop arguments that are not passed and not used."""
    for cls in edits.source.of_role("module"):
        own = {each.name for each in methods(cls)}
        for method in methods(cls):
            new = _RENAMED.get(method.name)
            if new is not None and new not in own and not _is_called(edits.source, method.name):
                edits.at(method, _renamed(new))
            elif method.name in _WITHOUT_FORMER:
                _drop_former(edits, method)


def _renamed(new: str) -> Any:
    return lambda function: function.with_changes(name=function.name.with_changes(value=new))


def _is_called(source: Source, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in source.nodes) or any(
        isinstance(node, ast.Name) and node.id == name for node in source.nodes
    )


def _drop_former(edits: Edits, method: _Function) -> None:
    known = CALLED_WITH.get(method.name) or arguments_of(method.name)
    former = (*_FORMER, "optimizer") if method.name == "backward" else _FORMER
    given = [each.arg for each in method.args.args[1:]]
    gone = [name for name in given if name in former and name not in known and not _uses(method, name)]
    num_required = len(given) - len(gone) - len(method.args.defaults)
    if gone and num_required <= len(known):
        edits.at(method, lambda function: _without_parameters(function, gone))


def _uses(function: _Function, name: str) -> bool:
    """Whether the body reads or sets a variable, or uses all of them."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    return any(isinstance(node, ast.Name) and node.id in (name, "locals") for node in nodes)


def _without_parameters(function: Any, gone: Sequence[str]) -> Any:
    kept = [each for each in function.params.params if each.name.value not in gone]
    last = function.params.params[-1]
    if kept and kept[-1] is not last and not function.params.star_kwarg and not _has_star(function.params):
        kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_param=last.whitespace_after_param)
    return function.with_changes(params=function.params.with_changes(params=kept))


def _has_star(parameters: Any) -> bool:
    return isinstance(parameters.star_arg, cst.Param | cst.ParamStar)


def rewrite_outputs(edits: Edits) -> None:
    """Rewrite ``outputs["loss"]`` in `on_train_batch_end`: Lightning passes a dictionary of detached values."""
    for use, name, is_tensor in outputs.uses(edits.source):
        value = outputs.instead(name, is_tensor)
        edits.replace(use, f"{name}.detach()" if is_tensor else f"({value}).detach()")


# --- Callbacks ---------------------------------------------------------------------------------------------------


def rewrite_callbacks(edits: Edits, names: Namespace) -> None:
    """Mark the hooks of callbacks with `@hookimpl`, and name their arguments as here."""
    for method in edits.source.methods_of("callback"):
        if _is_plain_hook(edits.source, method) and not is_hook_as_it_is(method):
            _rewrite_hook(edits, names, method)


def _is_plain_hook(source: Source, method: _Function) -> bool:
    plain = not method.decorator_list or decorator_of(source, method) is not None
    known = method.name in installed.hooks() and method.name not in moved_names("hooks")
    return known and plain and isinstance(method, ast.FunctionDef)


def _rewrite_hook(edits: Edits, names: Namespace, method: _Function) -> None:
    known = installed.hooks()[method.name]
    given = [each.arg for each in method.args.args[1:]]
    arguments = method.args
    if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        return
    new: dict[str, str] = {}
    gone: list[str] = []
    for place, name in enumerate(given):
        meaning = "module" if name == "pl_module" else name
        if meaning not in known:
            in_place = known[place] if place < len(known) and known[place] != "run" else None
            if in_place is not None and in_place not in given:
                meaning = in_place
            elif not _uses(method, name):
                gone.append(name)
                continue
            else:
                return
        if meaning != name:
            if _uses(method, meaning) or meaning in given or meaning in new.values():
                return
            new[name] = meaning
    supers = _calls_of_super(edits.source, method)
    if supers is None or _returns_a_value(method):
        return
    for statement in supers:
        edits.remove(statement)
    rank_zero = decorator_of(edits.source, method)
    if rank_zero is not None:
        if "trainer" not in given:
            return
        edits.replaced.add(rank_zero)
    decorator = names.of_stratagem("hookimpl")
    first = [] if rank_zero is None else [GUARD]
    edits.at(method, lambda function: with_statements_first(_as_hook(function, decorator, new, gone), first))


def _as_hook(function: Any, decorator: str, new: dict[str, str], gone: Sequence[str]) -> Any:
    function = _without_parameters(function, gone)
    plain = [
        each.with_changes(default=None, equal=cst.MaybeSentinel.DEFAULT) if each.default is not None else each
        for each in function.params.params
    ]
    function = function.with_changes(params=function.params.with_changes(params=plain))
    if new:
        renamer = Renamer(new)
        function = function.with_changes(params=function.params.visit(renamer), body=function.body.visit(renamer))
    return function.with_changes(decorators=[cst.Decorator(expression(decorator))])


def _calls_of_super(source: Source, method: _Function) -> list[ast.stmt] | None:
    """Return the statements that call Lightning's method, which does nothing; None if a result is used."""
    found: list[ast.stmt] = []
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and node.attr == method.name and ast.unparse(node.value) == "super()":
            call = source.parents[node]
            statement = source.parents.get(call)
            cls = source.class_of(method)
            direct = cls is not None and all(_is_callback(source, base) for base in cls.bases)
            if not isinstance(statement, ast.Expr) or not direct:
                return None
            found.append(statement)
    return found


def _is_callback(source: Source, base: ast.expr) -> bool:
    return (source.known(base) or "").rpartition(".")[2] == "Callback"


def _returns_a_value(method: _Function) -> bool:
    """Whether the method returns what Lightning used: state to save, or -1."""
    return any(
        isinstance(node, ast.Return) and node.value is not None and constant(node.value) is not None
        for node in ast.walk(method)
    )
