"""`Source`: the syntax tree of a script, and what its names refer to. The script is never imported or run."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import Factory, frozen

from stratagem.errors import ConfigError
from stratagem_migrate.files import ProjectFile
from stratagem_migrate.findings import Finding

#: Names of Lightning's packages; longer ones first.
PACKAGES: Final = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric", "lightning")

#: Base classes, and the role of classes derived from them.
_ROLES: Final = {
    "LightningModule": "module",
    "LightningDataModule": "data",
    "Callback": "callback",
    "stratagem.Module": "module",
    "stratagem.DataModule": "data",
    "stratagem.Callback": "callback",
}
_MODULE_METHODS: Final = {"training_step", "configure_optimizers"}


@frozen
class Elsewhere:
    """What the other files of a project tell about a script."""

    #: The roles of their classes, by name.
    roles: Mapping[str, str] = Factory(dict)
    #: Names that they may import from the script.
    imported: frozenset[str] = frozenset()


#: What a script is told that is read without others.
ALONE: Final = Elsewhere()


class _Unknown:
    """The value of an expression that is known only at run time."""


UNKNOWN: Final = _Unknown()


class Source(ProjectFile):
    """A parsed script.

    Names are looked up in the whole file: of a name with two meanings in two functions, the last is used.
    """

    def __init__(self, path: Path, content: bytes, elsewhere: Elsewhere = ALONE) -> None:
        self.path = path
        self.tree = parse(str(path), content)
        self.encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        self.text = content.decode(self.encoding)
        self.elsewhere = elsewhere
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.aliases = _aliases(self.nodes)
        self.imports_everything = any(
            isinstance(node, ast.ImportFrom) and within_lightning(node.module or "") is not None and node.level == 0
            for node in self.nodes
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        )
        self.constants = _bound_once(self.nodes)
        definitions = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.classes = {node.name: node for node in definitions}
        #: Each class with its role; a notebook may define a name in several cells.
        self._definitions = [(node, self._role(node, ())) for node in definitions]
        self.roles = {node.name: role for node, role in self._definitions}
        self.trainers = self._trainers()
        #: Attributes that the script sets on a trainer.
        self.set_on_trainers = frozenset(
            node.attr
            for node in self.nodes
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and self.is_trainer(node.value)
        )

    def seen_with(self, elsewhere: Elsewhere) -> Source:
        """Return this script as one file of a project."""
        return Source(self.path, self.text.encode(self.encoding), elsewhere)

    def with_text(self, text: str) -> Source:
        return Source(self.path, text.encode(self.encoding), self.elsewhere)

    @property
    def parts(self) -> list[str]:
        """What Python compiles: the script, or each cell of a notebook."""
        return [self.text]

    @property
    def imported(self) -> set[str]:
        """The names that the script may import from other files of its project."""
        found = {
            alias.name
            for node in self.nodes
            if isinstance(node, ast.ImportFrom) and (node.level or within_lightning(str(node.module)) is None)
            for alias in node.names
        }
        return found | {node.id for node in self.nodes if isinstance(node, ast.Name)} if "*" in found else found

    @property
    def is_about_lightning(self) -> bool:
        """Whether the script uses Lightning, or has a class that looks like a module of Lightning."""
        uses = any(within_lightning(_theirs(target)) is not None for target in self.aliases.values())
        return uses or self.imports_everything or "module" in self.roles.values()

    # --- Names ---------------------------------------------------------------------------------------------------

    def qualified(self, node: ast.AST) -> str:
        """Return the dotted name that `node` refers to, with imports resolved; empty if it is not a name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (owner := self.qualified(node.value)):
            return f"{owner}.{node.attr}"
        return ""

    def lightning(self, node: ast.AST) -> str | None:
        """Return the name in Lightning that `node` refers to, as ``callbacks.EarlyStopping``, or None."""
        if self.imports_everything and isinstance(node, ast.Name) and node.id not in self.aliases:
            return None if node.id in self.classes else node.id
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in self.aliases:
            return None
        return within_lightning(self.qualified(node))

    def known(self, node: ast.AST) -> str | None:
        """Return what `lightning` returns, or for a name of stratagem, which a rewritten script uses, that name."""
        if (name := self.lightning(node)) is not None:
            return name
        found = self.qualified(node)
        return found.removeprefix("stratagem.") if found.startswith("stratagem.") else None

    def is_trainer(self, node: ast.AST) -> bool:
        """Return whether `node` is a trainer, by its name or its assignment."""
        if isinstance(node, ast.Attribute):
            return node.attr == "trainer"
        return isinstance(node, ast.Name) and (node.id == "trainer" or node.id in self.trainers)

    def literal(self, node: ast.AST | None) -> Any:
        """Return the value of a constant expression, or of a name that is assigned one once; else `UNKNOWN`."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            node = self.constants[node.id]
        return constant(node)

    # --- Parents -------------------------------------------------------------------------------------------------

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the parents of `node`, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class whose body `node` is in."""
        return next((each for each in self.around(node) if isinstance(each, ast.ClassDef)), None)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function whose variables `node` uses, or the module."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        return next((each for each in self.around(node) if isinstance(each, kinds)), self.tree)

    def of_role(self, role: str) -> Iterator[ast.ClassDef]:
        """Yield the classes with `role` "module", "data" or "callback"."""
        return (node for node, found in self._definitions if found == role)

    def methods_of(self, role: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Yield the methods of the classes with `role`."""
        return (method for cls in self.of_role(role) for method in methods(cls))

    def calls_of(self, name: str) -> Iterator[ast.Call]:
        """Yield the calls of what has this last name in Lightning or in stratagem."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call))
        return (node for node in calls if (self.known(node.func) or "").rpartition(".")[2] == name)

    def finding(self, node: Any, certainty: str, old: str, new: str, note: str = "") -> Finding:
        return Finding(str(self.path), node.lineno, node.col_offset + 1, certainty, old, new, note)

    # --- Helpers -------------------------------------------------------------------------------------------------

    def _role(self, node: ast.ClassDef, seen: tuple[str, ...]) -> str | None:
        for base in node.bases:
            if (name := self.lightning(base) or self.qualified(base)) in _ROLES:
                return _ROLES[name]
            last = name.rpartition(".")[2]
            if self.lightning(base) is not None and last in _ROLES:
                return _ROLES[last]
            if (self.known(base) or "").startswith("callbacks."):
                return "callback"
            if last in self.classes and last not in (*seen, node.name):
                role = self._role(self.classes[last], (*seen, node.name))
                if role is not None:
                    return role
            if last in self.elsewhere.roles and last not in self.classes:
                return self.elsewhere.roles[last]
        return "module" if {method.name for method in methods(node)} >= _MODULE_METHODS else None

    def _trainers(self) -> set[str]:
        """Return the names of variables that are assigned a trainer."""
        made = (node for node in self.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call))
        return {
            target.id
            for node in made
            if _makes_trainer(self.qualified(node.value.func))  # type: ignore[attr-defined]
            for target in node.targets
            if isinstance(target, ast.Name)
        }


def constant(node: ast.AST | None) -> Any:
    """Return the value of an expression that is written as a constant; else `UNKNOWN`."""
    try:
        return ast.literal_eval(node) if node is not None else UNKNOWN
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN


def content_of(path: Path) -> bytes:
    """Return what the file at `path` holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})", expected="a Python script") from error


def within_lightning(name: str) -> str | None:
    """Return `name` without the package name; None if it is not in a package of Lightning."""
    for package in PACKAGES:
        if name == package or name.startswith(f"{package}."):
            return name[len(package) + 1 :]
    return None


def _theirs(target: str) -> str:
    """Return the name with stratagem's package named as Lightning's: a rewritten script is about Lightning as well."""
    return f"lightning.{target}" if target.partition(".")[0] == "stratagem" else target


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions in the body of a class."""
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def last_name(node: ast.AST) -> str:
    """Return the last part of the dotted name that `node` is or calls; empty if it is something else."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def short(node: ast.AST, limit: int = 60) -> str:
    """Return the source of `node` on one line, cut to `limit` characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except RecursionError:  # a sum of thousands of terms
        return "..."
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def parse(path: str, text: bytes) -> ast.Module:
    """Return the syntax tree of a script.

    Raises:
        ConfigError: it is not Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the script
            return ast.parse(text, path)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{path} is not Python ({error.msg}{where})", expected="a Python 3 script") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} cannot be parsed ({error})", expected="a Python 3 script") from error


def _makes_trainer(function: str) -> bool:
    """Return whether the function of this dotted name returns a trainer."""
    owner, _, last = function.rpartition(".")
    return last == "Trainer" or (owner.endswith("Trainer") and last.startswith("from_"))


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the dotted name of each imported name."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names.pop("*", None)
    return names


def _bound_once(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """Return the values of names that are assigned only once."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            values.setdefault(node.id, []).append(node)
        elif isinstance(node, ast.arg):
            values.setdefault(node.arg, []).append(ast.Name(node.arg))
    simple = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }
    return {name: value for name, value in simple.items() if len(values[name]) == 1}
