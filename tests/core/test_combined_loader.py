"""Several loaders, read as one: what a batch is, when an epoch ends, and what each loader is treated like."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import stratagem as sg
from stratagem.api.world import Mesh
from stratagem.errors import ConfigError
from stratagem.runtime.data import shard_dataloader
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data
from stratagem_trainer.combined_loader import are_several, one_by_one

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
EXPECTED = {
    "min_size": [(0, 10), (1, 11)],
    "max_size_cycle": [(0, 10), (1, 11), (0, 12), (1, 13), (0, 14)],
    "max_size": [(0, 10), (1, 11), (None, 12), (None, 13), (None, 14)],
    "sequential": [0, 1, 10, 11, 12, 13, 14],
}


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def of_one(items, **options):
    return DataLoader(items, batch_size=None, **options)


@pytest.mark.parametrize("mode", EXPECTED)
@pytest.mark.parametrize("make", [list, lambda items: of_one(list(items)), lambda items: of_one(Stream(items))],
                         ids=["list", "loader", "stream"])  # fmt: skip
def test_each_mode_reads_what_it_says(make, mode):
    loader = sg.CombinedLoader((make(range(2)), make(range(10, 15))), mode)

    assert list(loader) == list(loader) == EXPECTED[mode]


def test_a_batch_has_the_structure_of_the_loaders():
    assert list(sg.CombinedLoader({"a": [0], "b": [1]})) == [{"a": 0, "b": 1}]
    assert list(sg.CombinedLoader([[0], [1]])) == [[0, 1]]
    assert list(sg.CombinedLoader({"a": sg.CombinedLoader([[0], [1, 2]], "sequential"), "b": [5, 6]})) == [
        {"a": 0, "b": 5}, {"a": 1, "b": 6}]  # fmt: skip


def test_weights_are_chances_and_the_draw_depends_on_seed_and_epoch():
    loader = sg.CombinedLoader({"a": [0] * 300, "b": [1] * 700}, "weighted", {"b": 1, "a": 3})
    first, again = list(loader), list(loader)
    loader.set_epoch(1)
    later = list(loader)
    loader.seed = 7

    assert len(loader) == len(first) == 1000
    assert 200 < sum(first) < 300
    assert first == again
    assert len({str(draw) for draw in (first, later, list(loader))}) == 3


def test_weighted_streams_end_when_each_has_ended():
    read = list(sg.CombinedLoader([of_one(Stream(range(3))), of_one(Stream(range(10, 15)))], "weighted", [1, 1]))

    assert set(read) == {0, 1, 2, *range(10, 15)}


def test_passes_of_a_short_loader_have_orders_of_their_own():
    short, long = of_one(range(30), shuffle=True), list(range(90))
    shared = [shard_dataloader(short, "train", Mesh(axes={"data": 2}, rank=rank)) for rank in range(2)]
    passes = []
    for loader in (short, *shared):
        read = [a for a, _ in sg.CombinedLoader([loader, long], "max_size_cycle")]
        passes += [read[start : start + len(loader)] for start in range(0, 60, len(loader))]

    assert all(sorted(each) == list(range(30)) for each in passes[:2])
    assert sorted(passes[2] + passes[6]) == list(range(30))  # what the ranks read together
    assert len({str(each) for each in passes}) == len(passes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], "longest"), "CombinedLoader got mode='longest'; expected one of min_size"),
        (([],), "CombinedLoader got no loaders"),
        (([[1], [2]], "weighted", [1]), "2 loaders and weights=[1]; expected a positive number for each loader"),
        (([[1]], "weighted", [0]), "expected a positive number"),
        (([[1]], "weighted"), "weights=None; expected a positive number"),
        (({"a": [1]}, "weighted", {"b": 1}), "expected a positive number"),
        (([[1]], "min_size", [1]), "and no weights otherwise"),
        (([[1]], "weighted", ["1"]), "expected a positive number"),
        ((torch.utils.data.DataLoader([1, 2]),), "CombinedLoader got a DataLoader; expected a dict, list or tuple"),
        ((iter([[1]]),), "CombinedLoader got a list_iterator"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError) as refused:
        sg.CombinedLoader(*arguments)

    assert message in str(refused.value)


def test_iterators_do_not_disturb_each_other():
    loader = sg.CombinedLoader([[1, 2, 3], [4, 5, 6]], "sequential")
    first = iter(loader)

    assert [next(first), next(first), *loader, *first] == [1, 2, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6]


def test_a_list_of_loaders_and_batches_is_refused():
    with pytest.raises(ConfigError, match="a list of loaders has a list in it; expected a DataLoader"):
        are_several([torch.utils.data.DataLoader([1, 2]), [1, 2]])


def test_a_loader_that_cannot_be_read_twice_is_refused():
    loader = sg.CombinedLoader([(number for number in range(2)), [1, 2, 3]], "max_size_cycle")

    with pytest.raises(ConfigError, match="a generator, was to be read again in an epoch and yielded no batch"):
        list(loader)


def test_the_position_of_other_loaders_is_refused():
    loader = sg.CombinedLoader([[1], [2], [3]])
    next(iter(loader))

    with pytest.raises(ConfigError, match="within an epoch of 3 loaders, and this run has 2"):
        sg.CombinedLoader([[1], [2]]).load_state_dict(loader.state_dict())


def test_a_list_of_loaders_is_several_and_a_list_of_batches_is_one():
    loader = DataLoader(range(2))
    batches = [torch.ones(1), torch.ones(1)]

    assert one_by_one([loader, loader]) == one_by_one({"a": loader, "b": loader}) == [loader, loader]
    assert one_by_one(sg.CombinedLoader({"a": loader}, "sequential")) == [loader]
    assert len(one_by_one(sg.CombinedLoader({"a": loader}))) == len(one_by_one(batches)) == 1
    assert not are_several(batches)


# --- In a trainer ------------------------------------------------------------------------------------------------


class Joint(Net):
    """Trains on batches of two loaders."""

    def training_step(self, batch, batch_idx):
        return sum(super(Joint, self).training_step(part, batch_idx) for part in batch.values())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(start, stop):
    return list(zip(*(part[start:stop] for part in data(64)), strict=True))


def loaders(rank=0, world_size=1, **options):
    sets = rows(0, 16), rows(16, 64)
    shares = [of[rank::world_size] for of in sets]
    return {"a": DataLoader(shares[0], 4, **options), "b": DataLoader(shares[1], 4, **options)}


def reference(world_size):
    """Train as a loop in plain PyTorch does, on the mean of the gradients of all ranks."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    shares = [loaders(rank, world_size) for rank in range(world_size)]
    for steps in zip(*(zip(itertools.cycle(each["a"]), each["b"], strict=False) for each in shares), strict=True):
        optimizer.zero_grad()
        for x, y in itertools.chain(*steps):
            (4 * torch.nn.functional.mse_loss(model.net(x), y) / world_size).backward()
        optimizer.step()
    return model.state_dict()


def _fit(rank, world_size, given, options):
    torch.manual_seed(0)
    model = Joint()
    trainer = sg.Trainer(max_epochs=1, devices=world_size, **QUIET, **options)
    trainer.fit(model, given)
    return trainer.global_step, {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_training_on_a_dict_is_a_loop_over_both():
    steps, weights = _fit(0, 1, loaders(), {})

    assert steps == 12
    for name, expected in reference(1).items():
        torch.testing.assert_close(weights[name], expected)


@pytest.mark.slow
def test_each_rank_trains_on_its_share_of_each():
    expected = reference(2)

    for steps, weights in run_in_processes(_fit, 2, loaders(), {"strategy": "ddp"}):
        assert steps == 6
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name])


class Counting(Net):
    """Remembers the batches that it trained on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return self.net(torch.ones(1, 16)).mean()


def seen(given, **options):
    model = Counting()
    trainer = sg.Trainer(**QUIET | {"max_epochs": 1} | options)
    trainer.fit(model, given)
    return model.seen, trainer


def test_limits_and_intervals_count_combined_batches():
    given = [of_one(range(4)), of_one(range(8))]

    assert len(seen(given, limit_train_batches=0.5)[0]) == 4
    assert len(seen(given, limit_train_batches=3)[0]) == 3
    assert seen(given, val_check_interval=0.25)[1]._state.batches_between_validations == 2
    assert seen(given)[1].train_dataloader.mode == "max_size_cycle"


def test_overfitting_repeats_the_same_batches():
    given = sg.CombinedLoader([DataLoader(range(10), 1, shuffle=True), of_one(range(10, 20))], "weighted", [1, 1])
    batches = [int(batch) for batch in seen(given, overfit_batches=6, max_epochs=3)[0]]

    assert batches[:6] == batches[6:12] == batches[12:]


def _shares(rank, world_size, options):
    sg.seed_everything(1)
    given = {
        "plain": DataLoader(range(40), 2, shuffle=True),
        "own": DataLoader(range(100, 160), 2, sampler=list(range(100))[:60]),
    }
    batches, trainer = seen(given, devices=world_size, strategy="ddp", **options)
    return [{name: part.tolist() for name, part in batch.items()} for batch in batches], [
        type(each.sampler).__name__ for each in trainer.train_dataloader.flattened]  # fmt: skip


@pytest.mark.slow
def test_every_kind_of_sampler_is_shared_unless_that_is_off():
    first, second = run_in_processes(_shares, 2, {})
    whole, _ = run_in_processes(_shares, 2, {"use_distributed_sampler": False})

    together = [number for batches, _ in (first, second) for batch in batches for number in batch["own"]]
    assert sorted(together) == list(range(100, 160))
    plain = [number for batches, _ in (first, second) for batch in batches[:10] for number in batch["plain"]]
    assert sorted(plain) == list(range(40))
    assert first[1] == [DistributedSampler.__name__, "ShardedSampler"]
    assert len(whole[0]) == 30
    assert whole[1] == ["RandomSampler", "list"]


def _uneven(rank, world_size):
    given = sg.CombinedLoader([[torch.ones(1)] * (3 + rank), [torch.ones(1)] * 2], "max_size_cycle")
    return len(seen(given, devices=world_size, strategy="ddp")[0])


@pytest.mark.slow
def test_an_epoch_ends_for_all_ranks_when_it_ends_for_one():
    assert run_in_processes(_uneven, 2) == [3, 3]


def _drawn(rank, world_size):
    sg.seed_everything(5)
    torch.manual_seed(rank)
    given = sg.CombinedLoader([of_one(range(40)), of_one(range(100, 140))], "weighted", [1, 2])
    return [batch >= 100 for batch in seen(given, devices=world_size, strategy="ddp")[0]]


@pytest.mark.slow
def test_all_ranks_draw_the_same_loader():
    first, second = run_in_processes(_drawn, 2)

    assert first == second
    assert len(set(first)) == 2


def test_persistent_workers_end_with_the_fit():
    given = {name: of_one(range(4), num_workers=1, persistent_workers=True) for name in "ab"}
    seen(given, max_epochs=2)

    assert all(loader._iterator is None for loader in given.values())


def test_an_epoch_that_is_left_ends_its_workers():
    import multiprocessing

    before = set(multiprocessing.active_children())
    seen({name: of_one(range(40), num_workers=1) for name in "ab"}, max_steps=2)

    assert set(multiprocessing.active_children()) == before


class Evaluating(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((batch, dataloader_idx))

    test_step = predict_step = validation_step


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_reads_one_by_one_unless_they_are_combined(stage):
    trainer, given = sg.Trainer(**QUIET), {"a": of_one(range(2)), "b": of_one(range(5, 7))}
    for loaders_, expected in [
        (given, [(0, 0), (1, 0), (5, 1), (6, 1)]),
        (sg.CombinedLoader(given, "sequential"), [(0, 0), (1, 0), (5, 1), (6, 1)]),
        (sg.CombinedLoader(given), [({"a": 0, "b": 5}, 0), ({"a": 1, "b": 6}, 0)]),
    ]:
        model = Evaluating()
        getattr(trainer, stage)(model, loaders_)
        assert model.seen == expected
