"""The user's line among the frames of a stack, by the paths of their files."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from stratagem.distributed.call_site import is_users, package_of


def users_frame(frames: Iterable[tuple[str, int, str]]) -> tuple[str, int, str] | None:
    """Return the user's frame in which a program is, the innermost of `frames` first, each (path, line, function).

    None in what stratagem does itself: the phase tells more than the line that called the trainer.
    """
    for frame in frames:
        package = _package(frame[0])
        if package == "stratagem":
            return None
        if package in sys.stdlib_module_names or (package and is_users({"__name__": package})):
            return frame
    return None


def _package(name: str) -> str:
    """Return the outermost package of a file, "" for one of the standard library."""
    path, standard = Path(name), sysconfig.get_paths()["stdlib"]
    if name.startswith("<") or (name.startswith(standard) and "-packages" not in name):
        return ""
    package = path.stem
    for parent in path.parents:
        if not (parent / "__init__.py").is_file():
            break
        package = parent.name
    return package_of({"__name__": package})
