"""The samplers of a loader: their seeds, generators and epoch, and the order of batches; seeds of its workers."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from stratagem.api.batches import replace_in_loader
from stratagem.api.seeding import SEED_WORKERS_VARIABLE
from stratagem.runtime.data import ShardedSampler, shuffles_all


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every part of `loader` that shuffles by epoch which one begins; its data set may have grown."""
    for part in (*_samplers_of(loader), loader, getattr(loader, "dataset", None)):  # a data set may be a stream
        if type(part) is DistributedSampler:  # it measures its data set when it is made
            options = part.dataset, part.num_replicas, part.rank, part.shuffle, part.seed, part.drop_last
            DistributedSampler.__init__(part, *options)
        tell = getattr(part, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators of its own that `loader` draws from, each once."""
    parts = (loader, *_samplers_of(loader))
    found = {id(g): g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)}
    return list(found.values())


def in_order_of_several(loader: Any, seed: int) -> Any:
    """Return `loader`, which shuffles in one process, in the order in which several processes shared it."""
    if not (isinstance(loader, DataLoader) and loader.batch_size is not None and shuffles_all(loader.sampler)):
        return loader
    sampler: Any = DistributedSampler(loader.dataset, 1, 0, shuffle=True, seed=seed)
    batches = type(loader.batch_sampler)(sampler, loader.batch_size, loader.drop_last)  # type: ignore[call-arg,misc]
    return replace_in_loader(loader, sampler=sampler, batch_sampler=batches)


def seeded_samplers(loader: Any) -> list[Any]:
    """Return the samplers of `loader` that shuffle with a seed, for several processes."""
    kinds: Any = DistributedSampler | ShardedSampler
    return [each for each in _samplers_of(loader) if isinstance(each, kinds) and getattr(each, "shuffle", True)]


def _samplers_of(loader: Any) -> Iterator[Any]:
    """Yield the samplers of `loader`, and those inside them."""
    waiting = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    seen: set[int] = set()
    while waiting:
        sampler = waiting.pop(0)
        if sampler is not None and id(sampler) not in seen:
            seen.add(id(sampler))
            yield sampler
            waiting.append(getattr(sampler, "sampler", None))


def seed_loader_workers(loader: Any, rank: int) -> None:
    """Give loader workers seeds of their own where `seed_everything(workers=True)` asked for it."""
    wanted = os.environ.get(SEED_WORKERS_VARIABLE) == "1"
    if wanted and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(_seed_worker, rank=rank)


def _seed_worker(worker_id: int, rank: int = 0) -> None:
    """Seed Python and NumPy in a loader worker from torch's own worker seed and the rank."""
    seed = (torch.initial_seed() + 7919 * rank + worker_id) % (2**32 - 1)
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def in_order(loader: Any) -> Any:
    """Return `loader` without shuffling: the same batches every epoch."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader
    if type(loader.sampler) is SequentialSampler or not hasattr(loader.sampler, "__len__"):
        return loader
    shuffles = type(loader.sampler) is RandomSampler
    # A sampler of another kind also selects samples: the first selection is kept.
    sampler: Any = SequentialSampler(loader.dataset) if shuffles else list(loader.sampler)  # type: ignore[arg-type]
    return replace_in_loader(
        loader, sampler=sampler, batch_sampler=BatchSampler(sampler, loader.batch_size, loader.drop_last)
    )
