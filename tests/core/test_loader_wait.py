"""A loader that keeps training waiting is named, with its share of the time."""

from __future__ import annotations

import time
import warnings

import pytest
from torch.utils.data import DataLoader

import stratagem as sg
from stratagem.training import loader_wait
from stratagem_testing.reference import Net, joined_batches


class Rows:
    """Samples that take `seconds` to read."""

    def __init__(self, seconds: float) -> None:
        self.rows, self.seconds = [(x, y) for x, y in joined_batches(30, 1)], seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return tuple(part[0] for part in self.rows[index])


class Batches:
    def __init__(self, seconds: float) -> None:
        self.rows = Rows(seconds)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self):
        return (tuple(part[None] for part in self.rows[index]) for index in range(len(self)))


class Working(Net):
    """Computes for longer than a fast loader reads."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def fit(loader) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sg.Trainer(max_epochs=1, accelerator="cpu", barebones=True).fit(Working(), loader)
    return "\n".join(str(each.message) for each in caught if "waiting for the training loader" in str(each.message))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(loader_wait, "_AFTER_S", 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (lambda: DataLoader(Rows(0.05), batch_size=1), "num_workers is 0: set it to 1 or more"),
        (lambda: DataLoader(Rows(0.1), batch_size=1, num_workers=1), "num_workers is 1, and this process may use"),
        (lambda: Batches(0.05), "Batches of a Batches are made while training waits"),
    ],
    ids=["in this process", "in a worker", "own"],
)
def test_a_slow_loader_is_named_once(loader, advice):
    said = fit(loader())

    assert said.count("waiting for the training loader took ") == 1
    assert advice in said


@pytest.mark.slow
def test_a_fast_loader_is_not():
    assert fit(DataLoader(Rows(0.0), batch_size=1)) == ""
    assert fit(DataLoader(Rows(0.002), batch_size=1, num_workers=1)) == ""
