"""The order of batches: limits, streams without a length, and the rest of an epoch that is resumed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_trainer.batches import ResumableBatches, agreed_size, length
from stratagem_trainer.progress import Position


class Normalized(torch.nn.Module):
    """A module with a small and a large buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.zeros(2))
        self.register_buffer("large", torch.zeros(1 << 17))


class Stream(IterableDataset):
    """Draws a random number for each item; of unknown length."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        for number in range(self.size):
            yield torch.tensor([float(number), torch.rand(1).item()])


class Liar:
    """Yields fewer batches than its length says."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([1, 2])


@pytest.fixture(scope="module")
def run():
    with sg.Run(accelerator="cpu", environment="local") as run:
        yield run


@pytest.fixture
def batches(run):
    def make(loader, limit=math.inf, module=None):
        return ResumableBatches(loader, min(limit, length(loader)), run, module or Normalized())

    return make


def shuffled(size=12, batch_size=2, **options):
    return DataLoader(TensorDataset(torch.arange(size)), batch_size, shuffle=True, **options)


def values(batch):
    """Return what a batch of any loader here holds, as plain numbers."""
    return torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist()


def train(feed, position, count=None, accumulate=1):
    """Use batches of an epoch as the training loop does, each with a random number of the model's; return both."""
    seen, epoch = [], feed.epoch(position, accumulate)
    for batch_idx, batch, is_last, _ in itertools.islice(epoch, count):
        seen.append((values(batch), torch.rand(1).item()))
        position.batches_done, position.epoch_done = batch_idx + 1, is_last
        if is_last or (batch_idx + 1) % accumulate == 0:
            feed.close_window()
    return seen


# --- An epoch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [[10, 20, 30], DataLoader(Stream(3), batch_size=None)], ids=["list", "stream"])
@pytest.mark.parametrize(("limit", "count"), [(math.inf, 3), (2, 2), (3, 3), (5, 3)])
def test_the_last_batch_is_marked(batches, loader, limit, count):
    epoch = list(batches(loader, limit).epoch(Position(), 1))

    assert [batch_idx for batch_idx, *_ in epoch] == list(range(count))
    assert [is_last for _, _, is_last, _ in epoch] == [False] * (count - 1) + [True]


@pytest.mark.parametrize("loader", [list(range(8)), DataLoader(Stream(8), batch_size=None)], ids=["list", "stream"])
@pytest.mark.parametrize(
    ("accumulate", "limit", "sizes"),
    [(3, math.inf, [3] * 6 + [2] * 2), (7, math.inf, [7] * 7 + [1]), (4, math.inf, [4] * 8), (3, 4, [3] * 3 + [1])],
)
def test_the_last_window_has_the_batches_that_are_left(batches, loader, accumulate, limit, sizes):
    limit = limit if isinstance(loader, DataLoader) else min(limit, 8)

    assert [size for *_, size in batches(loader, limit).epoch(Position(), accumulate)] == sizes


def test_an_empty_stream_yields_nothing(batches):
    assert list(batches(DataLoader(Stream(0))).epoch(Position(), 1)) == []


def test_a_loader_that_ends_before_its_length_is_an_error(batches):
    with pytest.raises(ConfigError, match="has length 3 and yielded 2 batches; expected as many as its length says"):
        list(batches(Liar()).epoch(Position(), 1))


def test_each_epoch_has_another_order(batches):
    torch.manual_seed(3)
    feed = batches(shuffled())
    first, second = (train(feed, Position(epoch=epoch)) for epoch in (0, 1))

    assert first != second
    assert sorted(itertools.chain.from_iterable(numbers for numbers, _ in first)) == list(range(12))


def test_length_is_infinite_if_a_loader_does_not_tell():
    assert length([1, 2]) == 2
    assert length(iter([1, 2])) == math.inf
    assert length(DataLoader(Stream(3))) == math.inf


def test_one_process_uses_its_own_number_of_batches(run):
    assert agreed_size(7, run, "training") == 7
    assert agreed_size(math.inf, run, "training") == math.inf


# --- Resuming within an epoch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        shuffled,
        lambda: DataLoader(Stream(6), batch_size=None),
        lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    ],
    ids=["shuffled", "stream", "generator"],
)
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 2, 3, 4, 5])
def test_the_rest_of_an_epoch_is_the_same(batches, make, done, accumulate):
    torch.manual_seed(1)
    feed, position = batches(make()), Position()
    expected = train(feed, position, accumulate=accumulate)

    torch.manual_seed(1)
    feed, position = batches(make()), Position()
    seen = train(feed, position, done, accumulate)
    saved, now, loop = feed.state_dict(position), feed.random_state(), position.state_dict()

    torch.manual_seed(99)  # as a new process
    resumed, again = batches(make()), Position()
    again.load_state_dict(loop)
    again.epoch_random_state = position.epoch_random_state
    resumed.resume(saved, now, again)
    resumed.start(again)

    of_closed_windows = seen[: done - done % accumulate]
    assert of_closed_windows + train(resumed, again, accumulate=accumulate) == expected
    assert again.epoch_done


@pytest.mark.parametrize("position", [Position(), Position(batches_done=3, epoch_done=True)], ids=["before", "after"])
def test_outside_an_epoch_there_is_nothing_to_save(batches, position):
    assert batches(shuffled()).state_dict(position) == {}


# --- Accumulation windows ----------------------------------------------------------------------------------------


def open_window(batches, module, done):
    """Use `done` batches of an epoch in windows of 4; return what a checkpoint holds."""
    torch.manual_seed(2)
    feed, position = batches(shuffled(24), module=module), Position()
    seen = []
    for batch_idx, batch, *_ in itertools.islice(feed.epoch(position, 4), done):
        seen.append(values(batch))
        module.small += 1
        position.batches_done = batch_idx + 1
        if (batch_idx + 1) % 4 == 0:
            feed.close_window()
    return feed, position, seen


def test_an_open_window_begins_again_with_its_buffers(batches):
    module = Normalized()
    feed, position, seen = open_window(batches, module, 6)
    saved, now = feed.state_dict(position), feed.random_state()

    assert feed.window_is_open
    assert saved["window"]["start"] == 4
    assert saved["window"]["buffers"]["small"].tolist() == [4, 4]
    assert saved["accumulate"] == 4

    resumed = batches(shuffled(24), module=module)
    resumed.resume(saved, now, position)
    resumed.start(position)
    again = [(batch_idx, values(batch)) for batch_idx, batch, *_ in itertools.islice(resumed.epoch(position, 4), 2)]

    assert again == [(4, seen[4]), (5, seen[5])]
    assert resumed.replay_until == 6
    assert module.small.tolist() == [4, 4]


def test_after_the_window_the_random_state_is_that_of_the_checkpoint(batches):
    module = Normalized()
    feed, position, _ = open_window(batches, module, 6)
    saved, now = feed.state_dict(position), feed.random_state()
    expected = torch.rand(1).item()

    torch.manual_seed(99)
    resumed = batches(shuffled(24), module=module)
    resumed.resume(saved, now, position)
    resumed.start(position)
    for batch_idx, *_ in resumed.epoch(position, 4):
        if batch_idx == resumed.replay_until:
            break

    assert torch.rand(1).item() == expected


def test_a_window_of_another_length_is_not_replayed(batches):
    feed, position, _ = open_window(batches, Normalized(), 6)
    resumed = batches(shuffled(24))
    resumed.resume(feed.state_dict(position), feed.random_state(), position)
    resumed.start(position)
    first = next(resumed.epoch(position, 2))[0]

    assert first == 4
    assert position.batches_done == 4
    assert resumed.replay_until == 0


def test_a_closed_window_is_not_saved(batches):
    feed, position, _ = open_window(batches, Normalized(), 4)

    assert not feed.window_is_open
    assert "window" not in feed.state_dict(position)
