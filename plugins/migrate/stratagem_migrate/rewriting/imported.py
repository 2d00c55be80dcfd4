"""Check that a rewritten script compiles, and that what it takes from stratagem exists."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from stratagem.errors import ConfigError, PluginError
from stratagem_migrate.source import Source


def check_that_it_imports(source: Source, old: Source) -> None:
    """Check a rewritten script, and the names that `old` did not have.

    Raises:
        ConfigError: Python does not compile it, or it imports a name that the installed stratagem does not have.
    """
    for part in source.parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about the script
                compile(part, str(source.path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise _refusal(source, f"the result would not compile ({error})") from error
    for name in sorted({*_taken(source)} - {*_taken(old)}):
        if not _exists(name):
            raise _refusal(source, f"the result would use {name}, which is not installed")


def _refusal(source: Source, reason: str) -> ConfigError:
    return ConfigError(f"{source.path} cannot be rewritten: {reason}", do="change it by hand")


def _taken(source: Source) -> Iterator[str]:
    """Yield the dotted names in packages of stratagem that a script imports or uses."""
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]
        elif isinstance(node, ast.Attribute):
            names = [source.qualified(node)]
        yield from (name for name in names if name.partition(".")[0].startswith("stratagem"))


def _exists(name: str) -> bool:
    """Whether a module has the name; attributes of classes and functions are not looked up."""
    first, *rest = name.split(".")
    try:
        found: Any = importlib.import_module(first)
    except ImportError:
        return False
    for part in rest:
        if not isinstance(found, ModuleType):
            return True
        try:
            found = getattr(found, part)
        except (AttributeError, PluginError):
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ImportError:
                return False
    return True
