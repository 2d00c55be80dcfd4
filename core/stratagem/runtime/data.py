"""The share that each process has of a loader."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
from stratagem.api.seeding import sampler_seed, seeded

if TYPE_CHECKING:
    from stratagem.api.world import Mesh


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
    shuffles = shuffles_all(sampler)
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


def shuffles_all(sampler: Any) -> bool:
    """Whether `sampler` is what ``shuffle=True`` makes."""
    is_random = type(sampler).__name__ == RandomSampler.__name__ and hasattr(sampler, "data_source")
    return bool(is_random and not sampler.replacement and sampler._num_samples is None)
