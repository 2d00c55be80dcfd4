"""Names of plugins that need not be installed: `catalog.toml` has defaults and the package of each known plugin.

Packages offer the names that other trainers have, with what to write here instead, for error messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal


@cache
def _catalog() -> dict[str, Any]:
    import tomllib
    from importlib.resources import files

    return tomllib.loads(files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8"))


def default(role: str) -> str:
    """Return the name used for `role` when the user names none."""
    return str(_catalog()["defaults"][role])


def automatic(group: str) -> list[str]:
    """Return the names of the callbacks of every run ("callback"), or of every fit ("trainer_callback")."""
    return list(_catalog()["automatic"][group])


def moved(name: str) -> str:
    """Return what to use instead of `name`, a spelling of a dtype or a name of other trainers; "" for others."""
    return str(_catalog()["spellings"].get(name, "")) or moved_names("plugins").get(name, "")


def is_dtype(name: str) -> bool:
    """Whether `name` is a spelling of a dtype."""
    return name in _catalog()["spellings"]


def providers(kind: str) -> dict[str, str]:
    """Return the known plugin names of `kind`, each with the package that provides it."""
    packages: dict[str, dict[str, list[str]]] = _catalog()["packages"]
    return {name: package for package, kinds in packages.items() for name in kinds.get(kind, ())}


# --- Names of other trainers ------------------------------------------------------------------------------------------


#: The group of entry points such as ``names = "package:file.toml"``: a TOML file with the tables ``arguments`` (of the
#: Trainer), ``plugins``, ``classes``, ``hooks`` (which have other arguments here) and ``hook_arguments``. The package
#: is not imported.
GROUP = "stratagem_moved_names"


def moved_argument(name: str) -> str:
    """Return what to write instead of `name`, an argument of another trainer; "" for an unknown one."""
    return moved_names("arguments").get(name, "")


@cache
def moved_names(kind: Literal["arguments", "plugins", "classes", "hooks", "hook_arguments"]) -> Mapping[str, str]:
    """Return all moved names of that kind; a file that cannot be read has none, since an error is being told."""
    import tomllib
    from importlib.metadata import entry_points
    from importlib.util import find_spec
    from pathlib import Path

    names: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        with contextlib.suppress(ImportError, OSError, ValueError):
            spec = find_spec(point.module)
            if spec is not None and spec.origin is not None:
                content = tomllib.loads(Path(spec.origin).with_name(point.attr).read_text(encoding="utf-8"))
                names |= {name: str(instead) for name, instead in content.get(kind, {}).items()}
    return names
