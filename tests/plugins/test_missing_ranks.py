"""A collective that some ranks leave out, or in which they differ, ends in bounded time with the names of both."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import textwrap
import time

import pytest
import torch

import stratagem as sg
from programs import scripts
from stratagem.api.world import Collectives
from stratagem.runtime.launching import run_main
from stratagem_peer_diagnosis import failure_reports
from stratagem_testing import run_in_processes
from stratagem_testing.machine import _processes_with
from stratagem_testing.reference import Net, joined_batches, part
from stratagem_testing.training import outcome

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: What a rank may take beyond the timeout.
GRACE_S = 60


def _ddp(timeout_s):
    return {"name": "ddp", "timeout": timeout_s}


def _outcome(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- A rank that does not come -----------------------------------------------------------------------------------

ONES = torch.ones(4)
#: Every method of `Collectives` that waits for other ranks.
CALLS = {
    "all_reduce": lambda c: c.all_reduce(ONES),
    "average_async": lambda c: c.average_async(ONES.clone()).wait(),
    "all_gather": lambda c: c.all_gather(ONES),
    "all_gather_async": lambda c: c.all_gather_async(ONES).wait(),
    "all_to_all_async": lambda c: c.all_to_all_async(ONES).wait(),
    "send_recv": lambda c: c.send_recv(ONES, 1, 1),
    "split": lambda c: c.split([[0], [1]]),
    "broadcast": lambda c: c.broadcast(ONES.clone()),
    "replicate": lambda c: c.replicate([ONES.clone(), ONES.clone()]),
    "broadcast_object": lambda c: c.broadcast_object("x"),
    "all_gather_object": lambda c: c.all_gather_object("x"),
    "barrier": lambda c: c.barrier(),
    "any": lambda c: c.any(False),
    "fail_together": lambda c: c.fail_together(None),
    "barrier_with_timeout": lambda c: c.barrier_with_timeout("barrier()", 60),
    "duplicate": lambda c: c.duplicate("x"),
    "new_group": lambda c: c.new_group(),
}
#: Calls of `Run` that wait for other ranks.
RUN_CALLS = {
    "run.save": lambda run: run.save("x.ckpt", model=torch.nn.Linear(1, 1)),
    "run.load": lambda run: run.load("x.ckpt", model=torch.nn.Linear(1, 1)),
    "run.clip_gradients": lambda run: run.clip_gradients(run.optimizers[0], max_norm=1.0),
    "run.setup": lambda run: run.setup(torch.nn.Linear(2, 2)),
    "filler": lambda run: run.materializer(torch.nn.Linear(2, 2)),
}


def test_every_method_is_listed():
    alone = {"key_value_store", "close", "values"}
    methods = {name for name, _ in inspect.getmembers(Collectives, inspect.isfunction) if not name.startswith("_")}

    assert methods == set(CALLS) | alone


def _leave_out(rank, world_size, names):
    failure_reports.REPORT_S = 0.1  # it is waited for in every case
    said = {}
    for name in names:
        clips = name == "run.clip_gradients"
        strategy = {"name": "ddp_sharded", "timeout": 4} if clips else _ddp(1)
        run = sg.Run(strategy=strategy, devices=world_size, accelerator="cpu")
        run.connect()
        if clips:
            model = torch.nn.Linear(2, 2)
            _, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))
            run.optimizers = [optimizer]
        board = run.collectives.key_value_store()
        if rank == 1:
            _elsewhere(board)
        else:
            act = RUN_CALLS.get(name) or (lambda run, call=CALLS[name]: call(run.collectives))
            begun = time.monotonic()
            call = functools.partial(run_main, run, functools.partial(_with, act, run))
            said[name] = _outcome(call), time.monotonic() - begun
            board.put("told", "")
        run.close()
    return said


def _with(act, run, _context):
    return act(run)


def _elsewhere(board):
    while board.get("told") is None:
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(CALLS)[:8], list(CALLS)[8:], list(RUN_CALLS)], ids=lambda names: names[0])
def test_a_rank_that_leaves_out_a_collective_is_named(names):
    said, _ = run_in_processes(_leave_out, 2, names, limit_s=540)

    for name, (sentence, took_s) in said.items():
        assert took_s < 4 + GRACE_S, name
        if name == "barrier_with_timeout":
            assert sentence.startswith(
                "ConfigError: barrier() was called on rank 0 and on 1 of 2 ranks, not on rank 1;"
            )
            continue
        # What Python code of torch sends was recorded; small messages of the run, and what C++ sends, were not.
        beginnings = ("PeerError: rank 0 has heard nothing from rank 1 (", "PeerError: rank 1 did not call ")
        assert sentence.startswith(beginnings), (name, sentence)
        assert "rank 1 is in test_missing_ranks.py:" in sentence, (name, sentence)
        assert "(_elsewhere)" in sentence
        if name in CALLS and not name.endswith("_async"):
            assert f" in {name}() (test_missing_ranks.py:" in sentence, sentence


# --- Ranks that make different calls -----------------------------------------------------------------------------

DIFFERENT = {
    "all_reduce() (": lambda c: c.all_reduce(ONES),
    "any() (": lambda c: c.any(True),
    "barrier() (": lambda c: c.barrier(),
    "broadcast() (": lambda c: c.broadcast(ONES.clone()),
    "all_gather() (": lambda c: c.all_gather(ONES),
    "all_gather_object() (": lambda c: c.all_gather_object(None),
    "broadcast_object() (": lambda c: c.broadcast_object(1),
    "fail_together() (": lambda c: c.fail_together(None),
    "torch.float64": lambda c: c.all_reduce(ONES.double()),
    "torch.Size([5])": lambda c: c.all_reduce(torch.ones(5)),
    "'max'": lambda c: c.all_reduce(ONES, "max"),
}


def _call_differently(rank, world_size):
    said = {}
    with sg.Run(strategy=_ddp(20), devices=world_size, accelerator="cpu") as run:
        for first in DIFFERENT:
            for second in DIFFERENT:
                call = DIFFERENT[second if rank else first]
                said[first, second] = _outcome(lambda call=call: call(run.collectives))
        said["sum"] = float(run.collectives.all_reduce(torch.tensor(rank + 1.0), "sum"))
    return said


@pytest.mark.slow
def test_different_calls_are_refused_on_all_ranks_and_never_mix():
    reductions = {"all_reduce() (", "torch.float64", "torch.Size([5])", "'max'"}
    for said in run_in_processes(_call_differently, 2):
        assert said.pop("sum") == 3.0  # the ranks are still in step
        for (first, second), sentence in said.items():
            if first == second or {first, second} == {"all_gather_object() (", "fail_together() ("}:
                assert sentence == "nothing"
                continue
            assert sentence.startswith("ConfigError: rank 0 is in "), (first, second, sentence)
            assert "expected all ranks to make the same call" in sentence
            for call in {first, second} - {"torch.float64", "torch.Size([5])", "'max'"}:
                assert call in sentence, (first, second, sentence)
            for argument in {first, second} - {"all_reduce() ("} if {first, second} <= reductions else ():
                assert argument.replace("torch.Size([5])", "(5,)") in sentence, (first, second, sentence)


def _send_what_cannot_be_pickled(rank, world_size):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        unpicklable = lambda: None  # noqa: E731 - that is the point
        gathered = outcome(lambda: run.collectives.all_gather_object(unpicklable if rank == 1 else 0))
        return gathered, outcome(lambda: run.collectives.broadcast_object(unpicklable if rank == 0 else 0))


def test_an_object_that_cannot_be_sent_is_refused_on_all_ranks():
    for gathered, broadcast in run_in_processes(_send_what_cannot_be_pickled, 2):
        assert "rank 1 sends an object that cannot be pickled (function, " in gathered
        assert "rank 0 sends an object that cannot be pickled (function, " in broadcast


# --- Metrics -----------------------------------------------------------------------------------------------------


class Logs(Net):
    """Logs what `logged` says: (rank, batch) to a list of (name, value, options)."""

    def __init__(self, logged, stage="train"):
        super().__init__()
        self.logged, self.stage = logged, stage

    def _log(self, stage, batch_idx):
        if stage == self.stage:
            for name, value, options in self.logged(self.global_rank, batch_idx):
                self.log(name, value, **{"sync_dist": True, "on_step": True, "on_epoch": False, **options})

    def training_step(self, batch, batch_idx):
        self._log("train", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._log("validate", batch_idx)


def _log(rank, world_size, logged, stage="train", timeout_s=6, batches=3):
    trainer = sg.Trainer(max_epochs=1, strategy=_ddp(timeout_s), devices=world_size, **QUIET)
    model, data = Logs(logged, stage), part(joined_batches(batches, 8), rank, world_size)
    begun = time.monotonic()
    said = _outcome(lambda: trainer.fit(model, data) if stage == "train" else trainer.validate(model, data))
    return said, time.monotonic() - begun, dict(trainer.callback_metrics)


def test_different_names_on_a_step_are_refused_on_both_ranks():
    for said, _, _ in run_in_processes(_log, 2, lambda rank, _: [("cat" if rank else "dog", 1.0, {})], "train", 60):
        assert "ConfigError: rank 1 and rank 0 logged different metrics with sync_dist=True (cat, dog)" in said


def test_a_name_logged_in_different_batches_is_refused_on_both_ranks():
    """Each logs it once; the gradients of a window are accumulated, so nothing holds up a rank in between."""

    def act(rank, world_size):
        trainer = sg.Trainer(max_epochs=1, accumulate_grad_batches=3, strategy=_ddp(60), devices=world_size, **QUIET)
        model = Logs(lambda rank, batch_idx: [("x", 1.0, {})] if batch_idx == rank else [])
        return _outcome(lambda: trainer.fit(model, part(joined_batches(3, 8), rank, world_size)))

    for said in run_in_processes(act, 2):
        assert said.startswith(
            "ConfigError: log('x') was called with sync_dist=True in batch 1 on rank 1 and 0 on rank 0"
        )


def test_different_reductions_are_refused_on_both_ranks():
    options = [{"reduce_fx": "sum"}, {"reduce_fx": "max"}]
    for said, _, _ in run_in_processes(_log, 2, lambda rank, _: [("x", 1.0, options[rank])], "train", 60):
        assert said.startswith("ConfigError: log('x') was called with reduce_fx='max' on rank 1 and 'sum' on rank 0")


@pytest.mark.every_push("0-0-train")
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["train", "validate"])
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("logs", [0, 1])
def test_a_metric_that_one_rank_does_not_log_is_named(stage, batch, logs):
    def logged(rank, batch_idx):
        both = [("y", 1.0, {})] if batch else []  # the group is there already
        return both + ([("x", 1.0, {})] if rank == logs and batch_idx >= batch else [])

    results = run_in_processes(_log, 2, logged, stage, limit_s=180)

    for said, took_s, _ in results:
        assert took_s < 6 + GRACE_S  # two batches before it
        assert said.startswith(("ConfigError: ", "PeerError: "))
        assert "x" in said.split("sync_dist=True")[0] or "(x)" in said
        assert "rank 0" in said
        assert "rank 1" in said


VALUES = {
    "mean": (torch.tensor(0.1), torch.tensor(0.4)), "sum": (torch.tensor(3), torch.tensor(4)),
    "max": (2.5, -1.0), "min": (torch.tensor([2.5]), torch.tensor([-1.0])),
}  # fmt: skip
EXPECTED = {"mean": 0.25, "sum": 7.0, "max": 2.5, "min": -1.0}


def test_values_of_a_step_are_reduced_exactly_however_many_there_are():
    def logged(rank, _):
        few = [(f"{op}", pair[rank], {"reduce_fx": op}) for op, pair in VALUES.items()]
        many = [(f"{number}", float(number + rank), {"reduce_fx": "sum"}) for number in range(100)]
        return (few + many)[:: 1 if rank else -1]  # in any order

    for said, _, metrics in run_in_processes(_log, 2, logged, "train", 60):
        assert said == "nothing"
        assert {name: float(metrics[name]) for name in EXPECTED} == pytest.approx(EXPECTED, rel=1e-7)
        assert [float(metrics[f"{number}"]) for number in range(100)] == [2.0 * n + 1 for n in range(100)]


# --- Whole programs ----------------------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    class Odd(Net):
        def training_step(self, batch, batch_idx):
            if sys.argv[1] == "log" and self.global_rank == 0:
                self.log("x", 1.0, sync_dist=True)
            if sys.argv[1] == "collective" and self.global_rank == 1:
                self.trainer.run.collectives.barrier()
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            if sys.argv[1] == "save" and self.global_rank == 0:
                self.trainer.save_checkpoint("x.ckpt")

    if __name__ == "__main__":
        strategy = {"name": "ddp_fork", "timeout": 10}
        trainer = sg.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, barebones=True)
        trainer.fit(Odd(), joined_batches(4, 8))
"""


@pytest.mark.every_push("log-did not call log('x', sync_dist=True)")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("log", "did not call log('x', sync_dist=True)"),
        ("collective", " in barrier() (program.py:"),
        ("save", "save_checkpoint was called on rank 0 and on 1 of 2 ranks, not on rank 1"),
    ],
)
def test_a_program_ends_with_the_name_and_leaves_no_process(tmp_path, what, sentence):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    done = scripts.run(
        [sys.executable, str(path), what], capture_output=True, text=True, timeout=270, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert done.returncode == 1
    assert sentence in done.stderr
    assert "terminate called" not in done.stderr
    assert not _processes_with(str(tmp_path))
