"""DeepSpeed's ops, which are compiled on the machine that uses them: find and load those that a run needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import ConfigError
from stratagem_deepspeed.builds import OPS, check_tools, unusable
from stratagem_deepspeed.zero_section import device_of

if TYPE_CHECKING:
    from stratagem.api import RunContext


# --- Which ops a run needs ----------------------------------------------------------------------------------------


def ops_for(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, device_type: str) -> list[str]:
    """Return the ops that an engine with this configuration and optimizer loads.

    Raises:
        ConfigError: the configuration's optimizer has no op for such a device.
    """
    found = _of_named_optimizer(config, device_type) if optimizer is None else _of_optimizer(optimizer)
    zero = config.get("zero_optimization", {})
    if "nvme" in (device_of(zero, "offload_optimizer"), device_of(zero, "offload_param")):
        found += ["pin_memory", "async_io"]
    elif os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower() == "native":
        found += ["pin_memory"]
    return found


#: By the name of an optimizer in a configuration: its op if its state is offloaded to the CPU, and if not.
_NAMED = {
    "adam": ("cpu_adam", "fused_adam"),
    "adamw": ("cpu_adam", "fused_adam"),
    "muon": ("cpu_adam", "fused_adam"),
    "adagrad": ("cpu_adagrad", None),
    "lion": ("cpu_lion", "fused_lion"),
    "lamb": ("fused_lamb", "fused_lamb"),
}


def _of_named_optimizer(config: Mapping[str, Any], device_type: str) -> list[str]:
    wanted = config.get("optimizer") or {}
    name = str(wanted.get("type", "")).lower()
    if name not in _NAMED or (wanted.get("params") or {}).get("torch_adam"):
        return []
    offloaded, otherwise = _NAMED[name]
    op = otherwise if device_of(config.get("zero_optimization", {}), "offload_optimizer") is None else offloaded
    if device_type == "cpu" and op in _GPU_ONLY:
        raise ConfigError(
            f"the configuration's optimizer is {wanted['type']!r} and this run trains on the CPU",
            expected=f"a GPU, the only device for which deepspeed has {op}", do=f"use one, or {OPS[op].otherwise}",
        )  # fmt: skip
    return [] if op is None else [op]


_GPU_ONLY = ("fused_lion", "fused_lamb")

#: The ops of deepspeed's optimizers, which load them when they are made.
_OWN = {
    "DeepSpeedCPUAdam": "cpu_adam",
    "DeepSpeedCPUAdagrad": "cpu_adagrad",
    "DeepSpeedCPULion": "cpu_lion",
    "FusedAdam": "fused_adam",
    "FusedLion": "fused_lion",
    "FusedLamb": "fused_lamb",
}


def _of_optimizer(optimizer: torch.optim.Optimizer) -> list[str]:
    return [
        _OWN[base.__name__]
        for base in type(optimizer).__mro__
        if base.__module__.startswith("deepspeed.") and base.__name__ in _OWN
    ]


def advise(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, run: RunContext) -> None:
    """Warn on rank 0 if deepspeed has a faster implementation of torch's optimizer."""
    if not run.is_global_zero or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    name = f"torch.optim.{type(optimizer).__name__}"
    adamw = "" if isinstance(optimizer, torch.optim.AdamW) else ", adamw_mode=False"
    if device_of(config.get("zero_optimization", {}), "offload_optimizer") is not None:
        faster = f"deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, ...{adamw})"
        message = f"the optimizer's state is offloaded and {name} steps on the CPU: {faster} is several times as fast"
    elif run.device.type == "cuda":
        faster = f"deepspeed.ops.adam.FusedAdam(parameters, ...{adamw.replace('adamw', 'adam_w')})"
        message = f"{name} steps parameter by parameter: {faster} uses one kernel for many"
    else:
        return
    warnings.warn(message, stacklevel=2)


# --- Building and loading them ------------------------------------------------------------------------------------


def prepare_ops(names: Iterable[str], run: RunContext) -> None:
    """Load these ops; one process of each node first builds those that are missing. Collective.

    Raises:
        ConfigError: an op could not be built on some node; on all ranks.
    """
    names = list(dict.fromkeys(names))
    if not names:
        return
    assert run.world is not None, "connected before"
    for in_charge in (True, False):  # the other processes of a node load what the first one built
        error = _failure(names) if (run.world.local_rank == 0) is in_charge else None
        failures = [each for each in run.collectives.all_gather_object(error) if each is not None]
        if failures:
            raise failures[0]


def _failure(names: Iterable[str]) -> ConfigError | None:
    """Load the ops; return what went wrong."""
    from deepspeed.accelerator import get_accelerator

    builders = [get_accelerator().create_op_builder(OPS[name].builder) for name in names]
    try:
        for builder in builders:  # before the first build, which takes minutes
            check_tools(builder)
        for builder in builders:
            builder.load()
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return unusable(builder.name, error)
    return None
