"""One seed for every source of randomness, and random states that travel in a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Remembers the seed for samplers and for processes started later.
SEED_VARIABLE = "STRATAGEM_SEED"
#: "1" asks loader workers to be seeded by rank and worker number.
SEED_WORKERS_VARIABLE = "STRATAGEM_SEED_WORKERS"

_MAX_SEED = 2**32 - 1


def seed_everything(seed: int | None = None, *, workers: bool = False, verbose: bool = False) -> int:
    """Seed Python, NumPy (if imported) and torch on all devices; return the seed.

    Every process that starts later, and every sampler, uses the same seed. Call it before building the model so that
    all ranks begin with equal weights. `None` draws a seed (or reuses the one set before).

    Args:
        seed: 0 to 2**32 - 1.
        workers: also give each loader worker its own seed, derived from rank and worker number.
        verbose: print the seed, where the variable RANK is unset or 0.

    Raises:
        ConfigError: `seed` is not such an integer.
    """
    import sys

    import torch

    if seed is None:
        seed = int(os.environ.get(SEED_VARIABLE, random.randint(0, _MAX_SEED)))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise ConfigError(f"seed is {seed!r}", expected=f"an integer from 0 to {_MAX_SEED}")
    os.environ.update({SEED_VARIABLE: str(seed), SEED_WORKERS_VARIABLE: str(int(workers))})
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    if verbose and os.environ.get("RANK", "0") == "0":
        print(f"seed_everything: the seed is {seed}", flush=True)
    return seed


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within: what draws from torch's generator of the CPU draws from `seed`. The generators of devices stay alone.

    (`torch.manual_seed` seeds those as well, and `torch.random.fork_rng` starts CUDA to put them back.)
    """
    import torch

    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def sampler_seed() -> int:
    """Return the seed that distributed samplers shuffle with: equal on all ranks."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def random_state(devices: Sequence[torch.device] | None = None) -> dict[str, Any]:
    """Return this process's random states as tensors, numbers and lists: loadable without unpickling.

    Args:
        devices: those that this process uses; without them, the current CUDA device. One that is not started has no
            state yet, and stays as it is: a process that has started CUDA cannot be forked.
    """
    import sys

    import torch

    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "devices": [generator.get_state() for generator in _generators(devices)],
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(name), torch.from_numpy(keys.astype("int64")), position, has_gauss, float(cached)]
    return state


def restore_random_state(state: dict[str, Any], devices: Sequence[torch.device] | None = None) -> None:
    """Put back what `random_state` returned; the first of `devices` gets the state of the first, and so on.

    A device whose state was not saved begins with the seed of the CPU's generator, as after `torch.manual_seed`.
    """
    import sys

    import torch

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    for generator, saved in itertools.zip_longest(_generators(devices), state["devices"]):
        if saved is None:
            generator.manual_seed(torch.initial_seed())
        elif generator is not None:
            generator.set_state(saved)
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy().astype("uint32"), *rest))


def _generators(devices: Sequence[torch.device] | None) -> list[torch.Generator]:
    """Return the generators of `devices`, those of a library (CUDA, XPU) that is started in this process."""
    import torch

    if devices is None:
        devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_initialized() else []
    libraries = {"cuda": torch.cuda, "xpu": torch.xpu}
    known = [(libraries[device.type], device.index or 0) for device in devices if device.type in libraries]
    return [library.default_generators[index] for library, index in known if library.is_initialized()]
