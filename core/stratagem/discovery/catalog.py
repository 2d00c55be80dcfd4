"""Names of plugins that need not be installed: `catalog.toml` has defaults and the package of each known plugin.

Packages offer the names that other trainers have, with what to write here instead, for error messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any


@cache
def _catalog() -> dict[str, Any]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8"))


def default(role: str) -> str:
    """Return the name used for `role` when the user names none."""
    return str(_catalog()["defaults"][role])


def arguments() -> dict[str, str]:
    """Return the arguments of a run that stand for a callback, each with its name."""
    return dict(_catalog()["arguments"])


def automatic(group: str) -> list[str]:
    """Return the names of the callbacks of every run ("callback"), of every fit ("trainer_callback", "check")."""
    return list(_catalog()["automatic"][group])


def moved(name: str) -> str:
    """Return what to use instead of `name`, a spelling of a dtype or a name of other trainers; "" for others."""
    return str(_catalog()["spellings"].get(name, "")) or moved_names("plugins").get(name, "")


def providers(kind: str) -> dict[str, str]:
    """Return the known plugin names of `kind`, each with the package that provides it."""
    packages: dict[str, dict[str, list[str]]] = {**_catalog()["packages"], **_catalog()["elsewhere"]}
    return {name: package for package, kinds in packages.items() for name in kinds.get(kind, ())}


def how_to_install(package: str) -> str:
    """Return the advice to install a known `package`: first the command that installs all that a run may need."""
    alone = f"run `pip install {package}`"
    return alone if package in _catalog()["elsewhere"] else f"run `pip install stratagem`; for this alone, {alone}"


# --- Names of other trainers ------------------------------------------------------------------------------------------


def counterpart(name: str) -> str:
    """Return what to use instead of `name`, which another trainer's packages have; "" for an unknown one."""
    entry: Any = moved_names("names").get(name, {})
    plugin = "the {} {!r}".format(*entry["plugin"]) if "plugin" in entry else entry.get("text")
    found = f"use stratagem.{entry['name']}" if "name" in entry else plugin and f"use {plugin}"
    return "; ".join(filter(None, [found, entry.get("note"), moved_names("modules").get(name)]))


def moved_names(table: str) -> Mapping[str, str]:
    """Return the moved names of `table`, each with what to write instead.

    Packages, which are not imported, name TOML files in entry points of the group ``stratagem_moved_names``, such as
    ``names = "package:file.toml"``. One that cannot be read has none, since an error may be being told. The tables are
    ``arguments`` (of the Trainer), ``plugins``, ``classes``, ``names`` (see `counterpart`), ``modules``, ``exports``,
    ``hooks`` (which have other arguments here) and ``hook_arguments``; ``module_methods``, ``data_methods`` and
    ``callback_methods``, which are not called here ("what to define; what to do"), nor are those in ``methods of
    CLASS`` and ``methods below CLASS`` by what derives from it; ``method_arguments``, ``trainer_attributes`` and
    ``log_options``.
    """
    return _moved_names().get(table, {})


@cache
def _moved_names() -> dict[str, dict[str, str]]:
    import tomllib
    from importlib.metadata import entry_points
    from importlib.util import find_spec
    from pathlib import Path

    names: dict[str, dict[str, str]] = {}
    for point in entry_points(group="stratagem_moved_names"):
        with contextlib.suppress(ImportError, OSError, TypeError, ValueError):
            path = Path(getattr(find_spec(point.module), "origin", "")).with_name(point.attr)
            for table, moved in tomllib.loads(path.read_text(encoding="utf-8")).items():
                names.setdefault(table, {}).update(moved)
    return names
