"""The index of errors: every message that the packages of this repository raise, read from their sources."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from pages.text import as_html

KINDS = {"ConfigError", "PluginError", "LaunchError", "PeerError", "CheckpointError", "StratagemError"}

#: What encloses the name of a value.
BEFORE, AFTER = "<", ">"

INTRODUCTION = """# Errors

Every error that the core and the packages of this repository raise on purpose, by package and module. A message is
one sentence: what was found, what was expected, what to do; `<name>` stands for a value. Search this page, or
the site, for words of the message that you got. The classes are in `stratagem.errors`; all derive from
`StratagemError`, and have the parts of the sentence as `found`, `expected` and `do`. [Exit
codes](../configuration.md#exit-codes) of programs are on a page of their own, and so is what to do [when processes do
not meet](../troubleshooting.md).
"""


@frozen(order=True)
class Message:
    """A call that makes an error."""

    kind: str
    found: str
    expected: str
    do: str


def page(root: Path) -> str:
    """Return the page."""
    parts = [INTRODUCTION]
    for title, folder in packages(root):
        sections = [(path, messages) for path in sources(folder) if (messages := sorted(set(read(path))))]
        if sections:
            parts.append(f"## {title}\n")
        for path, messages in sections:
            parts.append(f"### {_title(path, folder)}\n")
            parts += ['<dl class="errors">', *map(_entry, messages), "</dl>\n"]
    return "\n".join(parts)


def packages(root: Path) -> list[tuple[str, Path]]:
    """Return the distributions of this repository, the core first, each with its folder."""
    folders = sorted(
        path.parent for path in [*root.glob("plugins/*/pyproject.toml"), *root.glob("contrib/*/pyproject.toml")]
    )
    named = [(_name(folder), folder) for folder in folders if folder.name != "template"]
    return [("stratagem-core", root / "core"), *sorted(named)]


def sources(folder: Path) -> list[Path]:
    """Return the modules of a distribution, without its tests."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not path.name.startswith(("test_", "conftest")) and "tests" not in path.parts
    )


def read(path: Path) -> Iterator[Message]:
    """Yield the errors that the module at `path` makes, if their message has words of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
            named = {keyword.arg: _text(keyword.value) for keyword in node.keywords}
            found = _text(node.args[0])
            if sum(word.isalpha() for word in found.split()) > 1:
                yield Message(node.func.id, found, named.get("expected", ""), named.get("do", ""))


def _text(node: ast.expr) -> str:
    """Return the text of a string in one line; each value in it is a word between `BEFORE` and `AFTER`."""
    return " ".join(_raw(node).split())


def _raw(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _value(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _raw(node.left) + _raw(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (_raw(node.body), _raw(node.orelse))))
    return _value(node)


def _value(node: ast.expr) -> str:
    """Return a word for the value that the message shows there: the name of a variable, where the code has one."""
    while True:
        if isinstance(node, ast.FormattedValue):
            node = node.value
        elif isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            node = node.args[0]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            node = node.value
        else:
            break
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else "…"
    return f"{BEFORE}{'…' if name == 'self' else name.strip('_').lower()}{AFTER}"


def _entry(message: Message) -> str:
    expected = f"expected {message.expected}" if message.expected else ""
    do = "" if message.do.startswith(BEFORE) and message.do.endswith(AFTER) and " " not in message.do else message.do
    rest = "; ".join(part for part in (expected, do) if part)
    return f"<dt>{as_html(message.found)}</dt><dd>{as_html(rest)} <code>{message.kind}</code></dd>"


def _title(path: Path, folder: Path) -> str:
    """Return the path of a module within its Python package; with that, where the distribution has several."""
    parts = path.relative_to(folder).parts
    is_only = len(list(folder.glob("stratagem*"))) == 1
    return "/".join(parts[1:] if len(parts) > 1 and is_only else parts)


def _name(folder: Path) -> str:
    name: str = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]
    return name
