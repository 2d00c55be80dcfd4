"""A rank that waits where nothing raises, as for a GPU, is told and ended when another one is gone."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading

import pytest

import stratagem as sg
from stratagem.errors import PeerError
from stratagem.neighbours import explained
from stratagem.testing import run_in_processes
from stratagem.watchdog import Watchdog
from stratagem.world import TorchCollectives


def _run(world_size):
    return sg.Run(strategy={"name": "ddp", "timeout": 60}, devices=world_size, accelerator="cpu")


def _child_of(rank, world_size, folder):
    """Let a child take this rank's place: rank 1's is killed, the others wait in a call that never raises."""
    child = os.fork()
    if child == 0:
        gc.freeze()
        os.environ["STRATAGEM_REPORTS"] = folder
        run = _run(world_size)
        run.connect()
        Watchdog(run, interval_s=0.2, stuck_s=0.5).start()
        run.collectives.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            threading.Event().wait(1.0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_ended(tmp_path):
    codes = run_in_processes(_child_of, 3, str(tmp_path), limit_s=60)

    assert codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert report["type"] == "PeerError"
        assert "rank 1 (" in report["message"]
        assert "is gone" in report["message"]


def _leave(rank, world_size):
    TorchCollectives.reports_lost_ranks = False  # as NCCL
    run = _run(world_size)
    run.connect()
    watchdog, store = run.watchdog, run.collectives.board()
    watchdog._closing.set() if rank == 0 else None  # looked at from here
    found = [watchdog._lost()]
    run.collectives.barrier()
    if rank == 1:
        run.close()
        store.put("closed", "")
        _wait_for(store, "looked")
        return None
    _wait_for(store, "closed")
    found += [run.neighbours.knock()[0], watchdog._lost()]
    watchdog._board = type("Nobody", (), {"get": lambda self, key: None})()  # it did not say that it leaves
    found += [watchdog._lost(), watchdog._sure]
    watchdog._board = None  # the store went with it
    found += [watchdog._lost(), watchdog._sure]
    store.put("looked", "")
    return [str(each) if isinstance(each, PeerError) else each for each in found]


def _wait_for(board, key):
    while board.get(key) is None:
        pass


def test_a_rank_that_leaves_in_order_is_not_lost():
    before, answers, in_order, lost, sure, lost_too, sure_too = run_in_processes(_leave, 2)[0]

    assert before is None
    assert answers == {1: "gone"}
    assert in_order is None
    assert lost.startswith("rank 0 lost its connection: rank 1 (")
    assert lost_too == lost
    assert (sure, sure_too) == (True, False)


def _report(rank, world_size):
    run = _run(world_size)
    run.connect()
    started = run.watchdog
    watchdog = Watchdog(run, interval_s=60)
    run.collectives.barrier()
    if rank == 1:
        explained(ValueError("no such file"), run)
    run.collectives.barrier()
    said = str(watchdog._lost())
    later = Watchdog(run, interval_s=60)._lost()
    run.collectives.barrier()  # neither is gone before
    return started, said, later


def test_what_another_rank_reports_is_the_cause():
    (started, said, later), _ = run_in_processes(_report, 2)

    assert started is None, "gloo raises"
    assert later is None, "it is the report of an earlier run"
    assert said == "rank 1 failed with ValueError: no such file; this rank stops with it."


def test_a_moving_main_thread_is_not_stuck():
    watchdog = object.__new__(Watchdog)
    watchdog._place, watchdog._since = None, 0.0
    watchdog._look_at_main_thread()
    since = watchdog._since
    watchdog._look_at_main_thread()

    assert watchdog._since > since > 0
