"""The kit for plugin authors: real gloo processes, plain-PyTorch references, and a conformance class for every kind.

    from stratagem_testing import StrategyConformance

    class TestMyStrategy(StrategyConformance):
        plugin = "my_strategy"

Importing the package imports nothing else: names below load their module on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

_MODULES = {
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
    "ObserverConformance": "events",
}

__all__ = list(_MODULES)

if "pytest" in sys.modules:  # an assertion that fails in a check shows the values that it compared
    sys.modules["pytest"].register_assert_rewrite(*{f"{__name__}.{module}" for module in _MODULES.values()})

if TYPE_CHECKING:
    from stratagem_testing.checkpoint import CheckpointConformance as CheckpointConformance
    from stratagem_testing.comm_hook import CommHookConformance as CommHookConformance
    from stratagem_testing.conformance import Conformance as Conformance
    from stratagem_testing.events import CallbackConformance as CallbackConformance
    from stratagem_testing.events import LoggerConformance as LoggerConformance
    from stratagem_testing.events import ObserverConformance as ObserverConformance
    from stratagem_testing.machine import AcceleratorConformance as AcceleratorConformance
    from stratagem_testing.machine import EnvironmentConformance as EnvironmentConformance
    from stratagem_testing.machine import LauncherConformance as LauncherConformance
    from stratagem_testing.precision import PrecisionConformance as PrecisionConformance
    from stratagem_testing.processes import ProcessesFailed as ProcessesFailed
    from stratagem_testing.processes import run_in_processes as run_in_processes
    from stratagem_testing.strategy import StrategyConformance as StrategyConformance
    from stratagem_testing.synchronizations import StandIn as StandIn
    from stratagem_testing.synchronizations import recording as recording
    from stratagem_testing.synchronizations import synchronizations_per_step as synchronizations_per_step


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        message = f"module 'stratagem_testing' has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"stratagem_testing.{module}"), name)
