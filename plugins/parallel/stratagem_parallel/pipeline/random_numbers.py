"""Random numbers of a step that depend on the micro-batch and the stage, not on which rank computes what when.

[Note: equal generators]
The generators of all ranks of a pipeline have equal states between steps. What a step computes has generators of its
own, seeded by the run's seed, the epoch, the batch, the micro-batch and the stage. So `training_step` draws the same
numbers on the first and on the last rank (a mask that is used before and after the layers), schedules differ in
nothing, and a loader shuffles as in one process: nothing is drawn from the run's generators. That holds for torch's,
Python's and NumPy's generators, not for one that the user made.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

from stratagem.api.seeding import seeded

#: In the place of a stage: what `training_step` itself draws.
STEP = -1
#: The same, for what a model's own forward draws around its parts, in each stage.
AROUND = -3


def seed_of(epoch: int, batch_idx: int) -> int:
    """Return a seed for one batch: the same on all ranks of the pipeline, and after a run is resumed."""
    return (torch.initial_seed() + 0xD6E8FEB86659FD93 * (1 + epoch) + 0xA0761D6478BD642F * (1 + batch_idx)) % 2**62


@contextlib.contextmanager
def generators_of(seed: int, stage: int, microbatch: int, device: torch.device) -> Iterator[None]:
    """Within: random numbers are those of `microbatch` in `stage`."""
    own = (seed + 0x9E3779B97F4A7C15 * (2 + stage) + 0xC2B2AE3D27D4EB4F * (1 + microbatch)) % 2**63
    with _python_and_numpy(own) if stage == STEP else contextlib.nullcontext():
        if device.type == "cpu":
            with seeded(own):
                yield
        else:
            with torch.random.fork_rng([device], device_type=device.type):
                torch.manual_seed(own)
                yield


@contextlib.contextmanager
def _python_and_numpy(seed: int) -> Iterator[None]:
    """Within: Python's and NumPy's generators are seeded; afterwards they are as before."""
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    before, before_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    random.seed(seed)
    if numpy is not None:
        numpy.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        if numpy is not None:
            numpy.set_state(before_numpy)
