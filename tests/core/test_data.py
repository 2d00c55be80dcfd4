"""Each process reads its own share of a loader, by the rules of its kind of sampler."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from attrs import define
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import stratagem as sg
from stratagem.api.batches import move_batch
from stratagem.api.world import Mesh
from stratagem.runtime.data import shard_dataloader
from stratagem_trainer.api.metric_values import infer_batch_size
from stratagem_trainer.loader_samplers import in_order, set_epoch


def shares(loader, stage, world_size=2, epoch=0):
    result = []
    for rank in range(world_size):
        share = shard_dataloader(loader, stage, Mesh(axes={"data": world_size}, rank=rank))
        set_epoch(share, epoch)
        result.append([int(i) for batch in share for i in batch])
    return result


def test_training_shuffles_if_the_loader_does():
    first, second = shares(DataLoader(range(10), 2, shuffle=True), "train")

    assert sorted(first + second) == list(range(10))
    assert first + second != list(range(10))
    assert shares(DataLoader(range(10), 2, shuffle=True), "train", epoch=1) != [first, second]


def test_in_order_otherwise():
    assert shares(DataLoader(range(6), 2), "train") == [[0, 2, 4], [1, 3, 5]]


def test_validation_keeps_the_order_unless_the_loader_shuffles():
    assert shares(DataLoader(range(6), 2), "validate") == [[0, 2, 4], [1, 3, 5]]
    assert shares(DataLoader(range(6), 2, shuffle=True), "validate") != [[0, 2, 4], [1, 3, 5]]


def test_validation_that_pads_says_so():
    with pytest.warns(UserWarning, match="5 samples do not divide by 2 processes: validate sees 1 of them twice"):
        assert shares(DataLoader(range(5), 2), "validate") == [[0, 2, 4], [1, 3, 0]]


def test_prediction_does_not_pad():
    assert shares(DataLoader(range(5), 2), "predict") == [[0, 2, 4], [1, 3]]


def test_a_sampler_of_ones_own_has_its_stream_split():
    class Backwards(Sampler):
        def __len__(self):
            return 6

        def __iter__(self):
            return iter(range(5, -1, -1))

    assert shares(DataLoader(range(6), 2, sampler=Backwards()), "train") == [[5, 3, 1], [4, 2, 0]]


def test_a_random_sampler_of_ones_own_draws_the_same_on_every_rank():
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    torch.manual_seed(1)
    first, _ = shares(DataLoader(range(8), 2, sampler=sampler), "train")
    torch.manual_seed(2)
    again, _ = shares(DataLoader(range(8), 2, sampler=sampler), "train")
    later, _ = shares(DataLoader(range(8), 2, sampler=sampler), "train", epoch=1)

    assert first == again
    assert first != later


def test_a_random_sampler_of_ones_own_leaves_other_generators_alone(monkeypatch):
    """A device's generator that is seeded at each epoch repeats its dropout."""
    seeded, before = [], torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    loader = DataLoader(range(8), 2, sampler=WeightedRandomSampler([1.0] * 8, 8))
    list(shard_dataloader(loader, "train", Mesh(axes={"data": 2})).batch_sampler)

    assert not seeded
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_sampler_of_ones_own_has_its_batches_split():
    class Pairs(BatchSampler):
        pass

    loader = DataLoader(range(8), batch_sampler=Pairs(SequentialSampler(range(8)), 2, False))

    assert shares(loader, "train") == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_is_already_distributed_or_iterable_is_left_alone():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    mesh = Mesh(axes={"data": 2})
    distributed = DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0))
    for loader in (DataLoader(Stream()), distributed, [1, 2], DataLoader(range(4))):
        mesh = Mesh(
            axes={"data": 1 if loader.__class__ is DataLoader and loader.sampler.__class__ is SequentialSampler else 2}
        )
        assert shard_dataloader(loader, "train", mesh) is loader


def test_a_subclass_with_a_signature_of_its_own_is_kept():
    class Odd(DataLoader):
        def __init__(self, size):
            super().__init__(range(size), 2)
            self.extra = "kept"

    loader = Odd(6)
    share = shard_dataloader(loader, "train", Mesh(axes={"data": 2}))

    assert type(share) is Odd
    assert share.extra == "kept"
    assert [int(i) for batch in share for i in batch] == [0, 2, 4]
    assert [int(i) for batch in loader for i in batch] == list(range(6))


def test_workers_and_options_survive():
    share = shard_dataloader(DataLoader(range(6), 2, num_workers=1, drop_last=True), "train", Mesh(axes={"data": 2}))

    assert [int(i) for batch in share for i in batch] == [0, 2]
    assert share.num_workers == 1


def test_replacement_sampling_is_a_sampler_of_ones_own():
    loader = DataLoader(range(6), 2, sampler=RandomSampler(range(6), replacement=True, num_samples=4))

    assert [len(share) for share in shares(loader, "train")] == [2, 2]


def test_in_order_takes_the_shuffling_out():
    assert [int(i) for batch in in_order(DataLoader(range(4), 2, shuffle=True)) for i in batch] == [0, 1, 2, 3]


def test_batches_move_with_their_containers():
    from collections import namedtuple

    pair = namedtuple("pair", "x y")(torch.ones(1), ["text", torch.ones(1)])
    moved = move_batch({"pair": pair, "n": 1}, torch.device("meta"))

    assert moved["pair"].x.device.type == "meta"
    assert moved["pair"].y[1].device.type == "meta"
    assert moved["pair"].y[0] == "text"
    assert type(moved["pair"]).__name__ == "pair"
    assert moved["n"] == 1


def packed():
    return pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)


def test_a_packed_sequence_moves_and_its_lengths_stay_on_the_cpu():
    moved = move_batch([packed(), 1], torch.device("meta"))[0]

    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == moved.sorted_indices.device.type == "meta"
    assert torch.equal(moved.batch_sizes, packed().batch_sizes)


class Encoding(dict):
    """As tokenizers make them: a container that moves itself."""

    def to(self, device):
        self.device = device
        return self


def test_a_container_that_moves_itself_does():
    encoding = Encoding(x=torch.ones(1))
    batch = {"encoding": encoding, "list": [encoding]}
    moved = move_batch(batch, torch.device("meta"))

    assert moved["encoding"] is moved["list"][0] is encoding
    assert encoding.device.type == "meta"


def test_a_dictionary_with_a_default_keeps_it():
    moved = move_batch(defaultdict(list, x=torch.ones(1)), torch.device("meta"))

    assert moved["x"].device.type == "meta"
    assert moved["y"] == []


class Attributes(dict):
    """Keys can be read as attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


def test_attributes_of_a_dictionary_are_moved_with_its_keys():
    moved = move_batch(Attributes(x=torch.ones(1)), torch.device("meta"))

    assert moved.x is moved["x"]
    assert moved.x.device.type == "meta"


def test_a_packed_sequence_has_as_many_samples_as_sequences():
    assert infer_batch_size([packed()]) == 2


def test_a_mesh_knows_positions_on_its_axes():
    mesh = Mesh(axes={"data": 2, "shard": 3, "tensor": 2}, rank=7)

    assert [mesh.position(axis) for axis in ("data", "shard", "tensor", "pipeline")] == [1, 0, 1, 0]
    assert mesh.num_data_shards == 6
    assert mesh.data_shard == 3


@define(eq=False, kw_only=True)
class SecondOfThree(sg.Strategy):
    """The second of three runs that train together."""

    outer = True

    def data_mesh(self, mesh, stage):
        if stage != "train":
            return mesh
        return Mesh(axes={"data": 3 * mesh.num_data_shards}, rank=mesh.num_data_shards + mesh.data_shard)


def test_an_outer_strategy_may_give_a_run_a_part_of_the_data():
    with sg.Run(strategy=[SecondOfThree(), "single_device"], accelerator="cpu") as run:
        training, validation = (
            [int(i) for batch in run.dataloader(DataLoader(range(6), 2), stage) for i in batch]
            for stage in ("train", "validate")
        )

    assert training == [1, 4]
    assert validation == list(range(6))
