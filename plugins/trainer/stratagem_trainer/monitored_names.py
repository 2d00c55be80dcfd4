"""Warn early of options that name a metric which nobody has logged, if a logged one is spelled almost the same."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

from stratagem.errors import mistyped

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from stratagem.runtime.context import Context


def warn_of_mistyped_monitors(run: Context, logged: Collection[str]) -> None:
    """Warn of a plugin or scheduler that monitors a metric which is not in `logged`, a name with a mistake in typing.

    Not an error: training may log a metric of that name later.
    """
    for who, name in _monitors(run):
        others = [other for other in logged if _without_numbers(other) != _without_numbers(name)]
        if name not in logged and (hint := mistyped(name, others)):
            warnings.warn(
                f"{who} monitors {name!r}, which the sanity check did not log; {hint}. It is an error once training "
                "needs it and has not logged it either",
                stacklevel=2,
            )


def _monitors(run: Context) -> Iterator[tuple[str, str]]:
    for choice in run.stack.active():
        name: Any = getattr(choice.plugin, "monitor", None)
        if isinstance(name, str):
            yield str(choice), name
    for config in run.lr_scheduler_configs:
        if isinstance(config.monitor, str) and config.plateau:
            yield type(config.scheduler).__name__, config.monitor


def _without_numbers(name: str) -> str:
    return re.sub(r"\d", "", name)
