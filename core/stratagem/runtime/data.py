"""Loaders: the share of each process, samplers and their seeds, generators, the order of batches."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from stratagem.api.batches import replace_in_loader
from stratagem.api.seeding import SEED_WORKERS_VARIABLE, sampler_seed, seed_worker, seeded

if TYPE_CHECKING:
    from stratagem.api.world import Mesh


# --- Shares ------------------------------------------------------------------------------------------------------


class UnrepeatedSampler(DistributedSampler[Any]):
    """Each process's share without padding; sizes may differ by one sample. For prediction, where repeats are wrong."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        size = len(self.dataset)  # type: ignore[arg-type]
        self.num_samples = len(range(self.rank, size, self.num_replicas))
        self.total_size = size

    def __iter__(self) -> Iterator[Any]:
        indices = range(len(self.dataset))  # type: ignore[arg-type]
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class ShardedSampler(Sampler[Any]):
    """Each process's share of what another sampler yields; every process draws the same samples."""

    def __init__(self, sampler: Any, num_shards: int, shard: int) -> None:
        self.sampler, self.num_shards, self.shard = sampler, num_shards, shard
        self.epoch, self.seed = 0, sampler_seed()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.num_shards)

    def __iter__(self) -> Iterator[Any]:
        # A sampler that draws from torch's generator must draw the same on every rank.
        with seeded(self.seed + self.epoch):
            stream = list(self.sampler)
        if stream:
            stream += stream[: len(self) * self.num_shards - len(stream)]
        return iter(stream[self.shard :: self.num_shards])


def shard_dataloader(loader: Any, stage: str, mesh: Mesh) -> Any:
    """Return `loader` restricted to this process's share of the data.

    A map-style DataLoader gets a `DistributedSampler` (training: shuffled if the loader shuffles; validation and test:
    in order unless the loader shuffles; prediction: without padding). A sampler of your own has its index stream split;
    a batch sampler of your own, its batches. Left alone: an iterable data set, a loader whose sampler is already
    distributed, anything that is not a DataLoader.
    """
    if mesh.num_data_shards == 1 or not isinstance(loader, DataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler | ShardedSampler):
        return loader
    if loader.batch_size is None and loader.batch_sampler is None:
        return replace_in_loader(loader, sampler=_share(loader, loader.sampler, stage, mesh), batch_sampler=None)
    batches = type(loader.batch_sampler)
    # torchdata's loaders have samplers of their own under the same names.
    if not (issubclass(batches, BatchSampler) and batches.__name__ == BatchSampler.__name__):
        return replace_in_loader(loader, batch_sampler=ShardedSampler(loader.batch_sampler, *_place(mesh)))
    # A batch sampler that was given has the sampler; the loader's own is then only a default.
    made: Any = loader.batch_sampler
    sampler = _share(loader, made.sampler, stage, mesh)
    return replace_in_loader(loader, sampler=sampler, batch_sampler=batches(sampler, made.batch_size, made.drop_last))


def _place(mesh: Mesh) -> tuple[int, int]:
    return mesh.num_data_shards, mesh.data_shard


def _share(loader: DataLoader[Any], sampler: Any, stage: str, mesh: Mesh) -> Sampler[Any]:
    shards, shard = _place(mesh)
    shuffles = _shuffles(sampler)
    if not shuffles and type(sampler) is not SequentialSampler:
        return ShardedSampler(sampler, shards, shard)
    if stage == "predict" and not shuffles:
        return UnrepeatedSampler(loader.dataset, shards, shard, shuffle=False)
    size = len(loader.dataset)  # type: ignore[arg-type]
    if stage in ("validate", "test") and size % shards and shard == 0:
        warnings.warn(
            f"{size} samples do not divide by {shards} processes: {stage} sees {-size % shards} of them twice. "
            "Results are exact with a data set that divides, or on one device.",
            stacklevel=2,
        )
    return DistributedSampler(loader.dataset, shards, shard, shuffle=shuffles, seed=sampler_seed())


def _shuffles(sampler: Any) -> bool:
    """Whether `sampler` is what ``shuffle=True`` makes."""
    is_random = type(sampler).__name__ == RandomSampler.__name__ and hasattr(sampler, "data_source")
    return bool(is_random and not sampler.replacement and sampler._num_samples is None)


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


def sampler_seeds(loader: Any) -> list[int]:
    """Return the seeds that the samplers of `loader` shuffle with for several processes."""
    return [sampler.seed for sampler in _seeded_samplers(loader)]


def restore_sampler_seeds(loader: Any, seeds: Iterable[int]) -> None:
    """Let the samplers of `loader` shuffle with `seeds`, which `sampler_seeds` returned for a loader of that kind."""
    for sampler, seed in zip(_seeded_samplers(loader), seeds, strict=False):
        sampler.seed = seed


def in_order_of_several(loader: Any, seed: int) -> Any:
    """Return `loader`, which shuffles in one process, in the order in which several processes shared it."""
    if not (isinstance(loader, DataLoader) and loader.batch_size is not None and _shuffles(loader.sampler)):
        return loader
    sampler: Any = DistributedSampler(loader.dataset, 1, 0, shuffle=True, seed=seed)
    batches = type(loader.batch_sampler)(sampler, loader.batch_size, loader.drop_last)  # type: ignore[call-arg,misc]
    return replace_in_loader(loader, sampler=sampler, batch_sampler=batches)


def _seeded_samplers(loader: Any) -> list[Any]:
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
        loader.worker_init_fn = functools.partial(seed_worker, rank=rank)


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
