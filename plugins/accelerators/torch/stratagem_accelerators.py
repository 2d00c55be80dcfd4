"""The devices that torch knows. Asked before anything is chosen, so torch is imported inside the methods."""

from __future__ import annotations

from attrs import define

from stratagem import Accelerator, Capabilities
from stratagem.errors import ConfigError
from stratagem.plugin import DEVICE_CPU, DEVICE_CUDA, DEVICE_MPS


@define(eq=False, kw_only=True)
class CPUAccelerator(Accelerator):
    """Processes on the CPU; `devices` is their number."""

    indexed = False
    capabilities = Capabilities(provides={DEVICE_CPU})

    def count(self):
        return 1

    def device(self, index):
        import torch

        return torch.device("cpu")


@define(eq=False, kw_only=True)
class CUDAAccelerator(Accelerator):
    """NVIDIA GPUs (and AMD's, through torch's ROCm build)."""

    precedence = 20
    backend = "nccl"
    capabilities = Capabilities(provides={DEVICE_CUDA})

    def count(self):
        import torch

        return torch.cuda.device_count()

    def device(self, index):
        import torch

        return torch.device("cuda", index)

    def activate(self, device):
        import torch

        torch.cuda.set_device(device)


@define(eq=False, kw_only=True)
class MPSAccelerator(Accelerator):
    """The GPU of an Apple processor."""

    precedence = 30
    capabilities = Capabilities(provides={DEVICE_MPS})

    def count(self):
        import torch

        return int(torch.backends.mps.is_available())

    def device(self, index):
        import torch

        return torch.device("mps", index)


def gpu() -> Accelerator:
    """``gpu``: mps where there is one, else cuda."""
    for accelerator in (MPSAccelerator(), CUDAAccelerator()):
        if accelerator.count():
            return accelerator
    raise ConfigError(
        "accelerator is 'gpu' and torch sees none", expected="an MPS or CUDA device", do='use "cpu" or "auto"'
    )
