"""Names that other trainers have, with what to write here instead: read from installed packages, for error messages.

A package offers a TOML file by an entry point of the group ``stratagem_moved_names``, such as ``names =
"package:file.toml"``, with the tables ``arguments`` (of the Trainer), ``plugins``, ``classes``, ``hooks`` (which have
other arguments here) and ``hook_arguments``. The package is not imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from typing import Literal

GROUP = "stratagem_moved_names"


def moved_argument(name: str) -> str:
    """Return what to write instead of `name`, an argument of another trainer; "" for an unknown one."""
    return table("arguments").get(name, "")


def moved_plugin(name: str) -> str:
    """Return what to write instead of `name`, a plugin of another trainer; "" for an unknown one."""
    return table("plugins").get(name, "")


@cache
def table(kind: Literal["arguments", "plugins", "classes", "hooks", "hook_arguments"]) -> Mapping[str, str]:
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
