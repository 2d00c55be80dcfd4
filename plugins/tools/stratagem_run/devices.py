"""How many processes this machine can run: one for each device."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.config.devices import MAX_LOCAL_PROCESSES
from stratagem.errors import ConfigError
from stratagem.stack.detection import detect_accelerator

#: Chooses the accelerator of a Trainer.
_ACCELERATOR = "STRATAGEM_TRAINER_ACCELERATOR"


def default_devices() -> int:
    """Return the meaning of ``devices="auto"`` on this machine: all of its accelerators, or one process on the CPU."""
    found = detect_accelerator().plugin
    return int(found.count()) if found.indexed else 1


def check_devices(devices: int, variables: Mapping[str, str]) -> None:
    """Check that this machine has that many devices.

    Raises:
        ConfigError: it has fewer, unless `variables` choose another accelerator.
    """
    if devices > MAX_LOCAL_PROCESSES:
        raise ConfigError(f"--devices is {devices}", expected=f"at most {MAX_LOCAL_PROCESSES} processes on one machine")
    found = detect_accelerator()
    count = found.plugin.count()
    if _ACCELERATOR not in variables and found.plugin.indexed and count < devices:
        raise ConfigError(
            f"--devices is {devices} and this machine has {count} ({found.name})", expected=f"at most {count}",
            do=f"pass --devices {count}, or --env {_ACCELERATOR}=cpu for processes on the CPU",
        )  # fmt: skip
