"""The rest of an epoch that another number of processes continues, or batches of another size: each sample once."""

from __future__ import annotations

import itertools
import re
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stratagem as sg
from stratagem.api.world import Mesh
from stratagem.runtime.data import shard_dataloader
from stratagem_trainer.batches import ResumableBatches
from stratagem_trainer.combined_loader import CombinedLoader, length
from stratagem_trainer.progress import Position

SAMPLES = 48


class Drawn(RandomSampler):
    """A sampler of the user's own, which draws from torch's generator."""


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(SAMPLES))


class Pairs:
    """Batches of the user's own, whose size has no name."""

    def __len__(self):
        return SAMPLES // 2

    def __iter__(self):
        return iter(torch.arange(SAMPLES).view(-1, 2).tolist())


def data(size=SAMPLES):
    return TensorDataset(torch.arange(size))


#: Loaders by batch size, and between which numbers of processes their order is known.
LOADERS = {
    "in order": (lambda size: DataLoader(data(), size), "any"),
    "shuffled": (lambda size: DataLoader(data(), size, shuffle=True), "fewer"),
    "drop_last": (lambda size: DataLoader(data(), size, shuffle=True, drop_last=True), "fewer"),
    "workers": (lambda size: DataLoader(data(), size, num_workers=1, persistent_workers=True), "any"),
    "batch sampler": (lambda size: DataLoader(data(), batch_sampler=BatchSampler(range(SAMPLES), size, False)), "several"),
    "given batches": (
        lambda size: DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), size, False)), "any",
    ),
    "own sampler": (lambda size: DataLoader(data(), size, sampler=Drawn(data())), "several"),
    "own batches": (lambda _: DataLoader(data(), batch_sampler=Pairs()), "several"),
    "stateful": (lambda size: StatefulDataLoader(data(), size), "any"),
    "stream": (lambda size: DataLoader(Stream(), size), "same"),
}  # fmt: skip
#: Processes, batch size and batches that were done; then processes and batch size. Then with accumulation.
LAYOUTS = [
    ((2, 2, 2), (1, 4)), ((1, 4, 2), (2, 2)), ((1, 2, 3), (1, 4)), ((1, 4, 3), (1, 2)), ((2, 2, 3), (4, 2)),
    ((4, 2, 1), (2, 2)), ((2, 4, 3), (3, 2)), ((4, 1, 5), (3, 2)), ((1, 5, 2), (2, 3)), ((1, 2, 1), (2, 4)),
    ((1, 1, 7), (4, 3)),
]  # fmt: skip


def batches(make, size, shards, shard):
    """Return what one of `shards` processes reads."""
    mesh = Mesh(axes={"data": shards}, rank=shard)
    run = SimpleNamespace(mesh=mesh, devices=[], is_global_zero=shard == 0, collectives=sg.api.world.Collectives())
    loader = make(size)
    several = isinstance(loader, CombinedLoader)
    share = lambda each: shard_dataloader(each, "train", mesh)  # noqa: E731
    loader = loader.with_each(share) if several else share(loader)
    return ResumableBatches(loader, length(loader), run, torch.nn.Linear(1, 1))


def use(feed, position, count=None, accumulate=1):
    """Use batches as the training loop does; return their samples."""
    seen = []
    for batch_idx, batch, is_last, _ in itertools.islice(feed.epoch(position, accumulate), count):
        seen += torch.utils._pytree.tree_leaves(batch)[0].flatten().tolist()
        position.batches_done, position.epoch_done = batch_idx + 1, is_last
        if is_last or (batch_idx + 1) % accumulate == 0:
            feed.close_window()
    return seen


def stopped(make, before, accumulate=1, position=None):
    """Return what was seen until the epoch was stopped, and what rank 0 saved."""
    shards, size, done = before
    seen = []
    for shard in reversed(range(shards)):
        torch.manual_seed(1)
        feed, place = batches(make, size, shards, shard), Position()
        part = use(feed, place, done, accumulate)
        window = feed.state_dict(place).get("window", {"start": done})
        seen += part[: window["start"] * size]
    return seen, feed.state_dict(place), place, feed.random_state()


def resumed(make, after, shards_before, state, place, now, accumulate=1, count=None):
    """Return what a run of another layout sees of the epoch, and what rank 0 saves and warns of."""
    shards, size = after
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for shard in reversed(range(shards)):
            torch.manual_seed(99)
            feed, position = batches(make, size, shards, shard), Position()
            position.load_state_dict(place.state_dict())
            if shards == shards_before:
                position.epoch_random_state = place.epoch_random_state
                feed.resume(state, now, position)
            else:
                feed.resume_at_another_size(state, place.epoch_random_state, position, shards_before)
            feed.start(position)
            seen += use(feed, position, count, accumulate)
    return (
        seen,
        " ".join(str(each.message) for each in told),
        (feed.state_dict(position), position, feed.random_state()),
    )


def is_known(order, before, after):
    return {
        "any": True, "same": before == after, "several": before == after or min(before, after) > 1,
        "fewer": before == after or before > 1,
    }[order]  # fmt: skip


def check(seen, rest, told, at_least=SAMPLES):
    counts = Counter(seen + rest)
    twice = sum(count - 1 for count in counts.values())
    said = re.search(r"(\d+|some) samples of the epoch come twice", told)

    assert len(counts) >= at_least
    assert twice == (0 if said is None else twice if said[1] == "some" else int(said[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_each_sample_is_used_once_or_the_run_says_so(name, before, after):
    make, order = LOADERS[name]
    if name == "own batches" and before[1] != after[1]:
        return  # their size is not told
    seen, *saved = stopped(make, before)
    rest, told, _ = resumed(make, after, before[0], *saved)

    if not is_known(order, before[0], after[0]):
        assert "the rest of the epoch comes in another order" in told
    else:
        assert "another order" not in told
        check(seen, rest, told, length(make(after[1])) * after[1] if name == "drop_last" else SAMPLES)


@pytest.mark.parametrize("name", ["in order", "shuffled"])
@pytest.mark.parametrize(
    ("before", "accumulate", "after", "then"),
    [((2, 2, 4), 2, (1, 4), 2), ((2, 2, 5), 2, (1, 2), 4), ((1, 2, 3), 2, (1, 4), 1), ((1, 3, 5), 3, (1, 2), 4)],
)
def test_an_open_window_is_read_again(name, before, accumulate, after, then):
    make, _ = LOADERS[name]
    seen, *saved = stopped(make, before, accumulate)
    rest, told, _ = resumed(make, after, before[0], *saved, accumulate=then)

    check(seen, rest, told)


def test_a_run_that_is_stopped_again_before_its_first_batch_or_after_it():
    make, _ = LOADERS["in order"]
    seen, *saved = stopped(make, (1, 2, 3))
    for count in (0, 1):
        first, _, again = resumed(make, (1, 4), 1, *saved, count=count)
        for after in ((1, 4), (1, 3), (2, 2)):
            rest, told, _ = resumed(make, after, 1, *again)

            check(seen + first, rest, told)


def test_one_process_keeps_the_order_of_several_when_it_is_stopped_again():
    make, _ = LOADERS["shuffled"]
    seen, *saved = stopped(make, (2, 2, 3))
    first, _, again = resumed(make, (1, 2), 2, *saved, count=4)
    rest, told, _ = resumed(make, (1, 2), 1, *again)

    assert not told
    check(seen + first, rest, told)


def test_several_loaders_say_that_samples_may_come_twice():
    make = lambda size: CombinedLoader([DataLoader(data(), size), DataLoader(data(), size)])  # noqa: E731
    _, *saved = stopped(make, (1, 2, 3))
    for after in ((1, 4), (2, 2)):
        _, told, _ = resumed(make, after, 1, *saved)

        assert "the rest of the epoch comes in another order" in told


def test_batches_of_earlier_epochs_are_counted_in_batches_of_this_run():
    make, _ = LOADERS["in order"]
    _, state, place, now = stopped(make, (2, 2, 2))
    place.batches_of_earlier_epochs = 12
    _, _, (_, position, _) = resumed(make, (1, 4), 2, state, place, now, count=1)

    assert position.batches_of_earlier_epochs == 12
