"""The parts of DeepSpeed that are compiled on the machine they run on: which of them a run uses, and having those."""

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


# --- What a run needs --------------------------------------------------------------------------------------------


def ops_for(config: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, device_type: str) -> list[str]:
    """Return the ops that an engine of that configuration and optimizer loads.

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


#: By the name of an optimizer in a configuration: its op if its state is on the CPU by way of offload, and if not.
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
            expected=f"a GPU, as deepspeed has {op} for no other device", do=f"train on one, or {OPS[op].otherwise}",
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
    """Tell rank 0's user once of an optimizer of deepspeed's that does the same as the one of torch's, faster."""
    if not run.is_global_zero or type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    name = f"torch.optim.{type(optimizer).__name__}"
    adamw = "" if isinstance(optimizer, torch.optim.AdamW) else ", adamw_mode=False"
    if device_of(config.get("zero_optimization", {}), "offload_optimizer") is not None:
        faster = f"deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, ...{adamw})"
        said = f"the optimizer's state is offloaded and {name} steps there: {faster} is several times as fast"
    elif run.device.type == "cuda":
        faster = f"deepspeed.ops.adam.FusedAdam(parameters, ...{adamw.replace('adamw', 'adam_w')})"
        said = f"{name} steps parameter by parameter: {faster} takes one kernel for many"
    else:
        return
    warnings.warn(said, stacklevel=2)


# --- Having them -------------------------------------------------------------------------------------------------


def prepare_ops(names: Iterable[str], run: RunContext) -> None:
    """Load these ops, each built first if this machine has not got it: by one process of a node. Collective.

    Raises:
        ConfigError: on all ranks, where one could not be built anywhere.
    """
    names = list(dict.fromkeys(names))
    if not names:
        return
    assert run.world is not None, "connected before"
    for in_charge in (True, False):  # the others of a node find what the first one built
        error = _failure(names) if (run.world.local_rank == 0) is in_charge else None
        failures = [each for each in run.collectives.all_gather_object(error) if each is not None]
        if failures:
            raise failures[0]


def _failure(names: Iterable[str]) -> ConfigError | None:
    """Load the ops; return what went wrong."""
    from deepspeed.accelerator import get_accelerator

    builders = [get_accelerator().create_op_builder(OPS[name].builder) for name in names]
    try:
        for builder in builders:  # before minutes are spent on the first of them
            check_tools(builder)
        for builder in builders:
            builder.load()
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        return unusable(builder.name, error)
    return None
