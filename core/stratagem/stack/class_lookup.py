"""Resolve ``from stratagem.strategies import DDPStrategy`` through entry points; import only that package."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable
from opcode import opmap
from types import FrameType
from typing import Any

from stratagem.discovery import catalog, registry
from stratagem.errors import PluginError, nearest


def classes_of(kind: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a module: the first finds a plugin class of `kind` by its name.

    The value of an entry point names the class (``module:Class``), so metadata is enough to find its package. A
    class without an entry point is looked up in the modules that provide this kind.
    """

    def find(name: str) -> Any:
        if name == "__all__":  # from stratagem.callbacks import *
            return class_names(kind)
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
            do=_instead(kind, name) or nearest(name, classes) or "see `stratagem plugins list`",
        )
        if _is_import(sys._getframe(1)):
            raise error
        raise AttributeError(str(error))  # hasattr() and getattr() with a default work as Python expects

    return find, functools.partial(class_names, kind)


def _instead(kind: str, name: str) -> str:
    """Return what to do where `name` is another trainer's class for a plugin or a package; "" for any other."""
    wanted = _plain(_SUFFIX.sub("", name))
    installed = {entry.name for entry in registry.entries(kind)}
    packages = catalog.providers(kind)
    for plugin, package in packages.items():
        if _plain(plugin) == wanted:
            known = plugin in installed
            return f'use {registry.argument_of(kind)}="{plugin}"' if known else catalog.how_to_install(package)
    for other, instead in (*catalog.moved_names("plugins").items(), *catalog.moved_names("classes").items()):
        if _plain(other) == wanted:
            return instead
    for package in packages.values():
        if _plain(package.removeprefix("stratagem-")) == wanted:
            names = [plugin for plugin, provider in packages.items() if provider == package]
            choice = f"choose {', '.join(names[:-1])} or {names[-1]} by name"
            return choice if names[0] in installed else f"{catalog.how_to_install(package)}, and {choice}"
    return ""


#: What ends the name of a class, and is not in the name of its plugin.
_SUFFIX = re.compile(r"(Strategy|Plugin|Precision|Accelerator|Environment|Logger|Callback)$")


def _plain(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def class_names(kind: str) -> list[str]:
    """Return the names of the classes in the entry points of `kind`."""
    names = {entry.value.partition(":")[2] for entry in registry.entries(kind)}
    return sorted(name for name in names if name[:1].isupper())


class NoSuchClassError(PluginError, ImportError):
    """``from stratagem.strategies import Typo``"""


def _is_import(frame: FrameType) -> bool:
    """Whether `frame` executes ``from ... import``, which would replace an AttributeError by a shorter error."""
    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]
