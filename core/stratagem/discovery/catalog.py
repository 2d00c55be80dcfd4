"""Read `catalog.toml`: default plugin names, and which package provides a known one."""

from __future__ import annotations

from functools import cache
from typing import Any

from stratagem.discovery.moved_names import moved_plugin


@cache
def _catalog() -> dict[str, Any]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8"))


def default(role: str) -> str:
    """Return the name used for `role` when the user names none."""
    name: str = _catalog()["defaults"][role]
    return name


def automatic(group: str) -> list[str]:
    """Return the names of the callbacks of every run ("callback"), or of every fit ("trainer_callback")."""
    names: list[str] = _catalog()["automatic"][group]
    return names


def moved(name: str) -> str:
    """Return what to use instead of `name`, a spelling of a dtype or a name of other trainers; "" for others."""
    return str(_catalog()["spellings"].get(name, "")) or moved_plugin(name)


def is_dtype(name: str) -> bool:
    """Whether `name` is a spelling of a dtype."""
    return name in _catalog()["spellings"]


def providers(kind: str) -> dict[str, str]:
    """Return the known plugin names of `kind`, each with the package that provides it."""
    packages: dict[str, dict[str, list[str]]] = _catalog()["packages"]
    return {name: package for package, kinds in packages.items() for name in kinds.get(kind, ())}
