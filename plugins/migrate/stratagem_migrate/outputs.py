"""Find code that takes the `outputs` of `on_train_batch_end` for a dictionary, as Lightning passes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stratagem_migrate.findings import CHANGE, CHECK, Finding
from stratagem_migrate.source import Source, methods, short

#: The position of `outputs` among the arguments of `on_train_batch_end`, after self.
_POSITION = {"module": 0, "callback": 2}
_NOTE = "outputs is what training_step returned, with its graph, and not always a dictionary"


def of_training(source: Source) -> Iterator[Finding]:
    """Find uses of ``outputs["loss"]`` where `training_step` returns, or may return, a tensor."""
    for use, name, is_tensor in uses(source):
        yield source.finding(use, CHANGE if is_tensor else CHECK, short(use), instead(name, is_tensor), _NOTE)


def uses(source: Source) -> Iterator[tuple[ast.expr, str, bool]]:
    """Yield each use with the name of the argument, and whether `training_step` of the class returns a tensor."""
    for role, position in _POSITION.items():
        for cls in source.of_role(role):
            named = {method.name: method for method in methods(cls)}
            method, step = named.get("on_train_batch_end"), named.get("training_step")
            if method is None or (step is not None and _returns_dictionaries(step)):
                continue
            given = [argument.arg for argument in method.args.args[1:]]
            name = "outputs" if "outputs" in given else given[position] if len(given) > position else ""
            for use in _lookups(method, name):
                yield use, name, step is not None


def instead(name: str, is_tensor: bool) -> str:
    """Return what to write: the tensor where `training_step` of the class returns one, otherwise either."""
    return name if is_tensor else f'{name}["loss"] if isinstance({name}, dict) else {name}'


def _lookups(method: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield ``name["loss"]`` and ``name.get("loss")`` that are not in a branch that has checked for a dictionary."""
    if any(isinstance(node, ast.Call) and short(node).startswith(f"isinstance({name},") for node in ast.walk(method)):
        return
    for node in ast.walk(method):
        if isinstance(node, ast.Subscript):
            used, keys = short(node.value), [node.slice]
        elif isinstance(node, ast.Call):
            used, keys = short(node.func).removesuffix(".get"), node.args
        else:
            continue
        if used == name and keys and _is_loss(keys[0]):
            yield node


def _is_loss(key: ast.expr) -> bool:
    return isinstance(key, ast.Constant) and key.value == "loss"


def _returns_dictionaries(step: ast.AST) -> bool:
    """Whether some `return` of the step has a dictionary, or a name that may be one."""
    returned = [node.value for node in ast.walk(step) if isinstance(node, ast.Return) and node.value is not None]
    dictionaries = {
        target.id
        for node in ast.walk(step)
        if isinstance(node, ast.Assign) and _is_dictionary(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return any(
        _is_dictionary(value) or (isinstance(value, ast.Name) and value.id in dictionaries) for value in returned
    )


def _is_dictionary(value: ast.expr) -> bool:
    return isinstance(value, ast.Dict) or (isinstance(value, ast.Call) and short(value.func) == "dict")
