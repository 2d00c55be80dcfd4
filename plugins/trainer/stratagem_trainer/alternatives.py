"""Whether a trainer could do its work with other arguments, and how to install what an error advises."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stratagem.discovery import catalog, registry
from stratagem.errors import StratagemError
from stratagem.stack.resolver import resolve
from stratagem_trainer.module_checks import check, check_optimizers

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState

#: The kind and the name of a plugin in advice.
_ADVISED = re.compile(r'\b(strategy|precision|comm_hook|callback|checkpoint|launcher)s?[= ]"([\w-]+)"')


def accepts(state: FitState, arguments: Mapping[str, Any]) -> bool:
    """Whether the model of `state` could be trained with these `arguments` in place of those of its trainer."""
    settings = copy.copy(state.settings)
    # Options that were set for the plugin of an argument belong to what is replaced.
    replaced = {kind for name, kind in registry.arguments().items() if name in arguments}
    settings.options = {kind: options for kind, options in settings.options.items() if kind not in replaced}
    settings.origins = settings.origins | dict.fromkeys(arguments, "code")
    try:
        for name, value in arguments.items():
            setattr(settings, name, value)
        with warnings.catch_warnings(action="ignore"):
            stack = resolve(settings)
        check(state.module, state.datamodule, stack, "fit")
        check_optimizers(state.module, state.run.optimizers, stack)
    except StratagemError:
        return False
    return True


def tell_how_to_install(error: StratagemError) -> None:
    """Add to `error` how to install plugins that are missing, and that it advises by ``strategy="fsdp"`` or so."""
    for kind, name in dict.fromkeys(_ADVISED.findall(f"{error.expected} {error.do}")):
        package = catalog.providers(kind).get(name)
        if package is not None and name not in {entry.name for entry in registry.entries(kind, hidden=True)}:
            advice = f"{error.do}; to install {kind} {name!r}, {catalog.how_to_install(package)}"
            StratagemError.__init__(error, error.found, expected=error.expected, do=advice)
