"""Find imports and other uses of Lightning's names."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from stratagem.errors import nearest
from stratagem_migrate import installed
from stratagem_migrate.findings import CHANGE, CHECK, SAME, Finding
from stratagem_migrate.names import NAMES, OPTIONS, POSITIONS, Counterpart
from stratagem_migrate.source import Source, short, within_lightning
from stratagem_migrate.strategies import is_strategy


def imports(source: Source) -> Iterator[Finding]:
    """Yield a finding for each import of Lightning."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if within_lightning(alias.name) is not None:
                    yield source.finding(node, CHANGE, f"import {ast.unparse(alias)}", "import stratagem as sg")
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and within_lightning(node.module or "") is not None:
            for alias in node.names:
                yield _imported(source, node, alias)


def _imported(source: Source, node: ast.ImportFrom, alias: ast.alias) -> Finding:
    old = f"from {node.module} import {ast.unparse(alias)}"
    if alias.name == "*":
        return source.finding(node, CHANGE, old, "import stratagem as sg")
    qualified = within_lightning(f"{node.module}.{alias.name}") or ""
    counterpart = _counterpart(qualified)
    is_module = alias.name.islower() and not _is_value(source, alias.asname or alias.name)
    if counterpart is None and (is_module or not qualified):
        return source.finding(node, CHANGE, old, "import stratagem as sg")
    counterpart = counterpart or _unknown(alias.name)
    if counterpart.imported_from is None:
        return _replaced(source, node, old, counterpart)
    module, name = counterpart.imported_from
    renamed = f" as {alias.asname}" if alias.asname else ""
    return source.finding(node, CHANGE, old, f"from {module} import {name}{renamed}", counterpart.note)


def references(source: Source) -> Iterator[Finding]:
    """Yield a finding for each use of a name of Lightning."""
    for node in source.nodes:
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        name = source.lightning(node)
        counterpart = _counterpart(name) if name else None
        if name and (_is_handled_with_attribute(source, node, name) or _is_base_of_strategy(source, node)):
            continue
        if name and counterpart is not None:
            yield _reference(source, node, counterpart)
        elif name and _is_unknown(source, node):
            yield _replaced(source, node, short(node), _unknown(name))


def _reference(source: Source, node: ast.Name | ast.Attribute, counterpart: Counterpart) -> Finding:
    origin = counterpart.imported_from
    if isinstance(node, ast.Name) and node.id in source.aliases and origin is not None:
        renamed = source.qualified(node).rpartition(".")[2] != node.id
        if renamed or node.id == origin[1]:  # the finding of the import is enough
            return source.finding(node, SAME, node.id, str(counterpart))
    return _replaced(source, node, short(node), counterpart)


def _replaced(source: Source, node: ast.AST, old: str, counterpart: Counterpart) -> Finding:
    if counterpart.is_missing:
        return source.finding(node, CHANGE, old, "", counterpart.note or "not available yet")
    return source.finding(node, CHANGE, old, str(counterpart), counterpart.note)


def _counterpart(name: str) -> Counterpart | None:
    """Return the counterpart of a dotted name of Lightning; None if it is unknown."""
    module, _, last = name.rpartition(".")
    if name.partition(".")[0] == "metrics":
        package = "torchmetrics.functional" if "functional" in module else "torchmetrics"
        return Counterpart(text=f"{package}.{last}" if module else package, note="a separate package")
    if "demos" in module.split("."):
        return Counterpart(note="demos are not part of stratagem: copy it into your project")
    return NAMES.get(last)


def _is_value(source: Source, bound: str) -> bool:
    """Whether an imported name is used, and not only to reach other names through it, as a module is."""
    uses = [node for node in source.nodes if isinstance(node, ast.Name) and node.id == bound]
    return any(not _continues(source, node) for node in uses)


def _unknown(name: str) -> Counterpart:
    return Counterpart(note=f"stratagem has no {name.rpartition('.')[2]}")


def _is_unknown(source: Source, node: ast.Name | ast.Attribute) -> bool:
    """Return whether the dotted name that `node` ends has no known part, and is not a module."""
    if _continues(source, node):
        return False
    if source.imports_everything and isinstance(node, ast.Name):
        return False
    name = source.lightning(node) or ""
    parts = name.split(".")
    known = any(_counterpart(".".join(parts[: end + 1])) is not None for end in range(len(parts)))
    return not known and bool(name)


def _is_handled_with_attribute(source: Source, node: ast.AST, name: str) -> bool:
    """Return whether another rule handles the longer name: ``Trainer.from_argparse_args``, ``metrics.Accuracy``."""
    follows = getattr(source.parents.get(node), "attr", "")
    return _continues(source, node) and (name == "metrics" or (name == "Trainer" and "argparse" in follows))


def _is_base_of_strategy(source: Source, node: ast.Name | ast.Attribute) -> bool:
    """Whether `strategies.subclasses` handles the name."""
    cls = source.parents.get(node)
    return isinstance(cls, ast.ClassDef) and node in cls.bases and is_strategy(source, node)


def _continues(source: Source, node: ast.AST) -> bool:
    """Return whether `node` is the start of a longer dotted name."""
    return isinstance(source.parents.get(node), ast.Attribute)


# --- Calls of classes that are plugins here ----------------------------------------------------------------------


def plugin_calls(source: Source) -> Iterator[Finding]:
    """Find options of callbacks, loggers and strategies that were renamed or removed."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or (name := source.known(node.func)) is None:
            continue
        theirs = name.rpartition(".")[2]
        counterpart = NAMES.get(theirs)
        if counterpart is None or counterpart.plugin is None or counterpart.is_missing:
            continue
        if node.args and not _accepts(node, counterpart.plugin):
            yield _positional(source, node, theirs)
        yield from _options(source, node, theirs, counterpart.plugin)


def _accepts(node: ast.Call, plugin: tuple[str, str]) -> bool:
    """Return whether the plugin takes these values without names."""
    return len(node.args) <= installed.num_positional(*plugin) and not any(
        isinstance(value, ast.Starred) for value in node.args
    )


def _positional(source: Source, node: ast.Call, theirs: str) -> Finding:
    names = POSITIONS.get(theirs, ())
    given = [f"{name}={short(value)}" for name, value in zip(names, node.args, strict=False)]
    complete = len(names) >= len(node.args) and not any(isinstance(value, ast.Starred) for value in node.args)
    new = f"{theirs}({', '.join(given)})" if complete else f"{theirs}(name=value, ...)"
    return source.finding(node, CHANGE, f"{theirs}({', '.join(map(short, node.args))})", new, "options are keywords")


def _options(source: Source, node: ast.Call, theirs: str, plugin: tuple[str, str]) -> Iterator[Finding]:
    known = installed.plugin_options(*plugin)
    for keyword in node.keywords:
        if keyword.arg is None or known is None:
            yield source.finding(
                keyword.value if keyword.arg is None else keyword, CHECK, f"{theirs}({short(keyword)})", "",
                f"`stratagem plugins show {plugin[1]}` lists the options",
            )  # fmt: skip
        elif keyword.arg not in known:
            is_default = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
            new = "leave it out" if is_default else OPTIONS.get(theirs, {}).get(keyword.arg, "")
            note = "" if new else nearest(keyword.arg, known) or f"options are {', '.join(sorted(known))}"
            yield source.finding(keyword, CHANGE, f"{theirs}({short(keyword)})", new, note)
        else:
            yield source.finding(keyword, SAME, f"{theirs}({short(keyword)})", "")
