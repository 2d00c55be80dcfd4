"""Parse `devices=`: a count, a list of numbers, identifiers, or all.

===============  ===========================================  =========================
value            accelerator with numbered devices (cuda)     accelerator without (cpu)
===============  ===========================================  =========================
"auto"           all                                          one process
3, "3"           the first three                              three processes
-1, "-1"         all                                          refused
[1, 3], "1,3"    these two                                    refused
"2,"             device 2                                     refused
"GPU-8932f937"   the device with that identifier              refused
0, "0", []       refused                                      refused
===============  ===========================================  =========================

Identifiers ("GPU-..." and "MIG-...", as `nvidia-smi -L` prints them; one or a list) are looked up in
CUDA_VISIBLE_DEVICES.

In the `gpus=` argument of older trainers a digit string was an index: ``gpus="3"`` meant device 3. Here it is a count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from stratagem.api.kinds import Accelerator
from stratagem.errors import ConfigError, shown

#: More processes than this on one machine are taken for a mistake.
MAX_LOCAL_PROCESSES = 1024

_IDENTIFIER = r"[A-Z]+-[\w/.-]+"
_GRAMMAR = 'a count, -1 for all, a list of indices such as [0, 2] or "0,2", identifiers such as "GPU-8f6a", or "auto"'


def parse_devices(value: Any, accelerator: Accelerator) -> tuple[int, ...]:
    """Return the device numbers of the processes of this node, one for each process.

    Raises:
        ConfigError: `value` is not in the grammar above, or names devices that do not exist.
    """
    if isinstance(value, str):
        value = _parse_text(value)
    if not accelerator.indexed:
        return tuple(range(_process_count(value)))
    available = accelerator.count()
    if value == "auto" or (_is_integer(value) and value == -1):
        return tuple(range(available))
    if _is_integer(value):
        return _first(value, available)
    if isinstance(value, Sequence):
        return _exactly([accelerator.number_of(each) if isinstance(each, str) else each for each in value], available)
    raise ConfigError(f"devices is {shown(value)}", expected=_GRAMMAR)


def devices_of_processes(value: Any, accelerator: Accelerator, running: int | None, origin: str) -> tuple[int, ...]:
    """Return the device numbers of the `running` processes of this node, which exist already: one for each process.

    If each process sees only one device (a scheduler set CUDA_VISIBLE_DEVICES), it has number 0 in all of them.

    Args:
        value: the argument `devices`; "auto" means one for each process.
        running: None if the environment does not know: a number in `value` is then the number of processes.
        origin: the environment that found the processes, for messages.

    Raises:
        ConfigError: as `parse_devices`; or there are more processes than devices.
    """
    wanted = _parse_text(value) if isinstance(value, str) else value
    if running is None and _is_integer(wanted) and wanted > 0:
        running = wanted
    is_count = wanted == "auto" or (_is_integer(wanted) and wanted in (-1, running))
    if accelerator.indexed and is_count and running and accelerator.count() == 1:
        return (0,) * running
    if wanted != "auto" or not running:
        return parse_devices(wanted, accelerator)
    if accelerator.indexed and running > (available := accelerator.count()):
        raise ConfigError(
            f"{origin} has {running} processes on this node, and each of them sees {available} devices",
            expected="a device for each process, or exactly one visible device in each",
            do=f"start at most {available} processes, or give each one device (CUDA_VISIBLE_DEVICES, or the "
            "scheduler's option for GPUs per task)",
        )
    return tuple(range(running))


def _parse_text(text: str) -> Any:
    stripped = text.strip()
    if stripped.lower() == "auto":
        return "auto"
    if re.fullmatch(r"-?\d+", stripped):
        return int(stripped)
    if re.fullmatch(r"\d+(\s*,\s*\d+)*\s*,?", stripped):
        return [int(part) for part in stripped.split(",") if part.strip()]
    if re.fullmatch(rf"{_IDENTIFIER}(\s*,\s*{_IDENTIFIER})*\s*,?", stripped):
        return [part.strip() for part in stripped.split(",") if part.strip()]
    raise ConfigError(f"devices is {text!r}", expected=_GRAMMAR)


def _process_count(value: Any) -> int:
    if value == "auto":
        return 1
    if _is_integer(value) and 0 < value <= MAX_LOCAL_PROCESSES:
        return int(value)
    if _is_integer(value) and value > MAX_LOCAL_PROCESSES:
        raise ConfigError(f"devices is {value}", expected=f"at most {MAX_LOCAL_PROCESSES} processes on one machine")
    raise ConfigError(
        f"devices is {shown(value)}", expected="a number of processes: this accelerator has no numbered devices"
    )


def _first(count: int, available: int) -> tuple[int, ...]:
    if count == 0:
        raise ConfigError(
            "devices is 0",
            expected="at least one device",
            do='use accelerator="cpu", or devices=[0] for the first one, which gpus="0" once meant',
        )
    if count < -1:
        raise ConfigError(f"devices is {count}", expected=_GRAMMAR)
    if count > available:
        raise ConfigError(f"devices is {count} and there are {available}", expected=f"at most {available}")
    return tuple(range(count))


def _exactly(indices: Sequence[Any], available: int) -> tuple[int, ...]:
    if not indices:
        raise ConfigError(
            f"devices is {indices!r}", expected="at least one device", do='use accelerator="cpu" for none'
        )
    if not all(_is_integer(index) for index in indices):
        raise ConfigError(f"devices is {indices!r}", expected="whole numbers in the list")
    if len(set(indices)) != len(indices):
        raise ConfigError(f"devices is {list(indices)}", expected="each device once")
    absent = [index for index in indices if not 0 <= index < available]
    if absent:
        raise ConfigError(f"devices is {list(indices)} and there are {available}", expected=f"0 to {available - 1}")
    return tuple(indices)


def _is_integer(value: Any) -> bool:
    return type(value) is int
