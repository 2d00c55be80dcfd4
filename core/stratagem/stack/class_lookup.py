"""Resolve ``from stratagem.strategies import DDPStrategy`` through entry points; import only that package."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from opcode import opmap
from types import FrameType
from typing import Any

from stratagem.errors import PluginError, nearest
from stratagem.stack import registry


def class_finder(kind: str) -> Callable[[str], Any]:
    """Return a module ``__getattr__`` that finds a plugin class of `kind` by its class name.

    The value of an entry point names the class (``module:Class``), so metadata is enough to find its package. A
    class without an entry point is looked up in the modules that provide this kind.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        entries = registry.entries(kind)
        for entry in entries:
            if entry.value.partition(":")[2] == name:
                return entry.load()
        for entry in entries:  # a class that only presets use: search the modules of this kind
            with contextlib.suppress(PluginError):
                module = sys.modules[entry.load().__module__]
                if isinstance(getattr(module, name, None), type):
                    return getattr(module, name)
        classes = class_names(kind)
        error = NoSuchClassError(
            f"no installed {kind} plugin provides a class {name!r}",
            expected=f"one of {', '.join(classes) or 'none'}",
            do=nearest(name, classes) or "install the package that provides it (`stratagem plugins list`)",
        )
        if _is_import(sys._getframe(1)):
            raise error
        raise AttributeError(str(error))  # hasattr() and getattr() with a default work as Python expects

    return find


def class_names(kind: str) -> list[str]:
    """Return the names of the classes in the entry points of `kind`."""
    names = {entry.value.partition(":")[2] for entry in registry.entries(kind)}
    return sorted(name for name in names if name[:1].isupper())


class NoSuchClassError(PluginError, ImportError):
    """``from stratagem.strategies import Typo``"""


def _is_import(frame: FrameType) -> bool:
    """Whether `frame` executes ``from ... import``, which would replace an AttributeError by a shorter error."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
