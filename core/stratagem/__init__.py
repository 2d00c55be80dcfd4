"""stratagem trains PyTorch models on one device or a thousand; every part of a run is a plugin chosen by name.

    import stratagem as sg

    trainer = sg.Trainer(strategy="ddp", precision="bf16-mixed", devices=2)
    trainer.fit(model, loader)

Importing the package imports nothing else: names below load their room on first use.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS = {
    "Trainer": "trainer",
    "Run": "run",
    "Module": "module",
    "DataModule": "data",
    "seed_everything": "seeding",
    "hookimpl": "plugin",
    "Strategy": "plugin",
    "Precision": "plugin",
    "CommHook": "plugin",
    "Environment": "plugin",
    "Launcher": "plugin",
    "Accelerator": "plugin",
    "CheckpointFormat": "plugin",
    "Callback": "plugin",
    "Logger": "plugin",
    "Command": "plugin",
    "Capabilities": "plugin",
    "World": "world",
    "StratagemError": "errors",
}

__all__ = ["__version__", *_ROOMS]

if TYPE_CHECKING:
    from stratagem.data import DataModule as DataModule
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.module import Module as Module
    from stratagem.plugin import Accelerator as Accelerator
    from stratagem.plugin import Callback as Callback
    from stratagem.plugin import Capabilities as Capabilities
    from stratagem.plugin import CheckpointFormat as CheckpointFormat
    from stratagem.plugin import Command as Command
    from stratagem.plugin import CommHook as CommHook
    from stratagem.plugin import Environment as Environment
    from stratagem.plugin import Launcher as Launcher
    from stratagem.plugin import Logger as Logger
    from stratagem.plugin import Precision as Precision
    from stratagem.plugin import Strategy as Strategy
    from stratagem.plugin import hookimpl as hookimpl
    from stratagem.run import Run as Run
    from stratagem.seeding import seed_everything as seed_everything
    from stratagem.trainer import Trainer as Trainer
    from stratagem.world import World as World


def __getattr__(name: str) -> Any:
    room = _ROOMS.get(name)
    if room is None:
        message = f"module 'stratagem' has no attribute {name!r}"
        raise AttributeError(message)
    # Importing makes no garbage, but it makes the collector walk all of torch's objects, which takes longer than the
    # import itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(f"stratagem.{room}"), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
