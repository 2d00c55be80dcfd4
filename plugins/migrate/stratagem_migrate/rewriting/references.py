"""Rewrite imports of Lightning, and each use of a name that has a counterpart with the same arguments."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from typing import Any, Final

import libcst as cst
from attrs import frozen

from stratagem_migrate.names import DROP_IN, ELSEWHERE, NAMES
from stratagem_migrate.rewriting.edits import Edits, removed
from stratagem_migrate.source import Source, within_lightning

#: What ``from pytorch_lightning import *`` imports.
_STAR: Final = ("Trainer", "LightningModule", "LightningDataModule", "Callback", "seed_everything")
#: Classes that a script derives from; other counterparts are built in another way.
_BASES: Final = (
    "LightningModule", "LightningDataModule", "Callback", "BaseFinetuning", "WeightAveraging", "BasePredictionWriter",
)  # fmt: skip


@frozen
class Target:
    """What replaces a name: a name in a module."""

    module: str
    name: str


def target_of(qualified: str) -> Target | None:
    """Return what replaces a dotted name of Lightning as it is; None if nothing does."""
    module, _, last = qualified.rpartition(".")
    if module.partition(".")[0] == "metrics":
        return None
    if last in ELSEWHERE:
        return Target(*ELSEWHERE[last])
    origin = NAMES[last].imported_from if last in DROP_IN and last in NAMES else None
    return None if origin is None else Target(*origin)


class Namespace:
    """The names of a script, and how it refers to stratagem."""

    def __init__(self, edits: Edits) -> None:
        self.edits, self.source = edits, edits.source
        self._stored = _stored(self.source)
        self._given: dict[str, Target] = {}
        #: Names that an import at the top of the script has.
        self._in_place: set[str] = set()
        whole = [alias for alias in _aliases(self.source) if _is_package(alias.name)]
        #: Whether the script uses ``pl.Trainer``, and not ``from pytorch_lightning import Trainer``.
        self.by_package = bool(whole) or self.source.aliases.get("sg") == "stratagem"
        short = any(alias.asname for alias in whole) or not whole
        self.alias = "sg" if short and self.is_free("sg", "stratagem") else "stratagem"

    def is_free(self, name: str, meaning: str) -> bool:
        """Whether `name` may be used for the imported `meaning`."""
        if name in self._stored or (name in vars(builtins) and meaning != f"builtins.{name}"):
            return False
        given = self._given.get(name)
        taken = self.source.aliases.get(name)
        if given is not None:
            return f"{given.module}.{given.name}" == meaning
        return taken in (None, meaning) or (taken is not None and self.moves(taken, meaning))

    def moves(self, taken: str, meaning: str) -> bool:
        """Whether the import of `taken` becomes one of `meaning`."""
        inside = within_lightning(taken)
        target = target_of(inside) if inside else None
        return target is not None and f"{target.module}.{target.name}" == meaning

    def is_shadowed(self, name: str) -> bool:
        """Whether the script gives the imported `name` another meaning somewhere."""
        return name in self._stored

    def of_stratagem(self, name: str) -> str:
        """Return the expression for ``stratagem.<name>``; import what it needs."""
        if self.by_package:
            self.package()
            return f"{self.alias}.{name}"
        return self.imported(Target("stratagem", name))

    def package(self) -> None:
        """Import the package as `alias`."""
        self.edits.add_import("import stratagem as sg" if self.alias == "sg" else "import stratagem")

    def imported(self, target: Target) -> str:
        """Return the expression for `target`, and import it by its name or, if that is taken, by its module."""
        if self.is_free(target.name, f"{target.module}.{target.name}"):
            if target.name not in self._in_place:
                self.edits.add_import(f"from {target.module} import {target.name}")
            self._given[target.name] = target
            return target.name
        self.edits.add_import(f"import {target.module}")
        return f"{target.module}.{target.name}"

    def reserve(self, name: str, target: Target, statement: ast.AST) -> None:
        """Note that the import `statement` gives `name` the meaning `target`."""
        self._given[name] = target
        if isinstance(self.source.parents[statement], ast.Module):
            self._in_place.add(name)


def rewrite_references(edits: Edits, names: Namespace) -> None:
    """Rewrite imports and uses; an import of which something is left stays."""
    for statement in _imports_of_lightning(edits.source):
        if isinstance(statement, ast.Import):
            _rewrite_import(edits, names, statement)
        elif statement.names[0].name == "*":
            _rewrite_star(edits, names, statement)
        else:
            _rewrite_from(edits, names, statement)


# --- import pytorch_lightning as pl --------------------------------------------------------------------------------


def _rewrite_import(edits: Edits, names: Namespace, statement: ast.Import) -> None:
    kept: list[str] = []
    for alias in statement.names:
        bound = alias.asname or alias.name.partition(".")[0]
        is_theirs = within_lightning(alias.name) is not None and not names.is_shadowed(bound)
        if not (is_theirs and _rewrite_uses(edits, names, bound)) or bound in edits.source.elsewhere.imported:
            kept.append(ast.unparse(alias))
    if len(kept) < len(statement.names):
        new = [f"import {each}" for each in kept]
        _replace_import(edits, statement, new)


def _rewrite_uses(edits: Edits, names: Namespace, bound: str) -> bool:
    """Rewrite what is reached through the imported module `bound`; return whether nothing is left of it."""
    complete = True
    for node in edits.source.nodes:
        if isinstance(node, ast.Name) and node.id == bound and isinstance(node.ctx, ast.Load):
            complete &= _rewrite_use(edits, names, node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_annotation(edits.source, node):
            complete &= _rewrite_text(edits, names, node, bound)
    return complete


def _rewrite_use(edits: Edits, names: Namespace, node: ast.expr) -> bool:
    source = edits.source
    while True:
        if node in edits.replaced:
            return True
        name = source.lightning(node)
        target = target_of(name) if name else None
        if target is not None and not _is_other_base(source, node, name or ""):
            edits.replaced.add(node)
            edits.replace(node, _expression(names, target))
            return True
        parent = source.parents.get(node)
        if not isinstance(parent, ast.Attribute) or name is None:
            return False
        node = parent


def _expression(names: Namespace, target: Target) -> str:
    if target.module == "stratagem" and names.by_package:
        return names.of_stratagem(target.name)
    return names.imported(target)


def _rewrite_text(edits: Edits, names: Namespace, node: ast.Constant, bound: str) -> bool:
    """Rewrite an annotation in quotes, such as ``trainer: "pl.Trainer"``."""
    value = str(node.value)
    found = re.findall(rf"(?<![\w.]){bound}\.[\w.]+", value)
    new = {}
    for each in found:
        target = target_of(within_lightning(f"{edits.source.aliases[bound]}{each[len(bound) :]}") or "")
        if target is None:
            return False
        new[each] = _expression(names, target)
    if new and node not in edits.replaced:
        text = re.sub(rf"(?<![\w.]){bound}\.[\w.]+", lambda match: new[match[0]], value)
        edits.replaced.add(node)
        edits.at(node, lambda old: old.with_changes(value=old.value.replace(value, text)))
    return True


# --- from pytorch_lightning import Trainer ---------------------------------------------------------------------------


def _rewrite_from(edits: Edits, names: Namespace, statement: ast.ImportFrom) -> None:
    new: dict[str, list[str]] = {}
    modules: list[str] = []
    changed = False
    for alias in statement.names:
        qualified = within_lightning(f"{statement.module}.{alias.name}")
        bound = alias.asname or alias.name
        target = target_of(qualified) if qualified else None
        if target is None:
            gone = not names.is_shadowed(bound) and _rewrite_uses(edits, names, bound)
            gone = gone and (_is_module(alias.name, qualified) or _uses(edits.source, bound))
            gone = gone and bound not in edits.source.elsewhere.imported
            if gone:
                changed = True
            else:
                new.setdefault(str(statement.module), []).append(ast.unparse(alias))
            continue
        if not _can_replace(edits, bound, alias.name):
            new.setdefault(str(statement.module), []).append(ast.unparse(alias))
            continue
        changed = True
        module, name = _rename(edits, names, statement, alias, target)
        if name:
            new.setdefault(module, []).append(name)
        else:
            modules.append(module)
    if changed:
        lines = [f"import {module}" for module in dict.fromkeys(modules)]
        lines += [f"from {module} import {', '.join(dict.fromkeys(each))}" for module, each in new.items()]
        _replace_import(edits, statement, lines)


def _is_module(name: str, qualified: str | None) -> bool:
    return not qualified or name.islower()


def _uses(source: Source, bound: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == bound for node in source.nodes)


def _can_replace(edits: Edits, bound: str, theirs: str) -> bool:
    """Whether every use of the imported name may be one of its counterpart."""
    if theirs in _BASES:
        return True
    return not any(
        isinstance(node, ast.Name) and node.id == bound and _is_other_base(edits.source, node, theirs)
        for node in edits.source.nodes
    )


def _rename(
    edits: Edits, names: Namespace, statement: ast.ImportFrom, alias: ast.alias, target: Target
) -> tuple[str, str]:
    """Rename the uses of an imported name if that is certain; return module and what to import from it."""
    meaning, bound = f"{target.module}.{target.name}", alias.asname or alias.name
    if alias.asname or alias.name == target.name:
        names.reserve(bound, target, statement)
        return target.module, f"{target.name} as {bound}" if bound != target.name else bound
    nodes = [node for node in edits.source.nodes if isinstance(node, ast.Name) and node.id == bound]
    quoted = any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(rf"\b{bound}\b", node.value)
        and (_is_annotation(edits.source, node) or node.value == bound)
        for node in edits.source.nodes
    )  # fmt: skip
    taken = names.is_shadowed(bound) or not names.is_free(target.name, meaning)
    if not nodes or quoted or taken or bound in edits.source.elsewhere.imported:
        names.reserve(bound, target, statement)
        return target.module, f"{target.name} as {bound}"
    names.reserve(target.name, target, statement)
    for node in nodes:
        if node not in edits.replaced:
            edits.replaced.add(node)
            edits.replace(node, target.name)
    return target.module, target.name


# --- from pytorch_lightning import * -----------------------------------------------------------------------------


def _rewrite_star(edits: Edits, names: Namespace, statement: ast.ImportFrom) -> None:
    source = edits.source
    used = {node.id: node for node in source.nodes if isinstance(node, ast.Name) and source.lightning(node) == node.id}
    known = [name for name in used if name in NAMES]
    if statement.module not in ("pytorch_lightning", "lightning", "lightning.pytorch") or set(known) - set(_STAR):
        return
    parts = []
    for name in known:
        target = target_of(name)
        assert target is not None
        parts.append(target.name if target.name == name else f"{target.name} as {name}")
        names.reserve(name, target, statement)
    lines = [f"from stratagem import {', '.join(parts)}"] if parts else []
    _replace_import(edits, statement, lines)


# --- Helpers -----------------------------------------------------------------------------------------------------


def _replace_import(edits: Edits, statement: ast.Import | ast.ImportFrom, statements: list[str]) -> None:
    """Put `statements` in the place of an import; the first one at the top of the script takes what is added, too."""
    is_anchor = edits.has_no_anchor and isinstance(edits.source.parents[statement], ast.Module)
    if is_anchor:
        edits.has_no_anchor = False
    edits.line(statement, lambda line: _import_lines(line, [*edits.take_added(is_anchor), *statements]))


def _import_lines(line: Any, statements: list[str]) -> Any:
    comments = [each for each in _comments_inside(line) if each is not line.trailing_whitespace.comment]
    line = line.with_changes(leading_lines=[*line.leading_lines, *(cst.EmptyLine(comment=each) for each in comments)])
    if not statements:
        return removed(line)
    new = [cst.parse_statement(_wrapped(each)) for each in dict.fromkeys(statements)]
    new[0] = new[0].with_changes(leading_lines=line.leading_lines)
    new[-1] = new[-1].with_changes(trailing_whitespace=line.trailing_whitespace)
    return cst.FlattenSentinel(new)


def _wrapped(statement: str, limit: int = 120) -> str:
    head, _, rest = statement.partition(" import ")
    if len(statement) <= limit or not rest:
        return statement
    return f"{head} import (\n" + "".join(f"    {name},\n" for name in rest.split(", ")) + ")"


def _comments_inside(line: Any) -> list[cst.Comment]:
    found: list[cst.Comment] = []

    class Collect(cst.CSTVisitor):
        def visit_Comment(self, node: cst.Comment) -> None:  # noqa: N802
            found.append(node)

    line.body[0].visit(Collect())
    return found


def _imports_of_lightning(source: Source) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in source.nodes:
        if isinstance(node, ast.Import):
            packages = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages = [node.module or ""]
        else:
            continue
        if any(within_lightning(each) is not None for each in packages):
            yield node


def _aliases(source: Source) -> Iterator[ast.alias]:
    for node in _imports_of_lightning(source):
        if isinstance(node, ast.Import):
            yield from node.names
        else:
            yield from (
                ast.alias(f"{node.module}.{each.name}", each.asname or each.name)
                for each in node.names
                if f"{node.module}.{each.name}" == "lightning.pytorch"
            )


def _is_package(name: str) -> bool:
    return within_lightning(name) == ""


def _stored(source: Source) -> set[str]:
    """Return the names that the script binds otherwise than by an import."""
    named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, named) and node.name:
            found.add(node.name)
    return found


def _is_other_base(source: Source, node: ast.AST, name: str) -> bool:
    """Whether a class derives from the name, and it is none that a script derives from here in the same way."""
    parent = source.parents.get(node)
    is_base = isinstance(parent, ast.ClassDef) and node in parent.bases
    return is_base and name.rpartition(".")[2] not in _BASES


def _is_annotation(source: Source, node: ast.AST) -> bool:
    """Whether the constant is, or is within, an annotation."""
    child: ast.AST = node
    for parent in source.around(node):
        if isinstance(parent, ast.arg | ast.AnnAssign):
            return child is parent.annotation
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
            return child is parent.returns
        if isinstance(parent, ast.stmt | ast.Call):
            return False
        child = parent
    return False
