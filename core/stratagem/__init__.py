"""stratagem trains PyTorch models on one device or a thousand; every part of a run is a plugin chosen by name.

    import stratagem as sg

    trainer = sg.Trainer(strategy="ddp", precision="bf16-mixed", devices=2)
    trainer.fit(model, loader)

Importing the package imports nothing else: names below load their module on first use.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

_NAMES = {
    "stratagem._version": "__version__",
    "stratagem_trainer.trainer": "Trainer",
    "stratagem.runtime.run": "Run",
    "stratagem_trainer.module": "Module",
    "stratagem_trainer.datamodule": "DataModule",
    "stratagem_trainer.combined_loader": "CombinedLoader",
    "stratagem_trainer.hyperparameters": "HyperparametersMixin",
    "stratagem_trainer.usable_devices": "find_usable_cuda_devices",
    "stratagem_trainer.rank_zero": "rank_zero_only rank_zero_info rank_zero_warn",
    "stratagem.api.seeding": "seed_everything",
    "stratagem.api.markers": "hookimpl",
    "stratagem.api.kinds": "Strategy Precision Environment Launcher Accelerator CheckpointFormat Command",
    "stratagem_buckets": "CommHook",
    "stratagem_trainer.api.kinds": "Callback Logger",
    "stratagem.api.capabilities": "Capabilities",
    "stratagem.api.world": "World",
    "stratagem.errors": "StratagemError",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]

if TYPE_CHECKING:
    from stratagem._version import __version__ as __version__
    from stratagem.api.capabilities import Capabilities as Capabilities
    from stratagem.api.kinds import Accelerator as Accelerator
    from stratagem.api.kinds import CheckpointFormat as CheckpointFormat
    from stratagem.api.kinds import Command as Command
    from stratagem.api.kinds import Environment as Environment
    from stratagem.api.kinds import Launcher as Launcher
    from stratagem.api.kinds import Precision as Precision
    from stratagem.api.kinds import Strategy as Strategy
    from stratagem.api.markers import hookimpl as hookimpl
    from stratagem.api.seeding import seed_everything as seed_everything
    from stratagem.api.world import World as World
    from stratagem.errors import StratagemError as StratagemError
    from stratagem.runtime.run import Run as Run
    from stratagem_buckets import CommHook as CommHook
    from stratagem_trainer.api.kinds import Callback as Callback
    from stratagem_trainer.api.kinds import Logger as Logger
    from stratagem_trainer.combined_loader import CombinedLoader as CombinedLoader
    from stratagem_trainer.datamodule import DataModule as DataModule
    from stratagem_trainer.hyperparameters import HyperparametersMixin as HyperparametersMixin
    from stratagem_trainer.module import Module as Module
    from stratagem_trainer.rank_zero import rank_zero_info as rank_zero_info
    from stratagem_trainer.rank_zero import rank_zero_only as rank_zero_only
    from stratagem_trainer.rank_zero import rank_zero_warn as rank_zero_warn
    from stratagem_trainer.trainer import Trainer as Trainer
    from stratagem_trainer.usable_devices import find_usable_cuda_devices as find_usable_cuda_devices


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        message = f"module 'stratagem' has no attribute {name!r}"
        try:
            importlib.util.find_spec(f"stratagem.{name}")  # importing a module of ours begins by asking for it here
        except ImportError as error:
            message = str(error)
        raise AttributeError(message)
    # Importing makes no garbage, but it makes the collector walk all of torch's objects, which takes longer than the
    # import itself.
    collecting = gc.isenabled()
    gc.disable()
    try:
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("stratagem_trainer", "stratagem_buckets"):
            raise
        message = f"stratagem.{name} is in a package that is not installed; run `pip install stratagem`"
        raise ModuleNotFoundError(message, name=error.name) from None
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def _tell_counterpart(name: str, *_search: Any) -> None:
    """Refuse to import ``stratagem.NAME``, which nobody has found, if it is a name of another trainer's."""
    package, _, moved = name.partition(".")
    if package == __name__:
        from stratagem.discovery.catalog import counterpart

        if instead := counterpart(moved):
            message = f"stratagem has no {moved!r}; {instead}"
            raise ImportError(message)


sys.meta_path.append(SimpleNamespace(find_spec=_tell_counterpart))


def __dir__() -> list[str]:
    return sorted(__all__)
