"""Find the CUDA devices that accept work."""

from __future__ import annotations

import subprocess
import sys

from stratagem.errors import ConfigError, StratagemError


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the first `num_devices` CUDA devices that accept a tensor (-1: all that do), for `devices=`.

    Another job may take a device between this call and its use.

    Raises:
        ConfigError: `num_devices` is 0, or more than exist.
        StratagemError: fewer than `num_devices` devices accept a tensor.
    """
    import torch

    available = torch.cuda.device_count()
    if type(num_devices) is not int or num_devices == 0 or num_devices < -1 or num_devices > available:
        raise ConfigError(
            f"num_devices is {num_devices!r}", expected=f"1 to {available} (there are {available}), or -1"
        )
    wanted = available if num_devices == -1 else num_devices
    usable = _probe(available)[:wanted]
    if len(usable) < max(num_devices, 1):
        raise StratagemError(
            f"{len(usable)} of {available} CUDA devices accept work", expected=f"{max(num_devices, 1)}",
            do="wait for other jobs to end, or request fewer",
        )  # fmt: skip
    return usable


#: Prints the numbers of the devices that accept a tensor.
_PROBE = """
import sys, torch
def accepts(index):
    try:
        torch.tensor(0.0, device=f"cuda:{index}")
    except RuntimeError:
        return False
    return True
print("usable:", *filter(accepts, range(int(sys.argv[1]))))
"""


def _probe(available: int) -> list[int]:
    """Return which devices accept a tensor. Another process tries them, since trying allocates memory on each device.

    After CUDA was used, this process could not be forked, and devices in exclusive mode would be blocked for others.
    """
    if not available:
        return []
    command = [sys.executable, "-c", _PROBE, str(available)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    _, told, numbers = result.stdout.rpartition("usable:")
    if result.returncode or not told:
        raise StratagemError(
            f"the process that tried the {available} CUDA devices ended with exit code {result.returncode}",
            expected="the numbers of those that work", do="check its messages above and the output of nvidia-smi",
        )  # fmt: skip
    return [int(number) for number in numbers.split()]
