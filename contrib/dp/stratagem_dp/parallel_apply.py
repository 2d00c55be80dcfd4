"""Run the replicas in parallel, each in its own thread."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def parallel_apply(calls: list[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Return the results of `calls`, each made in its own thread with the torch settings of this thread.

    Raises the error of the first call that failed, after all calls have ended.
    """
    settings = _ThreadSettings(devices)
    outputs: list[Any] = [None] * len(calls)
    errors: dict[int, BaseException] = {}

    def work(index: int) -> None:
        try:
            with settings.entered(index):
                outputs[index] = calls[index]()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            error.add_note(f"in chunk {index + 1} of {len(calls)} of a batch, on {devices[index]}")
            errors[index] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(work, index)) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
        if devices[0].type == "cpu":  # one random generator for all: the order of draws must be the same each time
            thread.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return outputs


class _ThreadSettings:
    """The thread-local settings of torch in the thread that creates this."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self.inference, self.gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        kinds = dict.fromkeys(("cpu", devices[0].type))
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self.streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    @contextlib.contextmanager
    def entered(self, index: int) -> Iterator[None]:
        """Apply the settings in the thread of call `index`."""
        with contextlib.ExitStack() as stack:
            stream = self.streams[index]
            if stream is not None:
                stack.enter_context(torch.cuda.device(self.devices[index]))
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast.items():
                # All threads would share autocast's cache of weights, which the first thread to end clears.
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield
