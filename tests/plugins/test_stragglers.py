"""stragglers names the rank that makes the others wait, and the phase in which it is slow; otherwise it names nobody."""

import csv
import functools
import random
import re
import time
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.callbacks import Stragglers
from stratagem.errors import ConfigError
from stratagem_callbacks import rank_times
from stratagem_callbacks.rank_times import (
    BACKWARD,
    NEXT_BATCH,
    OPTIMIZER_STEP,
    PHASES,
    TRAINING_STEP,
    DeviceClock,
    stragglers,
    told,
)
from stratagem_evidence import Recorder, read_all
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part

ROOT = Path(__file__).parents[2]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
OWN = [NEXT_BATCH, TRAINING_STEP, BACKWARD, OPTIMIZER_STEP]
UNITS = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}
SMALL_BUCKETS = {"name": "deepspeed_stage_2", "reduce_bucket_size": 100}
TENSOR, PIPELINE = {"name": "parallel", "tensor": 2}, {"name": "parallel", "pipeline": 2}
#: A step of the model takes milliseconds, also where other programs run.
SLOW_S = 0.25
#: What other programs take from one rank is less.
HIGH = {"threshold": 1.0}


class Loader:
    """`batches`, each after `wait` seconds."""

    def __init__(self, batches, wait):
        self.batches, self.wait = batches, wait

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            time.sleep(self.wait())
            yield batch


class Slow(Net):
    """Sleeps in one phase."""

    def __init__(self, phase=None):
        super().__init__()
        self.phase = phase

    def forward(self, x):
        out = super().forward(x)
        if self.phase == "backward" and out.requires_grad:
            out.register_hook(lambda _: time.sleep(SLOW_S))
        return out

    def training_step(self, batch, batch_idx):
        if self.phase == "training_step":
            time.sleep(SLOW_S)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.phase == "optimizer step":
            optimizer.register_step_pre_hook(lambda *_: time.sleep(SLOW_S))
        return optimizer


class Buffers(Slow):
    """`ddp` broadcasts a buffer before each forward."""

    def __init__(self, phase=None):
        super().__init__(phase)
        self.register_buffer("count", torch.zeros(()))


class Normalized(Slow):
    def __init__(self, phase=None):
        super().__init__(phase)
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(super().forward(x))


class ByHand(Slow):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def _fit(rank, world_size, model, strategy, slow_rank, phase, wait=lambda: 0.0, batches=7, **options):
    """Return what was warned of, which phases were compared, and what the bar showed last."""
    callback = Stragglers(every_n_steps=2, **options.pop("stragglers", {}))
    trainer = sg.Trainer(
        **(QUIET | {"max_epochs": 1, "strategy": strategy, "devices": world_size, "callbacks": callback} | options)
    )
    mine = phase if rank == slow_rank else None
    shards = 1 if strategy in (TENSOR, PIPELINE) else world_size
    data = part(joined_batches(batches, 12), rank % shards, shards)
    loader = Loader(data, (lambda: SLOW_S) if mine == "next batch" else wait)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(model(mine), loader)
    said = [str(each.message) for each in found if "is slower than the others" in str(each.message)]
    return said, callback._compared, list(trainer.published.bar), callback.rank_times(), dict(trainer.callback_metrics)


def _is_named(said, rank, phase):
    (sentence,) = said
    return sentence.startswith(f"rank {rank} (host ") and f" is slower than the others: {phase} takes " in sentence


# --- Which rank is named --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "world_size", "slow_rank", "phase"),
    [
        (Slow, 3, 1, "next batch"), (Slow, 2, 1, "training_step"), (Buffers, 3, 2, "backward"),
        (Slow, 2, 0, "optimizer step"), pytest.param(ByHand, 2, 1, "backward", marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_ddp_tells_each_phase(model, world_size, slow_rank, phase):
    (said, compared, bar, (_, rows), metrics), *others = run_in_processes(
        _fit, world_size, model, "ddp", slow_rank, phase
    )

    assert _is_named(said, slow_rank, phase)
    assert compared == OWN
    assert [title for title in bar if title.startswith("slowest")] == [f"slowest: rank {slow_rank}, {phase} +%"]
    assert [row[0] for row in rows] == list(map(str, range(world_size)))
    assert metrics["stragglers/count"] == 1
    assert all(not said for said, *_ in others)  # rank 0 speaks for all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "phase", "compared"),
    [
        ("ddp_sharded", "backward", [NEXT_BATCH, TRAINING_STEP, BACKWARD]),
        ("parallel", "backward", OWN),
        pytest.param(
            "deepspeed_stage_2", "training_step", [NEXT_BATCH, TRAINING_STEP, BACKWARD], marks=pytest.mark.sweep
        ),
        (UNITS, "next batch", [NEXT_BATCH, OPTIMIZER_STEP]),
        pytest.param(SMALL_BUCKETS, "training_step", [NEXT_BATCH, TRAINING_STEP], marks=pytest.mark.sweep),
        pytest.param(TENSOR, "optimizer step", [NEXT_BATCH, OPTIMIZER_STEP], marks=pytest.mark.sweep),
        pytest.param(PIPELINE, "next batch", [NEXT_BATCH, OPTIMIZER_STEP], marks=pytest.mark.sweep),
    ],
    ids=str,
)  # fmt: skip
def test_other_strategies_tell_some_phases(strategy, phase, compared):
    (said, told_here, *_), _ = run_in_processes(_fit, 2, Slow, strategy, 1, phase)

    assert _is_named(said, 1, phase)
    assert told_here == compared


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [TENSOR, *(pytest.param(each, marks=pytest.mark.sweep) for each in (UNITS, SMALL_BUCKETS, PIPELINE))],
    ids=str,
)  # fmt: skip
def test_nobody_is_blamed_for_a_phase_with_collectives(strategy):
    assert all(not said for said, *_ in run_in_processes(_fit_with_slow_backward, 2, strategy))


def _fit_with_slow_backward(rank, world_size, strategy):
    return _fit(rank, world_size, Slow, strategy, 1, "backward", stragglers=HIGH)


class Reader(Slow):
    """Reads what the ranks have written for a post-mortem."""

    notes = ()

    def on_train_end(self):
        self.trainer.run.collectives.barrier()  # a callback of each rank has kept what it says last
        self.notes = [told.note for _, told in sorted(read_all(Recorder.active.folder).items())]


def _read_notes(rank, world_size):
    model = Reader()
    said, *_ = _fit(rank, world_size, lambda phase: model, "ddp", 1, "next batch", batches=9)
    return said, model.notes


@pytest.mark.slow
def test_the_slow_rank_keeps_the_sentence_for_a_post_mortem():
    (said, notes), _ = run_in_processes(_read_notes, 2)

    assert notes[0] == ""
    assert [_in_letters(notes[1])] == [_in_letters(each) for each in said]


def _fit_with_report(rank, world_size, folder):
    callbacks = [Stragglers(every_n_steps=2), "report"]
    options = {"callbacks": callbacks, "logger": "csv", "default_root_dir": folder}
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1, "strategy": "ddp", "devices": world_size} | options))
    model = Slow("training_step" if rank == 1 else None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rank 1 .*is slower")
        trainer.fit(model, part(joined_batches(7, 12), rank, world_size))


def _in_letters(text):
    """Return `text` on one line, without its numbers and its host."""
    return re.sub(r"[\d.,]*\d", "N", re.sub(r"\(host \S+\)", "(host H)", " ".join(text.split())))


@pytest.mark.slow
def test_the_message_of_the_page_is_that_of_a_run():
    section = (ROOT / "docs" / "postmortem.md").read_text().partition("## It is slow")[2].partition("\n## ")[0]
    (shown,) = re.findall(r"(?:^ {4}\S.*\n)+", re.sub(r"```.*?```", "", section, flags=re.DOTALL), re.MULTILINE)
    (said, *_), _ = run_in_processes(_fit, 2, Slow, "ddp", 1, "next batch")

    assert [_in_letters(each) for each in said] == [_in_letters(shown)]


@pytest.mark.slow
def test_loggers_and_the_report_have_the_figures(tmp_path):
    run_in_processes(_fit_with_report, 2, str(tmp_path))

    (log,) = tmp_path.rglob("metrics.csv")
    titles, *rows = list(csv.reader(log.read_text().splitlines()))
    column = titles.index("stragglers/slower_by")
    assert float(rows[-1][column]) > 0.2
    table = (tmp_path / "report.html").read_text().partition("Time of each rank")[2].partition("</table>")[0]
    cells = [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in table.split("<tr>")[1:]]
    assert cells[0][:4] == ["Rank", "Host", "next batch (ms)", "training_step (ms)"]
    assert float(cells[2][3]) > 1e3 * SLOW_S


def _fit_normalized(rank, world_size):
    return _fit(rank, world_size, Normalized, "ddp", 1, "training_step", sync_batchnorm=True, stragglers=HIGH)


@pytest.mark.slow
def test_a_forward_with_collectives_of_its_own_is_left_out():
    (said, compared, *_), _ = run_in_processes(_fit_normalized, 2)

    assert (said, compared) == ([], [NEXT_BATCH, OPTIMIZER_STEP])


def _fit_limited(rank, world_size):
    """Ranks tell each other flags between batches, for which no rank waits."""
    return _fit(rank, world_size, Slow, "ddp", 1, "next batch", max_time=timedelta(hours=1))


@pytest.mark.slow
def test_ranks_do_not_wait_for_flags_that_are_read_late():
    (said, compared, *_), _ = run_in_processes(_fit_limited, 2)

    assert _is_named(said, 1, "next batch")
    assert compared == OWN


def _fit_with_jitter(rank, world_size):
    wait = functools.partial(random.Random(rank).uniform, 0.02, 0.06)
    return _fit(rank, world_size, Slow, "ddp", None, None, wait, stragglers={"threshold": 5.0})


@pytest.mark.slow
def test_an_even_run_with_jitter_blames_nobody():
    (said, compared, bar, *_), *_ = run_in_processes(_fit_with_jitter, 3)

    assert (said, compared) == ([], OWN)
    assert not [title for title in bar if title.startswith("slowest")]


class Once(Slow):
    """Sleeps long in one step."""

    def training_step(self, batch, batch_idx):
        if self.phase == "once" and batch_idx == 3:
            time.sleep(2)
        return super().training_step(batch, batch_idx)


def _fit_once(rank, world_size):
    return _fit(rank, world_size, Once, "ddp", 1, "once", lambda: 0.05, stragglers={"threshold": 5.0})


@pytest.mark.slow
def test_a_single_slow_step_makes_no_straggler():
    (said, *_), *_ = run_in_processes(_fit_once, 2)

    assert said == []


def test_one_process_is_refused():
    with pytest.raises(ConfigError, match="stragglers is chosen and the run has one process"):
        sg.Trainer(max_epochs=1, callbacks="stragglers", **QUIET).fit(Net(), joined_batches(2, 8))


# --- Which numbers are a straggler's ---------------------------------------------------------------------------------


def _row(next_batch=10.0, forward=20.0, backward=40.0, step=5.0, waiting=1.0, rest=1.0):
    return [each / 1e3 for each in (next_batch, forward, backward, step, waiting, rest)]


def test_the_phase_in_which_most_is_lost_is_named():
    found, *others = stragglers([_row(waiting=61), _row(next_batch=70), _row(waiting=61), _row(waiting=61)], OWN, 0.2)

    assert not others
    assert (found.rank, PHASES[found.phase], found.seconds, found.median) == (1, "next batch", 0.07, 0.01)
    assert found.share == pytest.approx(60 / 77)


def test_half_of_the_ranks_may_be_stragglers():
    rows = [_row(waiting=81), _row(backward=120), _row(waiting=81), _row(backward=110, waiting=11)]
    assert [each.rank for each in stragglers(rows, OWN, 0.2)] == [1, 3]


def test_jitter_within_the_threshold_is_none():
    draw = random.Random(0).gauss
    for _ in range(200):
        own = [[draw(each, 0.05 * each) for each in (10.0, 20.0, 40.0, 5.0)] for _ in range(8)]
        longest = max(map(sum, own))
        assert stragglers([_row(*each, waiting=longest - sum(each)) for each in own], OWN, 0.2) == []


def test_what_the_step_hides_is_none():
    """Twice the time for a batch is nothing to a step that takes much longer."""
    rows = [_row(waiting=500), _row(next_batch=20, waiting=490)]
    assert stragglers(rows, OWN, 0.2) == []
    assert stragglers(rows, [NEXT_BATCH], 0.2) == []


class Event:
    """A device's event; `now` is its time in milliseconds."""

    now = 0.0
    waits = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.waits += 1

    def elapsed_time(self, end):
        return end.at - self.at


def test_times_of_a_device_are_read_a_window_later(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    monkeypatch.setattr(rank_times, "_backends", lambda ignored: [])
    clock, taken = DeviceClock(torch.device("cuda")), []
    for lengths in ((10, 20), (30, 40), (50, 60)):
        clock.enter(NEXT_BATCH)
        Event.now += lengths[0]
        clock.enter(TRAINING_STEP)
        Event.now += lengths[1]
        clock.enter(NEXT_BATCH)
        taken.append(clock.take(None))

    assert taken[0] is None
    assert [each[:2] for each in taken[1:]] == [pytest.approx([0.01, 0.02]), pytest.approx([0.03, 0.04])]
    assert Event.waits == 2  # for the last event of a window that is over


def test_a_phase_that_is_unclear_on_one_rank_is_compared_on_none():
    assert told([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]) == [NEXT_BATCH, TRAINING_STEP, BACKWARD]
    assert told([[0.0, 1.0, 0.0, 0.0]]) == [NEXT_BATCH, OPTIMIZER_STEP]
