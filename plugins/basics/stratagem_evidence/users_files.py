"""Which files are the user's, by their paths."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from stratagem.distributed.uncaught_errors import is_users


def is_users_file(name: str) -> bool:
    """Whether a program's file belongs to the user, as far as its path tells."""
    path, standard = Path(name), sysconfig.get_paths()["stdlib"]
    if name.startswith("<") or (name.startswith(standard) and "-packages" not in name):
        return False
    package = path.stem
    for parent in path.parents:
        if not (parent / "__init__.py").is_file():
            break
        package = parent.name
    return package in sys.stdlib_module_names or is_users({"__name__": package})
