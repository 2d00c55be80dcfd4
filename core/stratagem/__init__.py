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
    "__version__": "stratagem._version",
    "Trainer": "stratagem_trainer.trainer",
    "Run": "stratagem.runtime.run",
    "Module": "stratagem_trainer.module",
    "DataModule": "stratagem_trainer.datamodule",
    "CombinedLoader": "stratagem_trainer.combined_loader",
    "HyperparametersMixin": "stratagem_trainer.hyperparameters",
    "seed_everything": "stratagem.api.seeding",
    "find_usable_cuda_devices": "stratagem.config.devices",
    "rank_zero_only": "stratagem.runtime.rank_zero",
    "rank_zero_info": "stratagem.runtime.rank_zero",
    "rank_zero_warn": "stratagem.runtime.rank_zero",
    "hookimpl": "stratagem.api.markers",
    "Strategy": "stratagem.api.kinds",
    "Precision": "stratagem.api.kinds",
    "CommHook": "stratagem.api.kinds",
    "Environment": "stratagem.api.kinds",
    "Launcher": "stratagem.api.kinds",
    "Accelerator": "stratagem.api.kinds",
    "CheckpointFormat": "stratagem.api.kinds",
    "Callback": "stratagem_trainer.api.kinds",
    "Logger": "stratagem_trainer.api.kinds",
    "Command": "stratagem.api.kinds",
    "Capabilities": "stratagem.api.capabilities",
    "World": "stratagem.api.world",
    "StratagemError": "stratagem.errors",
}

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from stratagem._version import __version__ as __version__
    from stratagem.api.capabilities import Capabilities as Capabilities
    from stratagem.api.kinds import Accelerator as Accelerator
    from stratagem.api.kinds import CheckpointFormat as CheckpointFormat
    from stratagem.api.kinds import Command as Command
    from stratagem.api.kinds import CommHook as CommHook
    from stratagem.api.kinds import Environment as Environment
    from stratagem.api.kinds import Launcher as Launcher
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
    from stratagem_trainer.api.kinds import Callback as Callback
    from stratagem_trainer.api.kinds import Logger as Logger
    from stratagem_trainer.combined_loader import CombinedLoader as CombinedLoader
    from stratagem_trainer.datamodule import DataModule as DataModule
    from stratagem_trainer.hyperparameters import HyperparametersMixin as HyperparametersMixin
    from stratagem_trainer.module import Module as Module
    from stratagem_trainer.trainer import Trainer as Trainer


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
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "stratagem_trainer":
            raise
        message = f"stratagem.{name} is in a package that is not installed; run `pip install stratagem`"
        raise ModuleNotFoundError(message, name=error.name) from None
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
