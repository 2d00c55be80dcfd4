"""The kit for plugin authors: real gloo processes, plain-PyTorch references, and a conformance class for every kind.

    from stratagem.testing import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        plugin = "my_strategy"

Needs the packages of ``pip install "stratagem[testing]"``. Importing it imports none of its rooms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_ROOMS = {
    "recording": "synchronizations",
    "StandIn": "synchronizations",
    "synchronizations_per_step": "synchronizations",
    "run_in_processes": "processes",
    "ProcessesFailed": "processes",
    "Conformance": "conformance",
    "StrategyConformance": "strategy",
    "PrecisionConformance": "precision",
    "CommHookConformance": "comm_hook",
    "EnvironmentConformance": "machine",
    "LauncherConformance": "machine",
    "AcceleratorConformance": "machine",
    "CheckpointConformance": "checkpoint",
    "CallbackConformance": "events",
    "LoggerConformance": "events",
}

__all__ = list(_ROOMS)

if TYPE_CHECKING:
    from stratagem.testing.checkpoint import CheckpointConformance as CheckpointConformance
    from stratagem.testing.comm_hook import CommHookConformance as CommHookConformance
    from stratagem.testing.conformance import Conformance as Conformance
    from stratagem.testing.events import CallbackConformance as CallbackConformance
    from stratagem.testing.events import LoggerConformance as LoggerConformance
    from stratagem.testing.machine import AcceleratorConformance as AcceleratorConformance
    from stratagem.testing.machine import EnvironmentConformance as EnvironmentConformance
    from stratagem.testing.machine import LauncherConformance as LauncherConformance
    from stratagem.testing.precision import PrecisionConformance as PrecisionConformance
    from stratagem.testing.processes import ProcessesFailed as ProcessesFailed
    from stratagem.testing.processes import run_in_processes as run_in_processes
    from stratagem.testing.strategy import StrategyConformance as StrategyConformance
    from stratagem.testing.synchronizations import StandIn as StandIn
    from stratagem.testing.synchronizations import recording as recording
    from stratagem.testing.synchronizations import synchronizations_per_step as synchronizations_per_step


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        message = f"module 'stratagem.testing' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"stratagem.testing.{room}"), name)
