"""A rank that waits where nothing raises, as for a GPU, is told and ended when another one is gone."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import threading
from types import SimpleNamespace

import pytest

import stratagem as sg
from stratagem.api.group_services import KeyValueStore
from stratagem.distributed.process_group import TorchCollectives
from stratagem.errors import PeerError
from stratagem.runtime.launching import explained
from stratagem_peer_diagnosis.failure_reports import FailureReports
from stratagem_peer_diagnosis.watchdog import Watchdog
from stratagem_testing import run_in_processes


def _run(world_size):
    return sg.Run(strategy={"name": "ddp", "timeout": 60}, devices=world_size, accelerator="cpu")


def _diagnosis(run):
    return next(choice.plugin for choice in run.stack.automatic if choice.name == "peer_diagnosis")


def _child_of(rank, world_size, folder):
    """Let a child take this rank's place: rank 1's is killed, the others wait in a call that never raises."""
    child = os.fork()
    if child == 0:
        gc.freeze()
        os.environ["STRATAGEM_REPORTS"] = folder
        run = _run(world_size)
        run.connect()
        Watchdog(run, _diagnosis(run).endpoints, interval_s=0.2, stuck_s=0.5).start()
        run.collectives.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(50)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_others_are_ended(tmp_path):
    codes = run_in_processes(_child_of, 3, str(tmp_path), limit_s=180)

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
    watchdog, store = _diagnosis(run).watchdog, run.collectives.key_value_store()
    watchdog._closing.set() if rank == 0 else None  # looked at from here
    found = [watchdog._lost()]
    run.collectives.barrier()
    if rank == 1:
        run.close()
        store.put("closed", "")
        _wait_for(store, "looked")
        return None
    _wait_for(store, "closed")
    found += [_diagnosis(run).endpoints.probe()[0], watchdog._lost()]
    watchdog._store = type("Nobody", (), {"get": lambda self, key: None})()  # it did not say that it leaves
    found += [watchdog._lost(), watchdog._sure]
    watchdog._store = None  # the store went with it
    found += [watchdog._lost(), watchdog._sure]
    store.put("looked", "")
    return [str(each) if isinstance(each, PeerError) else each for each in found]


def _wait_for(store, key):
    while store.get(key) is None:
        pass


@pytest.mark.slow
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
    started = _diagnosis(run).watchdog
    watchdog = Watchdog(run, _diagnosis(run).endpoints, interval_s=60)
    run.collectives.barrier()
    if rank == 1:
        explained(ValueError("no such file"), run)
    run.collectives.barrier()
    said = str(watchdog._lost())
    later = Watchdog(run, _diagnosis(run).endpoints, interval_s=60)._lost()
    run.collectives.barrier()  # neither is gone before
    return started, said, later


def test_what_another_rank_reports_is_the_cause():
    (started, said, later), _ = run_in_processes(_report, 2)

    assert started is None, "gloo raises"
    assert later is None, "it is the report of an earlier run"
    assert said == "rank 1 failed with ValueError: no such file; this rank stops with it."


class Reports:
    """Keeps the reports that are left."""

    def __init__(self):
        self.left = []

    def read(self, limit_s):
        return PeerError(self.left[0]) if self.left else None

    def write(self, text):
        self.left.append(text)


def watching(lost, saving=False):
    """Return a watchdog whose main thread stands still, and whose probes find `lost`, one after the other."""
    watchdog = object.__new__(Watchdog)
    watchdog.interval_s, watchdog.stuck_s, watchdog.failed = 0.0, 0.0, False
    watchdog._rank, watchdog._place, watchdog._since = 0, None, 0.0
    watchdog._told_at, watchdog._own, watchdog._earlier, watchdog._sure = math.inf, "", None, True
    watchdog._closing, watchdog._reports, watchdog.died = threading.Event(), Reports(), []
    run = SimpleNamespace(step=SimpleNamespace(batches_copied=0), saver=SimpleNamespace(is_running=saving))
    watchdog.run, watchdog._run = run, lambda: run
    watchdog._die = lambda error, rank: watchdog.died.append(error)
    findings = iter(lost)

    def find():
        found = next(findings, None)
        if found is None:
            watchdog._closing.set()
        return found or None

    watchdog._lost = find
    return watchdog


GONE = PeerError("rank 1 is gone")


def test_a_rank_that_stays_gone_ends_this_one():
    watchdog = watching([GONE] * 5)
    watchdog._watch()

    assert watchdog.died == [GONE]
    assert watchdog._reports.left == ["rank 1 is gone"]


def test_a_machine_that_answers_again_is_not_lost():
    watchdog = watching([GONE, False, False])
    watchdog._watch()

    assert watchdog.died == []


def test_a_save_in_the_background_is_not_interrupted():
    watchdog = watching([GONE] * 5, saving=True)
    watchdog._watch()

    assert watchdog.died == []


def _look_twice(watchdog, batches):
    """Return when the main thread last moved, as seen before and after so many batches; it waits here."""
    seen = []

    def look():
        for _ in range(2):
            watchdog._look_at_main_thread()
            seen.append(watchdog._since)
            watchdog.run.step.batches_copied += batches

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen


def test_a_loop_that_waits_in_the_same_place_for_each_batch_is_not_stuck():
    first, second = _look_twice(watching([]), batches=1)
    assert second > first

    first, second = _look_twice(watching([]), batches=0)
    assert second == first


@pytest.mark.parametrize("store_answers", [True, False])
def test_a_slow_store_makes_no_rank_a_lost_one(store_answers):
    told, notes = threading.Event(), {}
    watchdog = watching([])
    watchdog._reports, watchdog._silent = FailureReports(None, 0.05), {}
    watchdog._endpoints = SimpleNamespace(
        token=b"", probe_ranks=lambda ranks: {1: "gone"}, store_answers=lambda: store_answers
    )
    watchdog._store = SimpleNamespace(get=lambda key: told.wait(10), put=notes.__setitem__)

    for _ in range(2):
        assert watchdog._gone({1}) == ({} if store_answers else {1: "gone"})
    told.set()
    watchdog.close()
    assert list(notes) == ["left//0"]


def test_the_store_is_asked_even_where_no_thread_can_start(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    assert FailureReports(None)._ask(lambda: "told", 1.0) == "told"


def test_a_moving_main_thread_is_not_stuck():
    watchdog = watching([])
    watchdog._look_at_main_thread()
    since = watchdog._since
    watchdog._look_at_main_thread()

    assert watchdog._since > since > 0


def test_one_question_tells_a_rank_that_failed_of_all_others():
    class Store(KeyValueStore):
        asked = 0

        def get(self, key):
            self.asked += 1
            return super().get(key)

    store, others = Store(), set(range(1, 512))
    for rank in others:
        store.append("reported", f"{rank} ")

    assert FailureReports(SimpleNamespace(rank=0, key_value_store=lambda: store)).exchange(others) == others
    assert store.asked == 1


def test_a_healthy_run_opens_no_connection_to_the_store():
    """torch's store looks up the name of each client, in its only thread."""
    asked = []
    watchdog = watching([])
    watchdog._reports, watchdog._silent = FailureReports(None), {}
    watchdog._endpoints = SimpleNamespace(
        token=b"", probe_ranks=lambda ranks: dict.fromkeys(ranks, "alive"), store_answers=lambda: asked.append(1)
    )

    assert watchdog._gone({1, 2}) == {}
    assert asked == []


def _appended(rank, world_size):
    run = _run(world_size)
    run.connect()
    store = run.collectives.key_value_store()
    for number in range(20):
        store.append("list", f"{rank}-{number} ")
    run.collectives.barrier()
    return sorted(store.get("list").split())


@pytest.mark.slow
def test_what_ranks_append_at_once_is_all_there():
    expected = sorted(f"{rank}-{number}" for rank in range(3) for number in range(20))

    assert run_in_processes(_appended, 3) == [expected] * 3
