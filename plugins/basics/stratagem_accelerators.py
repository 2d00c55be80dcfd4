"""Accelerators for the devices of torch: cpu, cuda, xpu, mps. Listing them must be fast, so methods import torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from attrs import define

from stratagem.api import DEVICE_CPU, DEVICE_CUDA, DEVICE_MPS, Accelerator, Capabilities
from stratagem.errors import ConfigError, nearest

if TYPE_CHECKING:
    import torch

    from stratagem_copy_stream import CopyStream

#: Valid values of CUDA_DEVICE_ORDER; CUDA reads any other value as the first, without an error message.
_ORDERS = ("FASTEST_FIRST", "PCI_BUS_ID")


@define(eq=False, kw_only=True)
class CPUAccelerator(Accelerator):
    """Train on the CPU; `devices` is the number of processes."""

    indexed = False
    capabilities = Capabilities(provides={DEVICE_CPU})

    def count(self) -> int:
        return 1

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("cpu")


@define(eq=False, kw_only=True)
class CUDAAccelerator(Accelerator):
    """Train on NVIDIA GPUs, or on AMD GPUs with a ROCm build of torch."""

    precedence = 20
    backend = "nccl"
    capabilities = Capabilities(provides={DEVICE_CUDA})

    def count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("cuda", index)

    def number_of(self, identifier: str) -> int:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        listed = [name.strip() for name in (visible or "").split(",")]
        found = [number for number, name in enumerate(listed) if name and name.startswith(identifier)]
        if len(found) == 1 and found[0] < self.count():
            return found[0]
        shown = "not set" if visible is None else repr(visible)
        raise ConfigError(
            f"devices names {identifier!r}, and CUDA_VISIBLE_DEVICES is {shown}, where CUDA sees {self.count()}",
            expected="numbers, or a prefix of one identifier there; of several MIG slices a process sees the first",
            do=f'start the program with CUDA_VISIBLE_DEVICES={identifier} and leave devices at "auto"',
        )

    def identity(self, device: torch.device) -> tuple[str, str] | None:
        import torch

        properties = torch.cuda.get_device_properties(device)
        if "MIG" in properties.name:  # several slices may have the UUID of their GPU, and a process sees only one
            return f"{properties.uuid} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}", properties.name
        return str(properties.uuid), properties.name

    def activate(self, device: torch.device) -> None:
        import torch

        order = os.environ.get("CUDA_DEVICE_ORDER")
        if order not in (None, *_ORDERS):
            raise ConfigError(
                f"CUDA_DEVICE_ORDER is {order!r}", expected=" or ".join(map(repr, _ORDERS)),
                do=nearest(order, _ORDERS) or "unset it",
            )  # fmt: skip
        torch.cuda.set_device(device)

    def copy_stream(self, device: torch.device, hints: bool) -> CopyStream:
        from stratagem_copy_stream import CopyStream

        return CopyStream(device, hints)


@define(eq=False, kw_only=True)
class MPSAccelerator(Accelerator):
    """Train on the GPU of an Apple processor."""

    precedence = 30
    capabilities = Capabilities(provides={DEVICE_MPS})

    def count(self) -> int:
        import torch

        return int(torch.backends.mps.is_available())

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("mps", index)


@define(eq=False, kw_only=True)
class XPUAccelerator(Accelerator):
    """Train on Intel GPUs; processes communicate over XCCL."""

    precedence = 15
    backend = "xccl"
    capabilities = Capabilities(provides={"device:xpu"})

    def count(self) -> int:
        import torch

        return torch.xpu.device_count()

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("xpu", index)

    def activate(self, device: torch.device) -> None:
        import torch

        torch.xpu.set_device(device)


def gpu() -> Accelerator:
    """Return the accelerator for ``gpu``: mps where available, else cuda, else xpu."""
    for accelerator in (MPSAccelerator(), CUDAAccelerator(), XPUAccelerator()):
        if accelerator.count():
            return accelerator
    raise ConfigError(
        "accelerator is 'gpu' and torch finds none", expected="an MPS, CUDA or XPU device", do='use "cpu" or "auto"'
    )
