"""A loader that keeps training waiting is named, with its share of the time."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer import loader_wait
from stratagem_trainer.loader_wait import LoaderWait


@pytest.fixture
def said(monkeypatch):
    """Return what is said of a loader if each of 100 batches takes some seconds to read, and some to train."""

    def count(loader, reading, training):
        now, wait = 0.0, LoaderWait(warns=True)
        monkeypatch.setattr(loader_wait.time, "perf_counter", lambda: now)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(100):
                began, now = now, now + reading
                wait.add(began, loader)
                now += training
        return [str(each.message) for each in caught]

    return count


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (DataLoader([0]), "num_workers is 0: set it to 1 or more"),
        (DataLoader([0], num_workers=1), "num_workers is 1, and this process may use"),
        ([0], "Batches of a list are made while training waits"),
    ],
    ids=["in this process", "in a worker", "own"],
)
def test_a_slow_loader_is_named_once(said, loader, advice):
    (text,) = said(loader, reading=0.3, training=0.1)

    assert text.startswith("waiting for the training loader took 75% of the first 10 s (300.0 ms for each batch)")
    assert advice in text


def test_a_fast_loader_is_not_named(said):
    assert said(DataLoader([0]), reading=0.1, training=0.3) == []


def test_a_short_training_says_nothing(said):
    assert said(DataLoader([0]), reading=0.05, training=0.01) == []


def test_training_counts_what_it_waits(monkeypatch):
    monkeypatch.setattr(loader_wait, "_AFTER_S", 0.0)
    monkeypatch.setattr(loader_wait, "_TOO_MUCH", 0.0)
    with pytest.warns(UserWarning, match="waiting for the training loader took"):
        sg.Trainer(max_epochs=1, accelerator="cpu", barebones=True).fit(Net(), joined_batches(30, 1))
