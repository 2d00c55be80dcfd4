"""`Edits`: changes of single nodes of a script, which libcst makes, so that formatting and comments stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from stratagem.errors import ConfigError
from stratagem_migrate.source import Source

#: Takes a node, in which the nodes inside it are changed already, and returns the node to use instead.
Change = Callable[[Any], Any]
_Key = tuple[str, int, int, int, int]

#: Statements: the ends of blocks differ between ast and libcst, the beginnings do not.
_STATEMENTS: Final = ("FunctionDef", "ClassDef", "If", "Line")
_REMOVED: Final = "_stratagem_removed_"


class Edits:
    """The changes of one script. Nodes are those of its syntax tree."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._lines = re.split(r"\r\n|\r|\n", source.text)
        self._changes: dict[_Key, list[Change]] = {}
        #: Statements to add after the first import.
        self._added: dict[str, None] = {}
        #: References to names of Lightning that a change replaces.
        self.replaced: set[ast.AST] = set()
        #: Whether no import at the top is replaced, beside which others can be added.
        self.has_no_anchor = True
        self.removed: set[ast.AST] = set()

    def at(self, node: ast.AST, change: Change) -> None:
        """Apply `change` to the libcst node of `node`."""
        kind = {"AsyncFunctionDef": "FunctionDef", "Constant": "SimpleString"}.get(type(node).__name__)
        self._changes.setdefault(self._key(kind or type(node).__name__, node), []).append(change)

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace an expression."""
        self.at(node, lambda old: expression(text, old))

    def line(self, statement: ast.AST, change: Change) -> None:
        """Apply `change` to the line of a simple statement."""
        self._changes.setdefault(self._key("Line", statement), []).append(change)

    def remove(self, statement: ast.AST) -> None:
        """Remove a simple statement; its comments move to the next one."""
        if statement not in self.removed:
            self.removed.add(statement)
            self.line(statement, removed)

    def add_import(self, statement: str) -> None:
        """Add an import to the top of the script, if it is not there."""
        present = (each for each in self.source.tree.body if isinstance(each, ast.Import | ast.ImportFrom))
        if all(ast.unparse(each) != statement for each in present):
            self._added.setdefault(statement)

    def take_added(self, really: bool) -> list[str]:
        """Return the imports to add, and forget them: they have a place."""
        taken = list(self._added) if really else []
        for each in taken:
            del self._added[each]
        return taken

    def apply(self) -> str:
        """Return the text of the script with all changes.

        Raises:
            ConfigError: libcst cannot read the script, or finds a node elsewhere.
        """
        if not self._changes and not self._added:
            return self.source.text
        try:
            wrapper = MetadataWrapper(cst.parse_module(self.source.text))
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise self._refusal("libcst cannot parse it") from error
        if wrapper.module.code != self.source.text:
            raise self._refusal("libcst reads it differently")
        applier = _Applier(self._changes)
        module = wrapper.visit(applier)
        if applier.pending:
            _, line, *_ = min(applier.pending, key=lambda key: key[1:])
            raise self._refusal(f"line {line} is written in a way that it does not recognize")
        added = [cst.parse_statement(each, config=module.config_for_parsing) for each in self._added]
        text = with_imports(module, added).code
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            raise self._refusal(f"the result would not be Python ({error})") from error
        return text

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.source.path} cannot be rewritten: {reason}", do="change it by hand")

    def _key(self, kind: str, node: Any) -> _Key:
        start = node.lineno, self._column(node.lineno, node.col_offset)
        if kind in _STATEMENTS:
            return (kind, *start, 0, 0)
        return (kind, *start, node.end_lineno, self._column(node.end_lineno, node.end_col_offset))

    def _column(self, line: int, offset: int) -> int:
        """Return the column in characters; ast counts bytes."""
        return len(self._lines[line - 1].encode()[:offset].decode())


class _Applier(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, changes: dict[_Key, list[Change]]) -> None:
        super().__init__()
        self._changes = changes
        self.pending = set(changes)

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated = super().on_leave(original_node, updated_node)
        kind = type(original_node).__name__
        place = self.get_metadata(PositionProvider, original_node, None)
        if isinstance(place, CodeRange):
            key = _key_of("Line" if kind == "SimpleStatementLine" else kind, place)
            self.pending.discard(key)
            changes = self._changes.get(key, ())
            rest: list[Any] = []
            if changes and isinstance(updated, cst.SimpleStatementLine):
                updated, rest = _first_and_rest(updated)
            for change in changes:
                updated = change(updated)
            if rest:
                first = updated if isinstance(updated, cst.FlattenSentinel) else [updated]
                return cst.FlattenSentinel([*first, *rest])
        if isinstance(updated, cst.Module | cst.IndentedBlock):
            updated = _without_removed(updated)
        return updated


def _key_of(kind: str, place: CodeRange) -> _Key:
    start, end = place.start, place.end
    if kind in _STATEMENTS:
        return (kind, start.line, start.column, 0, 0)
    return (kind, start.line, start.column, end.line, end.column)


def _first_and_rest(line: Any) -> tuple[Any, list[Any]]:
    """Return a line of its own for the first statement of ``a; b``, to change it, and a line of the others, if any."""
    if len(line.body) == 1:
        return line, []
    first = cst.SimpleStatementLine(
        body=[line.body[0].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)], leading_lines=line.leading_lines
    )
    return first, [line.with_changes(body=line.body[1:], leading_lines=[])]


def removed(line: Any) -> Any:
    """Return a line that stands for a removed one; its block drops it."""
    return line.with_changes(body=[cst.Expr(cst.Name(_REMOVED))])


def _is_removed(statement: cst.BaseStatement) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Name(value=name))]):
            return name == _REMOVED
    return False


def _without_removed(block: Any) -> Any:
    """Return the block without removed lines; their comments go to the next statement, or to the block's end."""
    if not any(_is_removed(each) for each in block.body):
        return block
    kept: list[Any] = []
    waiting: list[cst.EmptyLine] = []
    for statement in block.body:
        if _is_removed(statement):
            waiting += [each for each in statement.leading_lines if each.comment is not None or not kept]
            if (comment := statement.trailing_whitespace.comment) is not None:
                waiting.append(cst.EmptyLine(comment=comment))
            continue
        if waiting:
            statement = statement.with_changes(leading_lines=[*waiting, *statement.leading_lines])
            waiting = []
        kept.append(statement)
    if not kept and isinstance(block, cst.IndentedBlock):
        kept = [cst.parse_statement("pass")]
    return block.with_changes(body=kept, footer=[*waiting, *block.footer])


def with_imports(module: cst.Module, added: Sequence[Any]) -> cst.Module:
    """Return the module with the statements `added` after its first import that is not of ``__future__``."""
    present = {module.code_for_node(each).strip() for each in module.body if _imports(each)}
    wanted = [each for each in added if module.code_for_node(each).strip() not in present]
    if not wanted:
        return module
    body, place = list(module.body), 0
    for index, statement in enumerate(body):
        if _imports(statement):
            place = index + 1
            if "__future__" not in module.code_for_node(statement):
                break
        elif index == 0 and _is_docstring(statement):
            place = 1
    if place == 0 and body:
        wanted[0] = wanted[0].with_changes(leading_lines=[])
    return module.with_changes(body=[*body[:place], *wanted, *body[place:]])


def _imports(statement: Any) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0] if statement.body else None, cst.Import | cst.ImportFrom
    )


def _is_docstring(statement: Any) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]):
            return True
    return False


def expression(text: str, old: Any = None) -> Any:
    """Return the libcst node of an expression, in the parentheses of the node that it replaces."""
    new = cst.parse_expression(text)
    if old is None:
        return new
    simple = isinstance(
        new, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.SimpleString | cst.List | cst.Dict
    )
    if simple or old.lpar:
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)
    return new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def code(node: cst.CSTNode) -> str:
    """Return the source of a node."""
    return cst.Module(body=[]).code_for_node(node)


def with_statements_first(function: Any, statements: Sequence[str]) -> Any:
    """Return the function with `statements` at the beginning of its body, after the docstring."""
    if not statements:
        return function
    new = [cst.parse_statement(each) for each in statements]
    body = function.body
    if isinstance(body, cst.SimpleStatementSuite):  # def f(self): return 1
        body = cst.IndentedBlock(body=[cst.SimpleStatementLine(body=[each]) for each in body.body])
    old = list(body.body)
    place = 1 if old and _is_docstring(old[0]) else 0
    return function.with_changes(body=body.with_changes(body=[*old[:place], *new, *old[place:]]))


class Renamer(cst.CSTTransformer):
    """Renames variables; attributes and keywords of calls keep their names."""

    def __init__(self, names: dict[str, str]) -> None:
        super().__init__()
        self._names = names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:  # noqa: N802
        return updated_node.with_changes(value=self._names.get(updated_node.value, updated_node.value))

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:  # noqa: N802
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:  # noqa: N802
        return updated_node.with_changes(keyword=original_node.keyword)
