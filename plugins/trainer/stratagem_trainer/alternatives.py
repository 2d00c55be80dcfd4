"""Whether a trainer could do its work with other arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stratagem.discovery import registry
from stratagem.errors import StratagemError
from stratagem.stack.resolver import resolve
from stratagem_trainer.module_checks import check, check_optimizers

if TYPE_CHECKING:
    from stratagem_trainer.fit_state import FitState


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
