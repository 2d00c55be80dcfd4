"""stratagem trains PyTorch models on one device or a thousand; every part of a run is a plugin chosen by name.

    import stratagem as sg

    trainer = sg.Trainer(strategy="ddp", precision="bf16-mixed", devices=2)
    trainer.fit(model, loader)

Importing the package imports nothing else: names below load their module on first use.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "__version__": "_version",
    "Trainer": "training.trainer",
    "Run": "runtime.run",
    "Module": "training.module",
    "DataModule": "training.datamodule",
    "HyperparametersMixin": "training.hyperparameters",
    "seed_everything": "api.seeding",
    "find_usable_cuda_devices": "config.devices",
    "rank_zero_only": "runtime.rank_zero",
    "rank_zero_info": "runtime.rank_zero",
    "rank_zero_warn": "runtime.rank_zero",
    "hookimpl": "api.markers",
    "Strategy": "api.kinds",
    "Precision": "api.kinds",
    "CommHook": "api.kinds",
    "Environment": "api.kinds",
    "Launcher": "api.kinds",
    "Accelerator": "api.kinds",
    "CheckpointFormat": "api.kinds",
    "Callback": "api.kinds",
    "Logger": "api.kinds",
    "Command": "api.kinds",
    "Capabilities": "api.capabilities",
    "World": "api.world",
    "StratagemError": "errors",
}

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from stratagem._version import __version__ as __version__
    from stratagem.api.capabilities import Capabilities as Capabilities
    from stratagem.api.kinds import Accelerator as Accelerator
    from stratagem.api.kinds import Callback as Callback
    from stratagem.api.kinds import CheckpointFormat as CheckpointFormat
    from stratagem.api.kinds import Command as Command
    from stratagem.api.kinds import CommHook as CommHook
    from stratagem.api.kinds import Environment as Environment
    from stratagem.api.kinds import Launcher as Launcher
    from stratagem.api.kinds import Logger as Logger
    from stratagem.api.kinds import Precision as Precision
    from stratagem.api.kinds import Strategy as Strategy
    from stratagem.api.markers import hookimpl as hookimpl
    from stratagem.api.seeding import seed_everything as seed_everything
    from stratagem.api.world import World as World
    from stratagem.config.devices import find_usable_cuda_devices as find_usable_cuda_devices
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.runtime.rank_zero import rank_zero_info as rank_zero_info
    from stratagem.runtime.rank_zero import rank_zero_only as rank_zero_only
    from stratagem.runtime.rank_zero import rank_zero_warn as rank_zero_warn
    from stratagem.runtime.run import Run as Run
    from stratagem.training.datamodule import DataModule as DataModule
    from stratagem.training.hyperparameters import HyperparametersMixin as HyperparametersMixin
    from stratagem.training.module import Module as Module
    from stratagem.training.trainer import Trainer as Trainer


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        message = f"module 'stratagem' has no attribute {name!r}"
        raise AttributeError(message)
    # Importing makes no garbage, but it makes the collector walk all of torch's objects, which takes longer than the
    # import itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(f"stratagem.{module}"), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
