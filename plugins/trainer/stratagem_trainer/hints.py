"""Warnings at the start of a fit about choices of the user's that keep a GPU slow, or mean another one."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from stratagem.runtime.context import Context

#: Compute capabilities from which on there are tensor cores for 16 bits, and for TF32.
_VOLTA, _AMPERE = (7, 0), (8, 0)
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def warn_of_slow_choices(module: nn.Module, run: Context) -> None:
    """Warn of what keeps `module` from the tensor cores of the run's GPU."""
    if run.device.type != "cuda" or torch.version.hip is not None:
        return
    capability = torch.cuda.get_device_capability(run.device)
    if run.policy.compute_dtype in _SIXTEEN_BITS:
        slow = capability >= _VOLTA and _convolves_slowly(module)
        text = (
            f"the 2-d convolutions of {type(module).__name__} have weights in the order of torch.contiguous_format: in "
            "16 bits they are faster after model.to(memory_format=torch.channels_last), with batches in that order"
        )
    else:
        slow = run.settings.float32_matmul_precision is None and capability >= _AMPERE and _multiplies_in_full(module)
        text = (
            'matrix products are in fp32: float32_matmul_precision="high" uses TF32, many times as fast with 10 bits '
            'of mantissa; "highest" says that all 23 are wanted'
        )
    if slow:
        warnings.warn(text, stacklevel=2)


def warn_of_another_order(run: Context) -> None:
    """Warn if `devices` names numbers that mean other GPUs to ``nvidia-smi``."""
    wanted = run.settings.devices
    is_count = isinstance(wanted, int) or (isinstance(wanted, str) and "," not in wanted)
    if run.device.type != "cuda" or is_count or "CUDA_DEVICE_ORDER" in os.environ:
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    if len(names) > 1:
        warnings.warn(
            f"devices is {wanted!r} among GPUs of several kinds ({', '.join(names)}): CUDA numbers the fastest first, "
            "nvidia-smi by place. Set CUDA_DEVICE_ORDER=PCI_BUS_ID in the environment for the same numbers",
            stacklevel=2,
        )


def _convolves_slowly(module: nn.Module) -> bool:
    weights = [part.weight for part in module.modules() if isinstance(part, nn.Conv2d)]
    known = [weight for weight in weights if not nn.parameter.is_lazy(weight)]
    return any(not weight.is_contiguous(memory_format=torch.channels_last) for weight in known)


def _multiplies_in_full(module: nn.Module) -> bool:
    try:
        allows = torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch's newer switches were used, one for each backend
        return False
    return not allows and any(parameter.dtype is torch.float32 for parameter in module.parameters())
