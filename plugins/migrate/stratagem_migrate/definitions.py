"""Check the classes of a script: hooks with other arguments, optimizers, callbacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stratagem.discovery.catalog import moved_names
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.names import NAMES
from stratagem_migrate.source import Source, constant, last_name, methods
from stratagem_migrate.strategies import is_strategy
from stratagem_trainer.api.events import EVENTS

# --- Modules and data modules ------------------------------------------------------------------------------------


def module_methods(source: Source) -> Iterator[Finding]:
    """Find methods of modules and data modules that stratagem does not call."""
    for method in source.methods_of("module"):
        yield from _module_method(source, method)
    for method in source.methods_of("data"):
        if method.name in installed.uncalled_by_data_modules():
            found = installed.uncalled_by_data_modules()[method.name]
            yield source.finding(method, CHANGE, f"def {method.name}", *found)


def _module_method(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    from stratagem_trainer.module_checks import CALLED_WITH, NEEDS  # with torch

    name, given = method.name, [argument.arg for argument in method.args.args[1:]]
    old = f"def {name}({', '.join(['self', *given])})"
    if name in installed.uncalled_methods():
        yield source.finding(method, CHANGE, old, *installed.uncalled_methods()[name])
    elif "optimizer_idx" in given or "hiddens" in given:
        known = CALLED_WITH.get(name)
        kept = old.replace(", optimizer_idx", "") if known is None else f"def {name}({', '.join(['self', *known])})"
        new = "automatic_optimization = False" if name == "training_step" else kept
        note = "and step each of self.optimizers() in training_step" if name == "training_step" else ""
        yield source.finding(method, CHANGE, old, new, note)
    elif name in installed.hooks() and name in EVENTS:
        yield from _event(source, method, old)
    elif name in CALLED_WITH and _num_required(method) > len(CALLED_WITH[name]):
        new = f"def {name}({', '.join(['self', *CALLED_WITH[name]])})"
        yield source.finding(method, CHANGE, old, new, "there are no other arguments")
    elif name in NEEDS:
        note = f"a strategy must provide {NEEDS[name]!r} (`stratagem plugins show NAME`)"
        yield source.finding(method, CHECK, old, "", note)


def _num_required(method: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many arguments a method must get besides self."""
    return len(method.args.args) - 1 - len(method.args.defaults)


def _event(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef, old: str) -> Iterator[Finding]:
    """Check the arguments of an event: passed by name, or in order if the names differ; more are not allowed."""
    known = [name for name in installed.hooks()[method.name] if name not in ("trainer", "module", "run")]
    if _num_required(method) > len(known):
        new = f"def {method.name}({', '.join(['self', *known])})"
        yield source.finding(method, CHANGE, old, new, "there are no other arguments")
    elif method.name == "on_before_optimizer_step":
        yield source.finding(method, CHECK, old, "", 'under "16-mixed" gradients still carry the loss scale here')
    else:
        yield source.finding(method, SAME, old, "")


# --- Optimizers --------------------------------------------------------------------------------------------------


def optimizers(source: Source) -> Iterator[Finding]:
    """Find results of `configure_optimizers` that stratagem reads differently."""
    for cls in source.of_role("module"):
        for method in methods(cls):
            if method.name == "configure_optimizers":
                yield from _configured(source, cls, method)


def _configured(source: Source, cls: ast.ClassDef, method: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(method):
        if isinstance(node, ast.Return) and node.value is not None and not _optimizes_by_hand(cls):
            count = _count(node.value)
            if count > 1:
                yield source.finding(
                    node, CHANGE, f"{count} optimizers", "automatic_optimization = False",
                    "and step each of self.optimizers() in training_step, after manual_backward",
                )  # fmt: skip
        elif isinstance(node, ast.Dict):
            yield from _configuration(source, node)


def _configuration(source: Source, node: ast.Dict) -> Iterator[Finding]:
    keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
    if "scheduler" in keys:
        known, place = installed.scheduler_options(), "leave it out"
    elif "optimizer" in keys:
        known = frozenset({"optimizer", "lr_scheduler", "monitor"})
        place = "in the dict under lr_scheduler, next to scheduler"
    else:
        return
    for key in keys:
        if key not in known:
            new = "automatic_optimization = False" if key == "frequency" and "optimizer" in keys else place
            yield source.finding(node, CHANGE, f'"{key}" in configure_optimizers', new)


def _optimizes_by_hand(cls: ast.ClassDef) -> bool:
    assigned = (node for node in ast.walk(cls) if isinstance(node, ast.Assign) and constant(node.value) is False)
    return any("automatic_optimization" in map(last_name, node.targets) for node in assigned)


def _count(returned: ast.expr) -> int:
    """Return the number of optimizers in a returned expression, as far as the source shows it."""
    lists = (ast.List, ast.Tuple)
    if isinstance(returned, ast.Tuple) and returned.elts and isinstance(returned.elts[0], lists):
        returned = returned.elts[0]
    return len(returned.elts) if isinstance(returned, lists) else 1


# --- Callbacks ---------------------------------------------------------------------------------------------------


def callbacks(source: Source) -> Iterator[Finding]:
    """Yield a finding for each method of the script's callbacks: hooks need `@hookimpl` and list their arguments."""
    for method in source.methods_of("callback"):
        yield from _callback_method(source, method)


def derived(source: Source) -> Iterator[Finding]:
    """Yield a finding for each method that only Lightning calls on a class derived from one of its own."""
    for cls in source.classes.values():
        # `strategies` tells of those that derive from a strategy.
        names = [(source.known(base) or "").rpartition(".")[2] for base in cls.bases if not is_strategy(source, base)]
        places = [NAMES[name].imported_from for name in names if name in NAMES]
        uncalled = {name: new for at in places if at for name, new in installed.uncalled_by_derived(*at).items()}
        for method in methods(cls):
            if method.name in uncalled:
                yield source.finding(method, CHANGE, f"def {method.name}", *uncalled[method.name])


def _callback_method(source: Source, method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Finding]:
    given = [argument.arg for argument in method.args.args]
    if any(last_name(decorator) == "hookimpl" for decorator in method.decorator_list):
        return
    old = f"def {method.name}({', '.join(given)})"
    known = installed.hooks().get(method.name)
    if method.name in moved_names("hooks"):
        yield source.finding(
            method, CHANGE, old, f"@hookimpl def {method.name}(self, run)", moved_names("hooks")[method.name]
        )
    elif known is not None and is_hook_as_it_is(method):
        yield source.finding(method, SAME, old, "")
    elif known is not None:
        names = ["module" if name == "pl_module" else name for name in given[1:]]
        kept = [name for name in names if name in known]
        yield source.finding(
            method, CHANGE, old, f"@hookimpl def {method.name}({', '.join(['self', *kept])})",
            "arguments are passed by name and have no defaults",
        )  # fmt: skip
    elif method.name in installed.uncalled_by_callbacks():
        yield source.finding(method, CHANGE, old, *installed.uncalled_by_callbacks()[method.name])


def is_hook_as_it_is(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a method of a callback gets its arguments in Lightning's order."""
    known = [name for name in installed.hooks()[method.name] if name != "run"]
    return not method.decorator_list and _num_required(method) <= len(known)
