"""What a run on one machine listens at cannot be reached from another; what several machines need is documented."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import stratagem as sg
from programs import scripts
from stratagem.distributed.rendezvous import RendezvousStore
from stratagem_testing import run_in_processes

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

#: Prints what each process of the run listens at, its launcher's included.
PROGRAM = """
    import os, sys
    sys.path.insert(0, {folder!r})
    import stratagem as sg
    from test_listening import listeners
    from stratagem_testing.reference import Net, joined_batches

    class Looks(sg.Callback):
        @sg.hookimpl
        def on_train_end(self, run):
            parent = () if {outside!r} else (os.getppid(),)
            found = run.collectives.all_gather_object([listeners(pid) for pid in (os.getpid(), *parent)])
            if run.rank == 0:
                print("FOUND", found, flush=True)

    if __name__ == "__main__":
        trainer = sg.Trainer(
            strategy={strategy!r}, launcher={launcher!r}, devices=2, accelerator="cpu", max_epochs=1, barebones=True,
            callbacks=[Looks()], checkpoint={{"name": "full", "async_save": True}},
        )
        trainer.fit(Net(), joined_batches(2, 8))
"""
LISTEN = "0A"


def listeners(pid):
    """Return the TCP addresses at which process `pid` listens."""
    own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink() and path.exists()}
    own |= set(filter(None, map(_link, Path(f"/proc/{pid}/fd").iterdir())))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and f"socket:[{rest[5]}]" in own:
                found.append(_address(local.partition(":")[0], family))
    return found


def _link(path):
    try:
        return os.readlink(path)
    except OSError:
        return None


def _address(text, family):
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]  # of a little-endian machine
    return socket.inet_ntop(family, b"".join(words))


def _found(tmp_path, strategy, launcher=None, command=(sys.executable,), **variables):
    path = tmp_path / "program.py"
    outside = len(command) > 1
    path.write_text(
        textwrap.dedent(
            PROGRAM.format(folder=str(Path(__file__).parent), strategy=strategy, launcher=launcher, outside=outside)
        )
    )
    done = scripts.run(
        [*command, str(path)], capture_output=True, text=True, timeout=360, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    lines = [line.removeprefix("FOUND ") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stderr
    return [address for rank in eval(lines[0]) for process in rank for address in process]


@pytest.mark.every_push("fsdp-fork")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("ddp", "subprocess"), ("ddp", "spawn"), ("ddp", "fork"), ("fsdp", "fork"), ("ddp_sharded", "fork"),
        ({"name": "fsdp", "device_mesh": (2, 1), "sharding_strategy": "HYBRID_SHARD"}, "fork"),
    ],
)  # fmt: skip
def test_nothing_of_a_run_on_one_machine_listens_beyond_loopback(tmp_path, strategy, launcher):
    found = _found(tmp_path, strategy, launcher)

    assert len(found) >= 5  # the store; a group and an endpoint for each rank
    assert set(found) == {"127.0.0.1"}


@pytest.mark.slow
def test_under_torchrun_only_its_own_store_does(tmp_path):
    found = _found(tmp_path, "ddp", command=(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"))

    assert set(found) == {"127.0.0.1"}


def _hand_started(rank, world_size, port):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "STRATAGEM_STORE_HOSTED": "0"}
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        run.collectives.barrier()
        inside = listeners(os.getpid()), os.environ.get("GLOO_SOCKET_IFNAME")
        run.collectives.barrier()
    return *inside, os.environ.get("GLOO_SOCKET_IFNAME")


def test_processes_started_by_hand_listen_at_loopback_and_the_environment_is_as_before():
    from ports import free_port  # not above: the programs of other tests import this module

    (first, *variables), (second, *_) = run_in_processes(_hand_started, 2, free_port())

    assert len(first) > len(second) >= 2
    assert {*first, *second} == {"127.0.0.1"}
    assert variables == ["lo", None]


def _in_a_group_of_the_users(rank, world_size):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo")
    del os.environ["GLOO_SOCKET_IFNAME"]
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        run.collectives.barrier()
        inside = os.environ.get("GLOO_SOCKET_IFNAME")
    after = os.environ.get("GLOO_SOCKET_IFNAME")
    torch.distributed.destroy_process_group()
    return inside, after


def test_groups_that_a_run_adds_to_one_of_the_users_listen_at_loopback_too():
    assert run_in_processes(_in_a_group_of_the_users, 2) == [("lo", None)] * 2


def test_a_store_for_other_machines_listens_everywhere():
    alone, shared = RendezvousStore(), RendezvousStore(for_others=True)
    try:
        assert sorted(set(listeners(os.getpid()))) >= ["127.0.0.1"]
        assert {"::", "0.0.0.0"} & set(listeners(os.getpid()))
    finally:
        alone.close()
        shared.close()
