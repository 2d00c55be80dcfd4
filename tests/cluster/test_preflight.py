"""Processes that do not find each other, or that do not fit together, all end with one sentence, before they join.

The processes are started by hand, with variables. All cases of a kind run at once: most of their time is waiting.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from datetime import timedelta

import pytest

from ports import free_port
from programs import scripts
from stratagem.api.world import World
from stratagem_meeting import meet
from stratagem_testing import run_in_processes

#: One worker starts the processes, once.
pytestmark = pytest.mark.xdist_group("preflight")

#: Changes what one rank is, by the first word on its command line, then connects; leaves when its input ends.
PROGRAM = """
    import sys
    from attrs import define
    import torch
    import stratagem as sg

    word, timeout, devices, leave = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), "stay" not in sys.argv

    @define(eq=False, kw_only=True)
    class Card(sg.Accelerator):
        indexed = False
        capabilities = sg.Capabilities(provides={"device-cpu"})
        name: str
        model: str
        def count(self):
            return 1
        def device(self, index):
            return torch.device("cpu")
        def identity(self, device):
            return self.name, self.model

    accelerator, changes = "cpu", {}
    if word == "precision":
        changes["precision"] = "bf16-mixed"
    if word == "torch":
        torch.__version__ = "2.99.0"
    if word == "python":
        import platform
        platform.python_version_tuple = lambda: ("3", "99", "1")
    if word.startswith("card"):
        name, model = word.split("-")[1:]
        Card.identity = lambda self, device: (name, model)
        accelerator = Card(name="", model="")
    run = sg.Run(strategy={"name": "ddp", "start_timeout": timeout}, devices=devices, accelerator=accelerator, **changes)
    if word == "import":
        import no_such_module
    run.connect()
    print("CONNECTED", flush=True)
    if not leave:
        sys.stdin.read()
    run.close()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("preflight") / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


class Rank:
    """A process that was started by hand."""

    def __init__(self, program, port, rank, word="same", *, timeout_s=40, size=2, stay=False, **variables):
        self.process = scripts.Popen(
            [sys.executable, str(program), word, str(timeout_s), str(size), *(["stay"] if stay else [])],
            env=os.environ | {
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", **variables,
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self):
        """Wait for its end; keep what it printed, and the last line of its errors."""
        output, self.errors = self.process.communicate(timeout=300)
        self.connected = "CONNECTED" in output
        lines = [line for line in self.errors.splitlines() if line[:1].strip() and not line.startswith("stratagem: ")]
        self.said = lines[-1] if lines else ""
        return self


def collected(groups):
    """Wait for all processes of all cases at the same time, so that none is stopped by a full pipe."""
    threads = [threading.Thread(target=rank.end) for ranks in groups.values() for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    return groups


@pytest.fixture(scope="module")
def unlike(program):
    """Processes that find each other, and one of which is not like the others."""

    def ranks(*words, **options):
        port = free_port()
        return [Rank(program, port, rank, word, **options) for rank, word in enumerate(words)]

    port = free_port()
    return collected(
        {
            "precision": ranks("same", "precision"),
            "torch": ranks("same", "torch"),
            "python": ranks("same", "python"),
            "import": ranks("same", "import", size=3)[:2],
            "cards": ranks("card-A-x", "card-A-x"),
            "models": ranks("card-A-x", "card-B-y"),
            "rank": [
                Rank(program, port, 0, size=3),
                Rank(program, port, 1, size=3),
                Rank(program, port, 1, size=3),
            ],
            "world": [Rank(program, port := free_port(), 0), Rank(program, port, 1, size=3)],
        }
    )


def both_say(ranks, pattern, kind="ConfigError"):
    for rank in ranks:
        assert rank.process.returncode == 1
        assert not rank.connected
        assert re.match(rf"stratagem\.errors\.{kind}: {pattern}", rank.said), rank.errors


def here(rank):
    """What a message calls the process of `rank`."""
    return rf"process {rank.process.pid} on {re.escape(socket.gethostname())}"


def test_other_settings_and_versions_are_named_with_both_processes(unlike):
    for word, found in {
        "precision": r"precision is 'bf16-mixed of .*' on rank 1 and '32-true of .*' on rank 0",
        "torch": r"version of torch is '2\.99\.0' on rank 1 and '.*' on rank 0",
        "python": r"version of Python is '3\.99' on rank 1 and '.*' on rank 0",
    }.items():
        first, second = unlike[word]
        both_say([first, second], rf"{found} \(rank 1 is {here(second)}, rank 0 {here(first)}\); expected the same")


def test_a_rank_that_two_processes_have_is_named_with_both(unlike):
    _, one, other = ranks = unlike["rank"]
    pids = rf"({here(one)}, and {here(other)}|{here(other)}, and {here(one)})"

    both_say(ranks, rf"two processes have rank 1 of 3: {pids}; expected one process for each rank; give each node")


def test_worlds_of_different_sizes_are_named(unlike):
    zero, one = unlike["world"]

    both_say(
        [zero, one],
        rf"rank 1 \({here(one)}\) has a world of 3 processes on 1 nodes, and rank 0 \({here(zero)}\) one of 2 on 1; ",
    )


def test_a_device_that_two_ranks_have_is_named(unlike):
    both_say(unlike["cards"], r"rank \d .* and rank \d .* have the same device, x A; expected a device for each rank")


def test_devices_of_several_models_are_mentioned_once(unlike):
    zero, one = unlike["models"]

    assert zero.connected
    assert one.connected
    assert "different models, and wait for the slowest in each step: x on rank 0; y on rank 1" in zero.errors
    assert "different models" not in one.errors


def _meet_with_other_clocks(rank, world_size):
    if rank == 1:  # on another node, whose clock is behind
        socket.gethostname = lambda: "elsewhere"
        now = time.time
        time.time = lambda: now() - 100
    port = int(os.environ["MASTER_PORT"])
    world = World(
        rank=rank, node_rank=rank, world_size=world_size, num_nodes=world_size, main_port=port, store_hosted=True
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        meet(world, {}, timedelta(seconds=30))
    return [str(warning.message) for warning in told]


def test_a_clock_that_differs_is_mentioned_on_its_node():
    here = socket.gethostname()
    zero, one = run_in_processes(_meet_with_other_clocks, 2)

    assert zero == []
    assert re.match(rf"the clock of elsewhere \(rank 1\) is 100 s behind that of {here} \(rank 0\), and the", one[0])


def test_an_error_before_the_meeting_ends_the_others_at_once(unlike):
    zero, one = unlike["import"]

    assert one.said == "ModuleNotFoundError: No module named 'no_such_module'"
    both_say(
        [zero],
        rf"{here(one)} \(RANK 1\) failed before it met the others, with ModuleNotFoundError: No module named "
        "'no_such_module'; this rank stops with it",
        "PeerError",
    )


# --- Addresses and ports -----------------------------------------------------------------------------------------


class Foreign:
    """A program that has taken a port: it answers each connection with `answer`, or keeps it without an answer."""

    def __init__(self, answer):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port, self._answer, self._kept = self._server.getsockname()[1], answer, []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._kept.append(connection)
            if self._answer:
                connection.recv(1)
                connection.sendall(self._answer)
                connection.shutdown(socket.SHUT_WR)

    def close(self):
        for each in (self._server, *self._kept):
            each.close()


@pytest.fixture(scope="module")
def lost(program):
    """Processes that do not find each other."""
    port = free_port()
    answering, mute = Foreign(b"HTTP/1.1 400 Bad Request\r\n\r\n"), Foreign(b"")
    try:
        return collected(
            {
                "answering": [Rank(program, answering.port, rank) for rank in range(2)],
                "mute": [Rank(program, mute.port, rank) for rank in range(2)],
                "only 0": [Rank(program, free_port(), 0, timeout_s=12, size=4)],
                "only 1": [Rank(program, free_port(), 1, timeout_s=12)],
                "by name": [Rank(program, port, rank, MASTER_ADDR="localhost") for rank in range(2)],
            }
        )
    finally:
        answering.close()
        mute.close()


@pytest.mark.sweep(guard="tests/cluster/test_preflight.py::test_a_second_run_at_the_port_ends_and_the_first_goes_on")
def test_a_port_of_another_program_is_named_on_all_ranks(lost):
    for kind, reason in {
        "answering": r"it answers b'HTTP/1\.1 400 Bad Re",
        "mute": "it accepts connections and",
    }.items():
        zero, one = lost[kind]
        assert re.match(r"stratagem.*Error: cannot listen on 127\.0\.0\.1:\d+ \(address already in use\); ", zero.said)
        both_say([one], rf"rank 1 of 2 found another program at 127\.0\.0\.1:\d+, .* \({reason}", "LaunchError")
        assert "c10d" not in one.errors, "torch prints stack traces of its own"


def test_missing_ranks_are_named_while_others_wait_and_at_the_end(lost):
    zero, one = lost["only 0"][0], lost["only 1"][0]

    assert re.search(r"^stratagem: waiting for ranks 1 to 3 of 4 at 127\.0\.0\.1:\d+$", zero.errors, re.MULTILINE)
    both_say([zero], r"rank 0 has waited 12 s for ranks 1 to 3 of 4 at 127\.0\.0\.1:\d+; ", "LaunchError")
    assert re.search(
        r"^stratagem: rank 1 of 2 waits for the store of rank 0 at 127\.0\.0\.1:\d+ \(connection refused\)",
        one.errors, re.MULTILINE,
    )  # fmt: skip
    both_say([one], r"rank 1 of 2 found no store at 127\.0\.0\.1:\d+ for 12 s \(at the last attempt: ", "LaunchError")


def test_processes_meet_at_a_name(lost):
    assert [rank.connected for rank in lost["by name"]] == [True, True], lost["by name"][0].errors


def test_a_second_run_at_the_port_ends_and_the_first_goes_on(program):
    port = free_port()
    first = [Rank(program, port, rank, stay=True) for rank in range(2)]
    for rank in first:
        assert rank.process.stdout.readline() == "CONNECTED\n"
    second = [Rank(program, port, 0), Rank(program, port, 1), Rank(program, port, 1, "precision")]
    collected({"second": second})
    collected({"first": first})

    assert [rank.process.returncode for rank in first] == [0, 0]
    zero, one, unlike = second
    assert re.match(
        rf"stratagem.*Error: cannot listen on 127\.0\.0\.1:{port} \(address already in use: it is the port of another run, "
        rf"whose store {here(first[0])} hosts\); choose another MASTER_PORT",
        zero.said,
    ), zero.errors
    for latecomer in (one, unlike):  # whatever it would train
        both_say(
            [latecomer],
            rf"two processes have rank 1 of 2: {here(first[1])}, and {here(latecomer)}; the ranks that met at "
            rf"127\.0\.0\.1:{port} train already; expected one process for each rank; give each node a NODE_RANK of its own",
        )
