"""A rank that is stopped, killed or cut off is named by the others, in bounded time."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import stratagem as sg
from ports import free_port
from stratagem.api.group_services import KeyValueStore
from stratagem.api.run_parts import Timeouts
from stratagem.api.world import Collectives, World
from stratagem_peer_diagnosis import diagnosis, endpoints
from stratagem_peer_diagnosis.endpoints import Endpoints, Peer, probe
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_plainly

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: What a rank may take beyond the timeout, on a busy machine.
GRACE_S = 60


def _ddp(timeout_s):
    return {"name": "ddp", "timeout": timeout_s}


def _outcome(act):
    """Return the class and the text of what `act` raises."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- Stopped -----------------------------------------------------------------------------------------------------


class Stops(sg.Callback):
    """Stops the process of one rank in the middle of training; another one lets it go on, afterwards."""

    def __init__(self, victim):
        self.victim, self.pids = victim, []

    @sg.hookimpl
    def on_train_batch_start(self, trainer, batch_idx, run):
        if batch_idx == 0:
            self.pids = run.collectives.all_gather_object(os.getpid())
        if batch_idx == 2 and run.rank == self.victim:
            os.kill(os.getpid(), signal.SIGSTOP)


def _train_with_a_stopped_rank(rank, world_size, victim):
    stops = Stops(victim)
    trainer = sg.Trainer(max_epochs=1, strategy=_ddp(6), devices=world_size, callbacks=[stops], **QUIET)
    said = _outcome(lambda: trainer.fit(Net(), part(joined_batches(6, 12), rank, world_size)))
    if rank == (victim + 1) % world_size:
        os.kill(stops.pids[victim], signal.SIGCONT)
    return said


@pytest.mark.slow
def test_a_stopped_rank_is_named_though_its_machine_answers():
    results = run_in_processes(_train_with_a_stopped_rank, 3, 2, limit_s=6 + GRACE_S)

    for said in results:
        assert said.startswith("PeerError: rank 2 is stopped (process ")
    assert any("see what sent it SIGSTOP" in said for said in results)


def _stop_the_host_of_the_store(rank, world_size, port):
    """Without a launcher rank 0 hosts the store: whoever asks it for a note gets no answer."""
    os.environ |= {"MASTER_PORT": str(port), "STRATAGEM_STORE_HOSTED": "0"}
    pids = []

    def main(run):
        pids.extend(run.collectives.all_gather_object(os.getpid()))
        if run.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        run.collectives.barrier()

    said = _outcome(lambda: sg.Run(strategy=_ddp(6), devices=world_size, accelerator="cpu").launch(main))
    if rank == 1:
        os.kill(pids[0], signal.SIGCONT)
    return said


@pytest.mark.slow
def test_a_stopped_rank_that_hosts_the_store_is_named():
    _, said = run_in_processes(_stop_the_host_of_the_store, 2, free_port(), limit_s=6 + GRACE_S)

    assert said.startswith("PeerError: rank 0 is stopped (process ")


# --- Killed ------------------------------------------------------------------------------------------------------


def _lose_a_rank(rank, world_size, victim, leaves_a_child):
    """Let a child take the victim's place, and be killed; its parent stays to tell."""
    if rank != victim:
        said = _outcome(lambda: _own_loop(world_size, None))
        _bell().set(f"told/{rank}", "")
        return said
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()
        _own_loop(world_size, lambda: _die(reading, writing) if leaves_a_child else _die())
    os.close(reading)
    _, status = os.waitpid(child, 0)
    _bell().wait([f"told/{other}" for other in range(world_size) if other != victim])
    os.close(writing)  # what the victim left behind ends with this
    return os.waitstatus_to_exitcode(status)


def _bell():
    return dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)


def _die(reading=None, writing=None):
    if reading is not None and os.fork() == 0:  # as a loader's worker does, that has yet to notice
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _own_loop(world_size, act):
    with sg.Run(strategy=_ddp(6), devices=world_size, accelerator="cpu") as run:
        run.collectives.barrier()
        if act is not None:
            act()
        run.collectives.all_reduce(torch.ones(3))


@pytest.mark.every_push("True")
@pytest.mark.slow
@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_a_killed_rank_is_named(leaves_a_child):
    results = run_in_processes(_lose_a_rank, 3, 1, leaves_a_child, limit_s=30 + GRACE_S)

    assert results[1] == -signal.SIGKILL
    for said in (results[0], results[2]):
        assert said.startswith("PeerError: ")
        assert f"rank 1 ({socket.gethostname()}, 127.0.0.1) is gone" in said
        assert "rank 0 (" not in said
        assert "rank 2 (" not in said


def _lose_the_host_of_the_store(rank, world_size, port):
    os.environ |= {"MASTER_PORT": str(port), "STRATAGEM_STORE_HOSTED": "0"}
    if rank != 0:
        return _outcome(lambda: _own_loop(world_size, lambda: _hear_from_rank_0(late_s=0.5 if rank == 2 else 0)))
    child = os.fork()
    if child == 0:
        gc.freeze()
        _own_loop(world_size, _hear_from_all_and_die)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _hear_from_rank_0(late_s):
    dist.send(torch.ones(1), 0)
    time.sleep(late_s)
    dist.recv(torch.ones(1), 0)


def _hear_from_all_and_die():
    for rank in (1, 2):
        dist.recv(torch.ones(1), rank)
    _die()


@pytest.mark.slow
def test_a_killed_rank_that_hosts_the_store_is_named_also_by_a_rank_that_is_late_to_notice():
    """No report can be left: a rank that ends at once would be taken for lost, too."""
    status, first, second = run_in_processes(_lose_the_host_of_the_store, 3, free_port(), limit_s=30 + GRACE_S)

    assert status == -signal.SIGKILL
    for said in (first, second):
        assert f"lost its connection: rank 0 ({socket.gethostname()}, 127.0.0.1) is gone" in said


# --- Cut off -----------------------------------------------------------------------------------------------------

TIMEOUT_S = 12
PROGRAM = f"""
import os, sys, torch
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches, part

class Pauses(sg.Callback):
    @sg.hookimpl
    def on_train_batch_start(self, trainer, batch_idx, run):
        if batch_idx in (3, 6):
            torch.save(trainer.module.net.state_dict(), f"{{run.rank}}-{{batch_idx}}.pt")
            print("paused", flush=True)
            sys.stdin.readline()

torch.set_num_threads(1)
trainer = sg.Trainer(max_epochs=1, strategy={_ddp(TIMEOUT_S)}, devices=1, num_nodes=2, callbacks=[Pauses()], **{QUIET})
try:
    trainer.fit(Net(), part(joined_batches(9, 8), int(os.environ["RANK"]), 2))
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}", flush=True)
"""


@pytest.fixture
def two_hosts():
    path = Path(__file__).parents[2] / "benchmarks" / "slow_link" / "hosts.py"
    spec = importlib.util.spec_from_file_location("hosts", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        hosts = module.Hosts.up(2, name=f"lost{os.getpid()}")
    except module.NoHosts as error:
        pytest.skip(str(error))
    with hosts:
        yield hosts


def _start(hosts, rank, program):
    place = {"RANK": rank, "LOCAL_RANK": 0, "NODE_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place |= {"MASTER_ADDR": "h1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}  # a network of our own
    return subprocess.Popen(
        hosts.command(rank + 1, sys.executable, str(program)), env=os.environ | {k: str(v) for k, v in place.items()},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _go_on(processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def _wait_until_paused(processes):
    assert [process.stdout.readline() for process in processes] == ["paused\n"] * len(processes)


@pytest.mark.slow
def test_a_cut_of_five_seconds_is_survived_and_a_longer_one_names_the_peer(two_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    processes = [_start(two_hosts, rank, program) for rank in range(2)]
    _wait_until_paused(processes)
    two_hosts.cut(2)
    _go_on(processes)
    with pytest.raises(subprocess.TimeoutExpired):  # nobody gets past the cut
        processes[0].wait(5)
    assert not (tmp_path / "0-6.pt").exists()
    two_hosts.heal(2)
    _wait_until_paused(processes)
    two_hosts.cut(2)
    _go_on(processes)
    first, second = [process.communicate(timeout=TIMEOUT_S + GRACE_S)[0] for process in processes]

    for rank in range(2):
        weights = {f"net.{name}": tensor for name, tensor in torch.load(tmp_path / f"{rank}-6.pt").items()}
        assert relative_difference(weights, train_plainly(joined_batches(9, 8)[:6])[0]) < 1e-4
    heard = f"has heard nothing from rank {{}} for {TIMEOUT_S} s, and cannot reach it; expected every rank to answer"
    assert f"PeerError: rank 0 {heard.format('1 (h2, 10.77.0.2)')}" in first
    assert f"PeerError: rank 1 {heard.format('0 (h1, 10.77.0.1)')}" in second


# --- Not lost at all ---------------------------------------------------------------------------------------------


class LosesItsDatabase(Net):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


def _lose_the_database(rank, world_size, error):
    trainer = sg.Trainer(max_epochs=1, strategy=_ddp(30), devices=world_size, **QUIET)
    return _outcome(lambda: trainer.fit(LosesItsDatabase(error), part(joined_batches(6, 12), rank, world_size)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [ConnectionError("the database hung up"), RuntimeError("timed out waiting for the licence server")]
)
def test_a_network_error_of_the_users_own_stands(error):
    first, second = run_in_processes(_lose_the_database, 2, error, limit_s=30 + GRACE_S)

    said = f"{type(error).__name__}: {error}"
    assert second == said
    assert first == f"PeerError: rank 1 failed with {said}; this rank stops with it."


def _endpoints_of(run):
    return next(choice.plugin for choice in run.stack.automatic if choice.name == "peer_diagnosis").endpoints


def _endpoints(rank, world_size):
    with sg.Run(strategy=_ddp(30), devices=world_size, accelerator="cpu") as run:
        answers, store_answers = _endpoints_of(run).probe()
        run.collectives.barrier()
        endpoints = _endpoints_of(run)
        run.collectives.key_value_store().put(f"closing/{rank}", "")
    return answers, store_answers, endpoints._endpoint.fileno()


@pytest.mark.slow
def test_ranks_that_live_answer_and_a_closed_run_leaves_nothing_open():
    for rank, (answers, store_answers, descriptor) in enumerate(run_in_processes(_endpoints, 3)):
        assert answers == {other: "alive" for other in range(3) if other != rank}
        assert store_answers
        assert descriptor == -1


def test_an_address_that_the_kernel_refuses_at_once_does_not_count_as_alive():
    assert probe({1: ("255.255.255.255", 9)}, time.monotonic() + 1) == {1: "silent"}


def test_a_single_process_opens_nothing():
    with sg.Run(strategy="single_device", accelerator="cpu") as run:
        assert _endpoints_of(run) is None


# --- Many ranks --------------------------------------------------------------------------------------------------


class _FarFromTheLost(Collectives):
    """What rank 0 of many has to ask: all ranks but `lost` reported that they failed, none names another."""

    def __init__(self, world_size, lost):
        self.world_size, self.store = world_size, KeyValueStore()
        self.store.append("reported", "".join(f"{rank} " for rank in range(1, world_size) if rank not in lost))

    def key_value_store(self, shared=False):
        return self.store


@pytest.mark.slow
def test_a_far_rank_is_named_by_ranks_that_look_at_few(monkeypatch):
    asked, connect, many = [], endpoints._begin_to_connect, 200
    monkeypatch.setattr(endpoints, "_begin_to_connect", lambda *place: asked.append(place) or connect(*place))
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(many)]
    world = World(rank=0, world_size=many, main_port=listening[0].getsockname()[1])
    peers = [Peer(rank, "a", "127.0.0.1", each.getsockname()[1], "") for rank, each in enumerate(listening)][1:]
    listening[150].close()
    run = SimpleNamespace(
        collectives=_FarFromTheLost(many, {150}),
        rank=0,
        stack=SimpleNamespace(timeouts=lambda: Timeouts(timedelta(seconds=6), timedelta(seconds=6))),
    )

    found = diagnosis.explain(
        RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"), run, Endpoints(peers, None, world)
    )

    for each in listening:
        each.close()
    assert str(found).startswith("rank 0 lost its connection: rank 150 (a, 127.0.0.1) is gone")
    assert len(asked) == endpoints.NEAREST + len(["the store", "rank 150"])
