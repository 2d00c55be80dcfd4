"""Random numbers that differ between the ranks of the axis `tensor`, for dropout of activations that are cut.

Outside, the generators of these ranks have equal states, so that replicated activations get equal dropout. The seed for
a part is drawn from the default generator: it is the same in a repeated forward (activation checkpointing), for which
the generator's state is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stratagem_parallel.tensor.moves import Line


@contextlib.contextmanager
def of_this_part(line: Line, device: torch.device) -> Iterator[None]:
    """Within: random numbers on `device` are those of this rank's part."""
    seed = int(torch.randint(2**62, ()))
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        own = (seed + 0x9E3779B97F4A7C15 * (line.rank + 1)) % 2**63
        if devices:
            torch.get_device_module(device).manual_seed(own)
        else:
            torch.default_generator.manual_seed(own)
        yield
