"""Numbers that a device computed, and flags of other ranks, on the host: at once, or later without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stratagem.api.world import Collectives

_HOST = torch.device("cpu")


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return `values`, numbers or tensors with one element, as numbers.

    The host waits for a device once, however many tensors are there: ``float(tensor)`` would wait for each.
    """
    numbers: dict[str, float] = {}
    for names, stacked in _stacked(values):
        numbers.update(zip(names, stacked.tolist(), strict=True))
    return {name: numbers[name] if name in numbers else _number(value) for name, value in values.items()}


class Readback:
    """`values`, numbers or tensors with one element, on their way to the host, which does not wait for them.

    They are copied behind what is queued on the device. Until `ready`, to read them would wait for that.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._copies: list[tuple[list[str], Tensor]] = []
        self._events: list[Any] = []
        for names, stacked in _stacked(values):
            # Other backends may not order such a copy with what reads it.
            self._copies.append((names, stacked.to(_HOST, non_blocking=stacked.device.type in ("cpu", "cuda"))))
            if stacked.device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(stacked.device))
                self._events.append(event)

    @property
    def ready(self) -> bool:
        """Whether all numbers have arrived."""
        return all(event.query() for event in self._events)

    def numbers(self) -> dict[str, float]:
        """Return the values; waits for those that have not arrived."""
        for event in self._events:
            event.synchronize()
        numbers: dict[str, float] = {}
        for names, copy in self._copies:
            numbers.update(zip(names, copy.tolist(), strict=True))
        return {name: numbers[name] if name in numbers else _number(value) for name, value in self._values.items()}


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _stacked(values: Mapping[str, Any]) -> list[tuple[list[str], Tensor]]:
    """Return the names of the tensors in `values` that are on a device, by device, and their numbers side by side."""
    by_device: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.device != _HOST:
            by_device.setdefault(value.device, []).append(name)
    stacks = []
    for device, names in by_device.items():
        dtype = torch.float32 if device.type == "mps" else torch.float64
        stacks.append((names, torch.stack([values[name].detach().reshape(()).to(dtype) for name in names])))
    return stacks


class LateFlag:
    """Whether a flag is true on some rank of `collectives`, which carry CPU tensors.

    Every method is collective.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives.unchecked
        self._answer: Any = None

    def send(self, here: bool) -> None:
        """Tell the other ranks that the flag is `here` on this one."""
        self._answer = self._collectives.average_async(torch.tensor(float(here)))

    def read(self) -> bool:
        """Return whether the flag that was sent last was true on some rank; False if none was, or it was read."""
        answer, self._answer = self._answer, None
        return answer is not None and bool(answer.wait() > 0)

    def exchange(self, here: bool) -> bool:
        """Return what `read` does, and send `here`; on one rank return `here`."""
        if self._collectives.world_size == 1:
            return here
        before = self.read()
        self.send(here)
        return before
