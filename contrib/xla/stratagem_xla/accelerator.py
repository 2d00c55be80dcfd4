"""The accelerators `tpu` and `xla`. Listing them must be fast, so methods import torch and torch_xla."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import define

from stratagem.api import LOSS_SCALING, Accelerator, Capabilities
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: The device that this package trains on.
DEVICE_XLA: Final = "device:xla"
#: The strategy runs what a batch queued: without it, an XLA device computes nothing.
XLA_STEPS: Final = "xla-steps"

_INSTALL: Final = 'run `pip install "torch_xla[tpu]"` with a torch of the same version, or use accelerator="auto"'


@define(eq=False, kw_only=True)
class XLAAccelerator(Accelerator):
    """Train on TPUs through PyTorch/XLA; with PJRT_DEVICE=CPU on the CPU, in CPU_NUM_DEVICES parts."""

    capabilities = Capabilities(provides={DEVICE_XLA}, requires={XLA_STEPS}, conflicts={LOSS_SCALING})

    @property
    def precedence(self) -> int:  # type: ignore[override]  # XLA on a CPU is only for those that name it
        return -10 if _runtime() == "CPU" else 40

    def count(self) -> int:
        if not _is_installed():
            return 0
        runtime = _runtime()
        if runtime == "CPU":
            return _num_cpu_devices()
        if runtime != "TPU" or not _has_google_device():
            return 0
        from torch_xla._internal import tpu  # does not start the driver

        return int(tpu.num_available_devices())

    def device(self, index: int) -> torch.device:
        import torch

        return torch.device("xla", index)

    def default_strategy(self, num_devices: int) -> str:
        return "single_xla" if num_devices == 1 else "xla"

    def activate(self, device: torch.device) -> None:
        os.environ.setdefault("PJRT_DEVICE", "TPU")  # torch_xla would choose the CPU where it finds no TPU
        try:
            import torch_xla  # noqa: F401
        except ImportError as error:
            import torch

            raise ConfigError(
                f"torch_xla {version('torch_xla')} cannot be imported with torch {torch.__version__}: {error}",
                expected="both of the same version", do=_INSTALL,
            ) from None  # fmt: skip


def tpu() -> XLAAccelerator:
    """Return the accelerator for ``tpu``; refuse a machine without one, which would otherwise train on its CPU."""
    found = XLAAccelerator()
    if found.count():
        return found
    if not _is_installed():
        raise ConfigError("accelerator is 'tpu' and torch_xla is not installed", expected="torch_xla 2.9", do=_INSTALL)
    setting = os.environ.get("PJRT_DEVICE")
    shown = "is not set" if setting is None else f"is {setting!r}"
    raise ConfigError(
        f"accelerator is 'tpu', this machine has no TPU, and PJRT_DEVICE {shown}",
        expected="a TPU, or PJRT_DEVICE=CPU to run XLA on the CPU", do='use accelerator="auto" for another device',
    )  # fmt: skip


def _is_installed() -> bool:
    try:
        version("torch_xla")
    except PackageNotFoundError:
        return False
    return True


def _runtime() -> str:
    """Return the type of device that PyTorch/XLA is to use."""
    return os.environ.get("PJRT_DEVICE", "TPU").partition("_")[0]


def _num_cpu_devices() -> int:
    text = os.environ.get("CPU_NUM_DEVICES", "1")
    if not (text.isdecimal() and int(text) > 0):
        raise ConfigError(f"CPU_NUM_DEVICES is {text!r}", expected="a number of devices, at least 1")
    return int(text)


def _has_google_device() -> bool:
    """Whether the PCI bus has a device of Google; torch_xla, which takes seconds to import, tells which it is."""
    return any(path.read_text().strip() == "0x1ae0" for path in Path("/sys/bus/pci/devices").glob("*/vendor"))
