"""Say what held the memory of a device when a call of the trainer ran out of it, and what to change."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING

import torch

from stratagem.errors import StratagemError
from stratagem_callbacks.memory_held import UNKNOWN, Held, Memory, held_by, read_memory
from stratagem_callbacks.memory_ways import BACKWARD, OPTIMIZER_STEP, ways_out
from stratagem_layout import byte_text

if TYPE_CHECKING:
    from stratagem_trainer.api import TrainerView

_WORDS = ("out of memory", "not enough memory", "cannot allocate memory")
#: Of a device's memory, how much of it others hold that an error says so first: libraries such as NCCL hold some, too.
OTHERS = 0.1
#: Methods of `stratagem.runtime.step.Step`, and what they do.
_PARTS = {"differentiate": BACKWARD, "step_optimizers": OPTIMIZER_STEP}
_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
#: Numbers of bytes in torch's messages, as of the moment at which memory ran out.
_TOLD = {
    "asked": r"[Tt]ried to allocate ([\d.]+ \w+)",
    "total": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "limit": r"([\d.]+ \w+) allowed;",
    "allocated": r"([\d.]+ \w+) is allocated by PyTorch",
    "unused": r"([\d.]+ \w+) is reserved by PyTorch but unallocated",
}
_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class OutOfMemoryError(StratagemError, torch.OutOfMemoryError):
    """A device has no memory left: what held it, and what to change. Its cause is torch's error."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that this process could not get memory, of the host or of a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return not isinstance(error, StratagemError) and any(words in str(error).lower() for words in _WORDS)


def explained(error: RuntimeError, trainer: TrainerView) -> OutOfMemoryError | None:
    """Return the error to raise in place of `error`, which ends a call of the trainer; None if memory did not run out.

    Also None on devices other than GPUs of CUDA and the CPU, whose figures are not known. No collectives.
    """
    device = _device_of(str(error), trainer.run.device)
    if not is_out_of_memory(error) or device.type not in ("cpu", "cuda"):
        return None
    memory = read_memory(device, told_by(str(error)))
    held, part = held_by(trainer, device, memory.allocated), _part(error, trainer)
    found = f"rank {trainer.global_rank} ran out of memory on {device}, in {part}{_position(trainer)}: "
    found += f"{_asked(memory, held.on_cpu)}; {_holders(held, memory)}"
    ways = ways_out(trainer, held, memory, part)
    do = ", or ".join(way.text for way in ways)
    if memory.others > OTHERS * memory.total:
        found = f"other processes hold {byte_text(memory.others)} of {device}; {found}"
        do = f"end the other processes on {device} (nvidia-smi lists them)" + (f", or {do}" if do else "")
    explanation = OutOfMemoryError(found, do=do)
    explanation.__cause__ = error
    return explanation


def told_by(text: str) -> dict[str, int]:
    """Return the numbers of bytes that torch's message `text` has, by the attributes of `Memory`."""
    found = {name: re.search(pattern, text) for name, pattern in _TOLD.items()}
    return {name: _bytes(match[1]) for name, match in found.items() if match is not None}


def _bytes(text: str) -> int:
    number, unit = text.split()
    return int(float(number) * _UNITS[unit])


def _device_of(text: str, device: torch.device) -> torch.device:
    if "CPUAllocator" in text:
        return torch.device("cpu")
    told = re.search(r"GPU (\d+) has", text)
    return device if told is None else torch.device("cuda", int(told[1]))


def _part(error: BaseException, trainer: TrainerView) -> str:
    """Return in which method of the module, or part of a step, `error` was raised; else the call of the trainer."""
    part = str(trainer.state.fn)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_name
        if name in _METHODS:
            part = name
        elif frame.f_globals["__name__"] == "stratagem.runtime.step":
            part = _PARTS.get(name, part)
    return part


def _position(trainer: TrainerView) -> str:
    if trainer.state.fn != "fit":
        return ""
    return f" at step {trainer.global_step}, batch {trainer.position.batches_done}"


# --- Words -------------------------------------------------------------------------------------------------------


def _asked(memory: Memory, on_cpu: bool) -> str:
    asked = "it asked for memory" if memory.asked == UNKNOWN else f"it asked for {byte_text(memory.asked)}"
    if memory.asked > memory.total:
        return f"{asked}, and all of the memory is {byte_text(memory.total)}"
    allowed = ""
    if memory.limit is not None:
        limit = byte_text(memory.limit)
        allowed = f", and `ulimit -v` allows addresses of {limit}" if on_cpu else f", and {limit} are allowed"
    return f"{asked}, and {byte_text(memory.free)} of {byte_text(memory.total)} were free{allowed}"


def _holders(held: Held, memory: Memory) -> str:
    amounts = sorted(held.amounts().items(), key=lambda each: -each[1])
    text = "it held " + ", ".join(f"{byte_text(amount)} of {name}" for name, amount in amounts if amount)
    if memory.unused:
        text += f", and {byte_text(memory.unused)} reserved without using them"
    if 0 < memory.others <= OTHERS * memory.total:
        text += f"; libraries and other processes held {byte_text(memory.others)}"
    return text
