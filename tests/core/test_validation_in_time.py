"""A val_check_interval in time: all ranks validate after the same batches."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
BATCHES = joined_batches(12, 4)
HOUR = timedelta(hours=1)


class Timed(Net):
    """Records after which step it validates; time passes by hand, in `batch_s` for each batch."""

    def __init__(self, batch_s):
        super().__init__()
        self.batch_s, self.steps = batch_s, []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        time.monotonic.passed += self.batch_s

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.steps.append(self.trainer.global_step)
            time.monotonic.passed += 1000  # a validation takes longer than the interval


class Clock:
    passed = 0.0

    def __call__(self):
        return self.passed


def validated(interval, batch_s, batches=BATCHES, **arguments):
    before, time.monotonic = time.monotonic, Clock()
    try:
        model = Timed(batch_s)
        options = {"max_epochs": 2, "val_check_interval": interval, "checks": None} | QUIET | arguments
        sg.Trainer(**options).fit(model, batches, batches[:1])
    finally:
        time.monotonic = before
    return model.steps


@pytest.mark.parametrize("interval", [timedelta(seconds=50), {"seconds": 50}, "00:00:00:50"])
def test_it_validates_whenever_the_time_has_passed(interval):
    assert validated(interval, batch_s=10) == [5, 10, 15, 20]
    assert validated(interval, batch_s=1) == []


def test_only_in_epochs_that_are_to_be_validated():
    assert validated("00:00:00:50", batch_s=10, check_val_every_n_epoch=2) == [13, 18, 23]


def test_a_fast_dev_run_validates():
    assert validated(HOUR, batch_s=0, fast_dev_run=True) == [1]


def on_ranks(rank, world_size):
    """Only on rank 1 does time pass."""
    return validated("00:00:00:50", 10 * rank, part(BATCHES, rank, world_size), devices=world_size, strategy="ddp")


@pytest.mark.slow
def test_all_ranks_validate_together_one_batch_later():
    assert run_in_processes(on_ranks, 2) == [[6, 12, 18, 24]] * 2


def test_other_text_is_refused():
    with pytest.raises(ConfigError, match="val_check_interval is 'hourly'; expected seconds"):
        sg.Trainer(val_check_interval="hourly", **QUIET)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("3", 3), ("00:00:10:00", "00:00:10:00")])
def test_the_environment_sets_it(monkeypatch, text, value):
    monkeypatch.setenv("STRATAGEM_TRAINER_VAL_CHECK_INTERVAL", text)

    assert sg.Trainer(**QUIET).settings.val_check_interval == value
