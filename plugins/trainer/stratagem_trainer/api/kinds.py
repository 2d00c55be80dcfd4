"""The kinds of plugins that take part in a `Trainer`'s loops: callbacks and loggers."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from attrs import define

import stratagem_trainer.api.events as events
from stratagem.api.kinds import Kind, Plugin
from stratagem_trainer.api.callback_log import LogsMetrics
from stratagem_trainer.api.events import CallbackEvents, LoggerMethods
from stratagem_trainer.hook_methods import belongs_to


@define(eq=False, repr=False, kw_only=True)
class Callback(CallbackEvents, LogsMetrics, Plugin):
    """Implements event hooks (`on_*`) around the loop; its methods with their names need no mark."""

    kind: ClassVar[str] = "callback"
    identified_by_options: ClassVar[bool] = True
    #: What others may ask of it: "best-checkpoint" (it has `best_model_path`), "checkpoint-folder"
    #: (``folder(trainer)``), "checkpoint-on-signal" (``saved_on_signal(path)``, too), "early-stopping"
    #: (`stopped_epoch`), "rank-times" (``rank_times()``: the titles of a table and its rows, one of each rank).
    roles: ClassVar[frozenset[str]] = frozenset()


@define(eq=False, repr=False, kw_only=True)
class Logger(LoggerMethods, Plugin):
    """Writes metrics: implements `log_metrics` and `log_hyperparams` (rank 0 only), which need no mark."""

    kind: ClassVar[str] = "logger"
    identified_by_options: ClassVar[bool] = True


def has_role(plugin: Any, role: str) -> bool:
    """Whether a callback declares that it has this one of `Callback.roles`."""
    return role in getattr(type(plugin), "roles", ())


CALLBACK: Final = Kind(
    "callback", Callback, argument="callbacks", hooks=events, conformance="stratagem_testing:CallbackConformance",
    module="callbacks", dotted=False, needs_trainer=True, place=90,
)  # fmt: skip
LOGGER: Final = Kind(
    "logger", Logger, conformance="stratagem_testing:LoggerConformance", module="loggers", needs_trainer=True,
    joined=belongs_to, place=100,
)  # fmt: skip
