"""Import DeepSpeed, and connect it to the process group of one run after another.

[Note: global state of deepspeed]
deepspeed expects a process that a launcher started for one training. It keeps the accelerator for which it was
imported, the process group, and copies of groups in global variables, and reads LOCAL_RANK and LOCAL_SIZE from the
environment at any time. Here a process may have several runs, one after the other, and need not be started by a
launcher: `join` sets this state for one run, `leave` resets it. The environment is not changed: from a launcher's
variables the next run would conclude that a launcher started it.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import ConfigError
from stratagem_deepspeed import builds
from stratagem_deepspeed.ops import advise, ops_for, prepare_ops
from stratagem_deepspeed.options import level_number

if TYPE_CHECKING:
    from stratagem.api import RunContext

__all__ = ["advise", "join", "leave", "load", "ops_for", "prepare_ops"]

#: Modules that read LOCAL_RANK or LOCAL_SIZE.
_READERS = (
    "deepspeed.accelerator.cpu_accelerator",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.utils",
)
#: Warnings of deepspeed that occur in correct runs: with each of its schedulers, with each untested optimizer of
#: torch's, and with each dynamic loss scale.
_NOISE = (
    "Attempting to get learning rate from scheduler before it has started",
    "**** You are using ZeRO with an untested optimizer",
    "OVERFLOW",
)

#: Modules that deepspeed imports when it reads a configuration and makes an engine.
_LATE = (
    "deepspeed.runtime.zero.utils",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_config",
)

#: ZeRO's collectives: by function, the name in `traffic`, the argument with each rank's data, and the sender.
_COUNTED = {
    "all_reduce": ("all_reduce", 0, "tensor", "gradients"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input_tensor", "gradients"),
    "all_gather_into_tensor": ("all_gather", 1, "input_tensor", "parameters"),
    "broadcast": ("broadcast", 0, "tensor", "parameters"),
}

#: The runs that have joined and not left.
_joined: weakref.WeakSet[RunContext] = weakref.WeakSet()
#: torch's process group that deepspeed uses.
_group: Any = None


# --- Import -------------------------------------------------------------------------------------------------------


def load(device_type: str, logging_level: int | str = logging.WARNING) -> ModuleType:
    """Import deepspeed for devices of this type, and set the level of its logger.

    At WARNING and above only rank 0 logs, and warnings that occur in correct runs are filtered out.

    Raises:
        ConfigError: it is not installed, cannot be imported, or was imported for devices of another type.
    """
    level = level_number(logging_level)
    if "deepspeed" not in sys.modules:
        _check_variable(device_type)
    with builds.variables(DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device_type)):
        deepspeed = _imported()
        found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device_type:
        raise ConfigError(
            f"deepspeed was imported for {found!r} devices and this run trains on {device_type!r}",
            expected="the same", do=f"set DS_ACCELERATOR={device_type} before anything imports deepspeed",
        )  # fmt: skip
    _set_level(level)
    return deepspeed


def load_late() -> None:
    """Import now what deepspeed imports when it makes an engine, such as torch's compiler."""
    for name in _LATE:
        with contextlib.suppress(ImportError):  # other releases have other modules
            importlib.import_module(name)


def _set_level(level: int) -> None:
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)
    logger.removeFilter(_is_news)
    if level >= logging.WARNING:
        logger.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether to log a record of deepspeed's: errors, and on rank 0 warnings that do not occur in correct runs."""
    if record.levelno >= logging.ERROR:
        return True
    logged_by_rank_0 = bool(_joined) and not any(run.is_global_zero for run in _joined)
    return not logged_by_rank_0 and not any(noise in record.getMessage() for noise in _NOISE)


def _check_variable(device_type: str) -> None:
    wanted = os.environ.get("DS_ACCELERATOR", device_type)
    if wanted != device_type:
        raise ConfigError(
            f"DS_ACCELERATOR is {wanted!r} and this run trains on {device_type!r}",
            expected="the same", do="unset it, or set another accelerator",
        )  # fmt: skip


def _imported() -> ModuleType:
    try:
        return importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise _broken(error) from error
        raise ConfigError(
            "the strategy needs the package deepspeed, which is not installed", do='pip install "deepspeed>=0.19.8"'
        ) from error
    except Exception as error:
        raise _broken(error) from error


def _broken(error: Exception) -> ConfigError:
    return ConfigError(
        f"deepspeed cannot be imported ({type(error).__name__}: {error})", expected="a package that fits this torch",
        do='pip install --force-reinstall --no-deps "deepspeed>=0.19.8"',
    )  # fmt: skip


# --- One run -----------------------------------------------------------------------------------------------------


def join(run: RunContext) -> None:
    """Make deepspeed use the process group that `run` has joined. Safe to call twice."""
    global _group
    from deepspeed.comm import comm

    group = torch.distributed.group.WORLD
    assert group is not None, "connected before"
    if comm.cdb is None or group is not _group:
        _reset_groups()
        _joined.clear()  # runs that were not closed before their group was destroyed
        comm.cdb, _group = _backend(), group
    _joined.add(run)
    _show(_variables(run))
    builds.take_over(speaks=run.is_global_zero)


def count_bytes(run: RunContext) -> None:
    """Count the bytes that deepspeed sends in the traffic of `run`."""
    from deepspeed.comm import comm

    backend: Any = comm.cdb
    if getattr(backend, "counts_in", None) is run.collectives.traffic:
        return
    backend.counts_in = run.collectives.traffic
    for name, (collective, index, argument, sender) in _COUNTED.items():
        setattr(backend, name, _counting(getattr(type(backend), name), backend, collective, index, argument, sender))


def _counting(send: Any, backend: Any, collective: str, index: int, argument: str, sender: str) -> Any:
    def counted(*arguments: Any, **options: Any) -> Any:
        tensor = options[argument] if argument in options else arguments[index]
        size = torch.distributed.get_world_size(options.get("group"))
        backend.counts_in.add(collective, tensor.nbytes, size, sender=sender)
        return send(backend, *arguments, **options)

    return counted


def leave(run: RunContext) -> None:
    """Reset deepspeed's process group and variables of `run`. Safe to call twice."""
    _joined.discard(run)
    if _joined or "deepspeed.comm.comm" not in sys.modules:
        return
    _reset_groups()
    _show({})
    builds.give_back()


@contextlib.contextmanager
def telling_rank() -> Iterator[None]:
    """Within: an engine whose group has gone can ask for its rank, to print on rank 0 what it removes."""
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    has_gone = comm is not None and comm.cdb is None
    if has_gone:
        comm.cdb = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda *_: 0)
    try:
        yield
    finally:
        if has_gone:
            comm.cdb = None


def _backend() -> Any:
    """Return deepspeed's backend for torch's process group."""
    from deepspeed import ops as deepspeeds_ops
    from deepspeed.comm import comm

    # Checking which ops can be built runs a compiler dozens of times; and on a CPU an op for inference only would be
    # built at once.
    asked_before = vars(deepspeeds_ops).get("__compatible_ops__")
    deepspeeds_ops.__compatible_ops__ = {}
    try:
        backend = comm.TorchBackend(torch.distributed.get_backend(), comm.default_pg_timeout, None)
    finally:
        del deepspeeds_ops.__compatible_ops__
        if asked_before is not None:
            deepspeeds_ops.__compatible_ops__ = asked_before
    # The same collectives under names without a deprecation warning.
    backend.all_gather_function = getattr(torch.distributed, "all_gather_single", backend.all_gather_function)
    backend.reduce_scatter_function = getattr(
        torch.distributed, "reduce_scatter_single", backend.reduce_scatter_function
    )
    return backend


def _reset_groups() -> None:
    """Reset the group that deepspeed uses and those that it made from it, which are destroyed together."""
    global _group
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb, _group = None, None
    groups._release_process_group_references()


def _variables(run: RunContext) -> dict[str, str]:
    world = run.world
    assert world is not None, "connected before"
    # deepspeed uses it as the number of the device: a run may train on the second GPU with one process.
    device = world.local_rank if run.device.index is None else run.device.index
    return {"LOCAL_RANK": str(device), "LOCAL_SIZE": str(world.local_world_size)}


def _show(variables: Mapping[str, str]) -> None:
    """Make deepspeed's modules read `variables` as if they were in the environment."""
    for name in _READERS:
        module: Any = importlib.import_module(name)
        module.os = _Os(variables) if variables else os


class _Os:
    """The module `os`, with further variables in its environment."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.environ = collections.ChainMap(dict(variables), os.environ)

    def getenv(self, name: str, default: str | None = None) -> str | None:
        return self.environ.get(name, default)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)
