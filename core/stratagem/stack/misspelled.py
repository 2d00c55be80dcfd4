"""Warn of methods of callbacks and loggers that are almost called as a hook, and that nothing calls."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from stratagem.api.kinds import Callback, Logger
from stratagem.errors import mistyped
from stratagem.stack.plugin_hooks import hook_functions

if TYPE_CHECKING:
    from stratagem.stack.plugins import Choice

#: How the names of the methods begin that are hooks without a mark.
_PREFIXES = ("on_", "log_")


def warn_of_misspelled_hooks(choice: Choice, implemented: Collection[str]) -> None:
    """Warn if the callback or logger `choice` has a method with the name of a hook that it lacks, mistyped."""
    if not isinstance(choice.plugin, Callback | Logger):
        return
    hooks = {name for name in hook_functions() if name.startswith(_PREFIXES)}
    lacking = hooks.difference(implemented)
    for name in dir(type(choice.plugin)):
        is_own = name.startswith(_PREFIXES) and name not in hooks
        if is_own and (hint := mistyped(name, sorted(lacking))):
            warnings.warn(f"{choice} defines {name}, which nothing calls; {hint}", stacklevel=2)
