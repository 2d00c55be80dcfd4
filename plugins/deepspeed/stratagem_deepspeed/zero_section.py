"""The zero_optimization section of a configuration for DeepSpeed, and the precision that it enables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError
from stratagem_deepspeed.ds_config import AUTO

if TYPE_CHECKING:
    import torch

    from stratagem.api import PrecisionPolicy


#: Options by the keys of the zero_optimization section that have other names.
OPTIONS = {
    "offload_optimizer": "offload_optimizer",
    "offload_optimizer.device": "offload_optimizer_device",
    "offload_optimizer.nvme_path": "nvme_path",
    "offload_optimizer.buffer_count": "optimizer_buffer_count",
    "offload_param": "offload_parameters",
    "offload_param.device": "offload_params_device",
    "offload_param.nvme_path": "nvme_path",
    "offload_param.buffer_count": "params_buffer_count",
    "offload_param.buffer_size": "params_buffer_size",
}


def device_of(zero: Mapping[str, Any], section: str) -> str | None:
    """Return the device to which `section` ("offload_optimizer", "offload_param") offloads; None if it does not."""
    device = zero.get(section, {}).get("device", "none")
    return None if device == "none" else str(device)


def check_zero(zero: Mapping[str, Any], called: Callable[[str], str]) -> None:
    """Refuse what DeepSpeed ignores, or fails at without a message; `called` returns a key as the user wrote it.

    Raises:
        ConfigError: the section contradicts itself.
    """
    for section in ("offload_optimizer", "offload_param"):
        if section in zero and "device" not in zero[section]:
            raise ConfigError(f"{called(section)} has no device, and offloads nothing", expected='"cpu" or "nvme"')
    stage = zero.get("stage", 0)
    at_stage = f"{called('stage')} is {stage}"
    optimizer, parameters = (device_of(zero, section) for section in ("offload_optimizer", "offload_param"))
    if optimizer is not None and stage == 0:
        raise ConfigError(f"{called('offload_optimizer')} is set and {at_stage}", expected="stage 1, 2 or 3")
    if parameters is not None and stage < 3:
        raise ConfigError(
            f"{called('offload_param')} is set and {at_stage}", expected="stage 3, which partitions parameters"
        )
    if optimizer == "nvme" and stage < 3:
        raise ConfigError(
            f"{called('offload_optimizer.device')} is 'nvme' and {at_stage}, where DeepSpeed would use the CPU instead",
            expected="stage 3, or 'cpu'",
        )
    if zero.get("overlap_comm") and stage < 2:
        raise ConfigError(f"{called('overlap_comm')} is True and {at_stage}", expected="stage 2 or 3", do="drop it")
    if zero.get("allgather_partitions") is False:
        raise ConfigError(f"{called('allgather_partitions')} is False, which DeepSpeed has removed", do="drop it")
    _check_offload_optimizer(zero.get("offload_optimizer", {}), stage, called)
    for section, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device == "nvme" and not zero[section].get("nvme_path"):
            raise ConfigError(f"{called(section)} has no nvme_path", expected="a folder on a local disk")


def _check_offload_optimizer(section: Mapping[str, Any], stage: int, called: Callable[[str], str]) -> None:
    for key in ("pipeline_read", "pipeline_write"):
        if section.get(key):
            raise ConfigError(
                f"{called(f'offload_optimizer.{key}')} is True, with which DeepSpeed fails in its first step",
                expected="False", do="drop it",
            )  # fmt: skip
    partly = section.get("ratio", 1.0) < 1.0
    for key, holds in (("ratio", partly), ("super_offload", section.get("super_offload", False))):
        if holds and stage < 3:
            raise ConfigError(
                f"{called(f'offload_optimizer.{key}')} is {section[key]} and {called('stage')} is {stage}",
                expected="stage 3",
            )


def engine_dtype(config: Mapping[str, Any] | None, policy: PrecisionPolicy) -> torch.dtype | None:
    """Return the 16-bit dtype that a configuration enables, or else that of `policy`; None for 32 bits."""
    import torch

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16}
    for section, dtype in dtypes.items():
        if enabled(config or {}, section) is True:
            return dtype
    wanted = dtype_of(policy)
    return wanted if wanted in dtypes.values() else None


def dtype_of(policy: PrecisionPolicy) -> torch.dtype | None:
    return policy.compute_dtype or policy.param_dtype


def enabled(config: Mapping[str, Any], section: str) -> Any:
    """Return whether `section` is enabled; None if the configuration does not set it."""
    value = config.get(section, {}).get("enabled")
    return None if value == AUTO else value
