"""Supervision without a trainer: commands to run again, the rank that failed first, and processes that end together."""

from __future__ import annotations

import _abc
import builtins
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from stratagem import World
from stratagem.distributed import probe, rendezvous
from stratagem.distributed.launched import report
from stratagem.distributed.probe import Answer, ask
from stratagem.distributed.process_variables import process_variables
from stratagem.distributed.rendezvous import Meeting, RendezvousStore
from stratagem.distributed.standard_streams import flush_files
from stratagem.errors import ConfigError, LaunchError, is_echo
from stratagem_launchers_local.children import Child, child_environment, end, local_places
from stratagem_launchers_local.reports import left, root_cause
from stratagem_launchers_local.supervision import start_for_good
from stratagem_meeting.arrivals import Arrival, different_models, ranks_in_words
from stratagem_peer_diagnosis import diagnosis
from stratagem_testing import run_in_processes

WORLD = World(rank=2, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="h", main_port=7)


# --- Places ------------------------------------------------------------------------------------------------------


def test_every_process_of_a_node_gets_its_own_place():
    assert [(place.rank, place.local_rank) for place in local_places(WORLD)] == [(2, 0), (3, 1)]


def test_an_environment_reads_back_what_a_launcher_writes():
    local = pytest.importorskip("stratagem_environments_local")

    for place in local_places(WORLD):
        assert local.local_world(process_variables(place), 2, 2) == place


def test_a_child_keeps_the_users_variables_and_differs_in_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RANK", "99")
    variables = child_environment(WORLD, tmp_path)

    assert (variables["OMP_NUM_THREADS"], variables["RANK"], variables["PATH"]) == ("7", "2", os.environ["PATH"])


def test_a_rank_that_connects_before_the_store_starts_waits_for_it():
    import torch.distributed as dist

    store = RendezvousStore()
    early = threading.Thread(target=lambda: dist.TCPStore("127.0.0.1", store.port, is_master=False).set("here", "1"))
    early.start()
    early.join(0.2)
    assert early.is_alive()

    store.serve()
    early.join(20)
    assert not early.is_alive()
    store.close()
    RendezvousStore(port=store.port).close()


@pytest.mark.slow
def test_a_port_is_taken_from_the_beginning_and_given_back():
    store = RendezvousStore()
    with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{store.port} .* choose another MASTER_PORT"):
        RendezvousStore(port=store.port)
    store.close()
    RendezvousStore(port=store.port).close()


# --- The same command again --------------------------------------------------------------------------------------

PROGRAM = """
    import json, os, sys
    arguments = sys.argv[1:]
    sys.argv = ["edited"]
    os.chdir("/")
    if "again" in os.environ:
        print(json.dumps([arguments, sys.flags.dev_mode, sys.stdout.write_through, __name__]))
    else:
        from stratagem_launchers_local.relaunch import relaunch_command
        os.environ["again"] = "1"
        command = relaunch_command()
        os.execv(command[0], command)
"""


@pytest.mark.every_push("folder")
@pytest.mark.parametrize(
    "words",
    [
        ["train.py"], ["./train.py"], ["-m", "package.train"], ["-mpackage.train"], ["-m", "package"], ["folder"],
        ["-um", "package.train"], ["-u", "-Xdev", "train.py"], ["-uX", "dev", "train.py"], ["-m", "pdb", "-cc", "train.py"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_program_is_run_again_as_it_was_started(tmp_path, words):
    for path in ("train.py", "package/train.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "package/__init__.py").write_text("")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])

    arguments = [] if "pdb" in words else ["-m", "a b", "--flag"]  # a debugger's program sees an edited sys.argv
    command = [sys.executable, *words, *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert result.stdout.strip(), result.stderr
    again, dev_mode, unbuffered, name = json.loads(result.stdout.splitlines()[-1])
    assert again == arguments
    assert (dev_mode, name) == (any("X" in word for word in words), "__main__")
    assert unbuffered == any(word.startswith("-u") for word in words)


@pytest.mark.parametrize("words", [["-c", "{}"], ["-"]])
def test_a_program_without_a_file_is_refused(words):
    code = "from stratagem_launchers_local.relaunch import relaunch_command; relaunch_command()"
    command = [sys.executable, *(word.format(code) for word in words)]
    result = subprocess.run(command, input=code, capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert "no file to run again" in result.stderr


# --- The cause ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("RuntimeError", "Timed out waiting 3000ms for recv operation to complete", True),
        ("RuntimeError", "failed in TCPStore::wait: store is gone", True),
        ("DistBackendError", "NCCL error", True),
        ("DistNetworkError", "", True),
        ("RuntimeError", "cannot restore the tokenizer", False),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError", "connection closed", False),
        ("ConnectionError", "the data host hung up", False),
        ("ConnectionResetError", "connection reset by peer", False),
        ("TimeoutError", "timed out waiting for the data host", False),
    ],
)
def test_an_echo_is_told_from_an_error(kind, message, expected):
    cls = getattr(builtins, kind, None) or getattr(torch.distributed, kind)

    assert is_echo(cls(message)) is expected


def _of_the_user():
    raise RuntimeError("timed out waiting for the licence server")


def _of_the_users_loader():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            _of_the_user()

    next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))


def _of_the_user_in_backward():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 1

        @staticmethod
        def backward(ctx, gradient):
            _of_the_user()

    Broken.apply(torch.ones(1, requires_grad=True)).backward()


def _of_the_user_again():
    try:
        _of_a_collective()
    except RuntimeError as error:
        raise RuntimeError("the licence server closed the connection: connection reset") from error


def _of_a_collective():
    from torch.distributed import ProcessGroupGloo

    store = torch.distributed.HashStore()
    ProcessGroupGloo(store, 0, 2, timedelta(milliseconds=10))


def _of_a_collective_raised_again():
    try:
        _of_a_collective()
    except RuntimeError:
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (_of_the_user, False), (_of_the_users_loader, False), (_of_the_user_in_backward, False),
        (_of_the_user_again, False), (_of_a_collective, True), (_of_a_collective_raised_again, True),
    ],
)  # fmt: skip
def test_only_what_a_collective_raises_is_an_echo(act, expected):
    with pytest.raises(RuntimeError) as caught:
        act()

    assert re.search("timed out|timeout|connection", str(caught.value).lower())
    assert is_echo(caught.value) is expected


def child(rank, code, was_ended=False):
    return Child(rank, 0, lambda: code, was_ended)


def test_the_cause_is_the_first_error_that_does_not_follow_from_another(tmp_path):
    for rank, error in enumerate([RuntimeError("Connection reset by peer"), ConfigError("a is 1"), ValueError("late")]):
        report(error, rank, tmp_path)
    cause = root_cause(tmp_path, [child(rank, 1) for rank in range(3)], {})

    assert isinstance(cause, ConfigError)
    assert cause.__notes__[0].startswith("on rank 1:")


def test_a_process_that_we_ended_is_not_to_blame(tmp_path):
    children = [child(0, -signal.SIGTERM, was_ended=True), child(1, -signal.SIGKILL)]

    assert "rank 1 was killed by SIGKILL" in str(root_cause(tmp_path, children, {}))
    report(ConnectionError("data host down"), 2, tmp_path)
    assert "data host down" in str(root_cause(tmp_path, [children[0], child(2, 1)], {}))


def test_the_error_of_a_process_without_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("gc.get_objects", _raise_memory_error)
    report(ValueError("mine"), 0, tmp_path)

    assert "rank 0 failed with ValueError: mine" in str(root_cause(tmp_path, [child(0, 1)], {}))


def _raise_memory_error():
    raise MemoryError


def test_files_are_flushed_and_no_class_is_kept(tmp_path):
    class_of_this_test = type("Some", (), {})
    instance, known = class_of_this_test(), len(_abc._get_dump(io.IOBase)[2])
    with (tmp_path / "file").open("w") as file:
        file.write("x")
        flush_files(on_disk=True)

        assert (tmp_path / "file").read_text() == "x"
    assert len(_abc._get_dump(io.IOBase)[2]) == known, instance


def test_nothing_to_blame(tmp_path):
    left(tmp_path, 0).touch()

    assert root_cause(tmp_path, [child(0, 0), child(1, None)], {}) is None


def test_a_process_that_ends_with_0_before_its_program_does_is_to_blame(tmp_path):
    cause = root_cause(tmp_path, [child(0, 0), child(1, None)], {})

    assert str(cause).startswith("rank 0 exited with code 0 before its training was over")


def test_the_first_report_of_a_process_stands(tmp_path):
    report(ValueError("first"), 0, tmp_path)
    report(ValueError("second"), 0, tmp_path)

    assert "first" in str(root_cause(tmp_path, [], {}))


def _report_beside_a_full_pipe(rank, size, folder):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    pipe, lines = open(writing, "wb"), open(folder / "lines", "w")  # noqa: SIM115
    pipe.write(b"more")
    lines.write("a line")
    report(ValueError("mine"), 0, folder)
    os.close(reading)
    return (folder / "lines").read_text()


@pytest.mark.slow
def test_a_report_writes_open_files_before_and_waits_for_no_reader_of_a_pipe(tmp_path):
    assert run_in_processes(_report_beside_a_full_pipe, 1, tmp_path, limit_s=60) == ["a line"]
    assert (tmp_path / "0.json").exists()


# --- Life and death ----------------------------------------------------------------------------------------------


def wait_until_gone(pid, limit_s=30):
    deadline = time.monotonic() + limit_s
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, f"{pid} survived"
        time.sleep(0.02)


def test_a_process_that_ignores_the_request_is_made_to_end(monkeypatch):
    monkeypatch.setattr("stratagem_launchers_local.children.END_S", 0.3)
    deaf = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    deaf.stdout.readline()
    end([Child(0, deaf.pid, deaf.poll)])

    assert deaf.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["linux", "elsewhere"])
def test_a_process_dies_with_a_killed_parent(platform):
    child_code = f"""
        import os, sys, time
        sys.platform = {platform!r}
        from stratagem.distributed.launched import die_with
        die_with(os.getppid())
        print(os.getpid(), flush=True)
        time.sleep(60)
    """
    parent_code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(child_code)!r}])"
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()

    wait_until_gone(pid)


def test_processes_outlive_the_thread_that_asked_for_them():
    started = []

    def ask():
        code = "import os, sys, time; from stratagem.distributed.launched import die_with; die_with(os.getppid()); print(1, flush=True); time.sleep(60)"  # fmt: skip
        process = start_for_good(lambda: subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        process.stdout.readline()
        started.append(process)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    with pytest.raises(subprocess.TimeoutExpired):
        started[0].wait(0.3)
    started[0].kill()
    started[0].wait()


def test_an_error_of_starting_reaches_the_thread_that_asked():
    caught = []

    def ask():
        try:
            start_for_good(lambda: 1 / 0)
        except ZeroDivisionError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    assert caught


# What torch says of NCCL's timeouts and aborts.
NCCL_TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
    "Timeout(ms)=600000) ran for 600026 milliseconds before timing out."
)


@pytest.mark.parametrize(
    ("text", "waited_s"),
    [
        (NCCL_TIMEOUT, 600.0),
        ("Work WorkNCCL(SeqNum=3, OpType=BROADCAST, Timeout(ms)=5000) timed out in blocking wait.", 5.0),
        ("WorkNCCL ran for 7000 milliseconds before timing out", 7.0),
        ("[gloo] Timed out waiting 2000ms for recv operation to complete", 2.0),
        (
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
            0.0,
        ),
    ],
)
def test_what_nccl_says_of_another_rank_is_an_echo_with_its_timeout(text, waited_s):
    error = RuntimeError(text)

    assert is_echo(error)
    assert diagnosis.waited_s(error, None) == waited_s


def test_words_of_a_users_error_are_not_taken_for_nccls():
    assert not is_echo(RuntimeError("the operation needs a larger table"))


# --- What listens at an address ----------------------------------------------------------------------------------


def test_a_store_for_other_machines_is_not_hosted_at_the_address_of_another():
    with pytest.raises(
        LaunchError, match=r"process \d+ on .* is to host the store, as node 0, at MASTER_ADDR '192\.0\.2\.1', which is"
    ):
        RendezvousStore("192.0.2.1", for_others=True).serve()


def test_ranks_that_wait_at_the_address_are_told_of_another_node_0():
    """One machine is both: the node at the address, and another one, which cannot be reached there."""
    first, second = RendezvousStore(), RendezvousStore()
    store = first.serve()
    second.serve()
    second.port = first.port

    with pytest.raises(LaunchError, match="which is another machine"):
        second._check_address_leads_here()
    assert "is to host the store, as node 0" in Meeting(store, "0", 1).arrival(1)["failed"]
    first.close()


def test_a_store_may_be_reached_at_an_address_in_front_of_the_machine(monkeypatch):
    monkeypatch.setattr(rendezvous, "_is_here", lambda address: False)
    store = RendezvousStore("127.0.0.1", for_others=True)

    assert store.serve().check(["stratagem/host"])
    store.close()


def test_what_listens_is_told_apart():
    store, silent = RendezvousStore(), socket.create_server(("127.0.0.1", 0))
    with silent:
        assert ask("127.0.0.1", silent.getsockname()[1], 0.1).kind == "mute"
        store.serve()
        assert ask("127.0.0.1", store.port, 5).kind == "store"
    store.close()

    assert ask("127.0.0.1", store.port, 5) == Answer("nothing", "connection refused")


def test_models_of_devices_are_named_in_the_order_of_ranks_whoever_comes_first():
    ranks = [
        Arrival(rank=rank, world_size=3, num_nodes=1, host="a", pid=1, id=str(rank), digest="", model=model)
        for rank, model in enumerate("xyx")
    ]

    for arrived in (ranks, ranks[::-1]):
        assert different_models(arrived).endswith(": x on ranks 0 and 2; y on rank 1")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([1], "rank 1"), ([2, 1], "ranks 1 and 2"), ([0, 1, 2, 3, 7], "ranks 0 to 3 and 7"),
        (range(1, 30, 2), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and more (15 in all)"),
    ],
)  # fmt: skip
def test_ranks_are_named_in_few_words(ranks, words):
    assert ranks_in_words(ranks) == words


@pytest.mark.parametrize("address", ["", "node1:29500", "10.0.0.1:29500", "two words"])
def test_an_address_that_no_machine_can_have_is_refused_at_once(address):
    world = World(world_size=2, num_nodes=2, main_address=address, main_port=29500)

    with pytest.raises(
        ConfigError, match=r"MASTER_ADDR is .*expected the name or the address of node 0, without a port"
    ):
        rendezvous.check_address(world, limit_s=60)


@pytest.mark.slow
def test_a_name_that_cannot_be_resolved_is_told_while_nodes_wait(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "_resolve", lambda *_: "Name or service not known")
    monkeypatch.setattr(probe, "FIRST_NOTICE_S", 0.5)
    world = World(world_size=2, num_nodes=2, main_address="node1.invalid", main_port=29500)

    with pytest.raises(ConfigError, match="which this machine cannot resolve"):
        rendezvous.check_address(world, limit_s=2.5)
    assert "rank 0 of 2 waits: MASTER_ADDR is 'node1.invalid', which this machine cannot" in capsys.readouterr().err


def test_one_machine_waits_for_its_own_resolver_but_does_not_try_again(monkeypatch):
    limits = []
    monkeypatch.setattr(rendezvous, "_resolve", lambda _, __, limit_s: limits.append(limit_s) or "no")

    with pytest.raises(ConfigError, match="which this machine cannot resolve"):
        rendezvous.check_address(World(world_size=2, local_world_size=2, main_address="node1"), limit_s=60)
    assert limits == [60]
