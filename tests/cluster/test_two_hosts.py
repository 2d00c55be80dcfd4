"""Two hosts with their own names and addresses train without a scheduler; a cut link is explained on both."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from . import netlab

pytestmark = pytest.mark.xdist_group("netlab")

PORT = 29511  # no other process is in the namespaces

SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly
    from torch.utils.data import DataLoader, TensorDataset

    FOLDER = Path(sys.argv[1])

    class Module(Net):
        def training_step(self, batch, batch_idx):
            if (FOLDER / "pace").exists():
                time.sleep(0.1)
                (FOLDER / f"step-{{self.trainer.global_step}}-{{self.trainer.global_rank}}").touch()
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        batches = joined_batches({steps}, 16)
        x, y = (torch.cat(parts) for parts in zip(*batches))
        trainer = sg.Trainer(
            strategy={{"name": "ddp", "timeout": {timeout}}}, accelerator="cpu", max_epochs=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False, {devices}
        )
        model = Module()
        trainer.fit(model, DataLoader(TensorDataset(x, y), 4))
        reference, norms = train_plainly(batches)
        difference = relative_difference(model.state_dict(), reference)
        world = trainer.run.world
        result = world.rank, world.node_rank, world.world_size, difference < 1e-6, max(norms) > 1
        # In one write: both ranks of a host share its output.
        os.write(1, ("RESULT " + " ".join(map(str, result)) + "\\n").encode())
"""
TIMEOUT_S = 8
OWN = "devices=2, num_nodes=2,"


@pytest.fixture
def hosts(need):
    need(*netlab.PROGRAMS, package="iproute2 util-linux", root=True)
    with netlab.lab(2) as lab:
        yield lab


def script(folder, devices=OWN, steps=10, timeout=60):
    path = folder / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(devices=devices, steps=steps, timeout=timeout))
    return [path, folder]


def by_hand(command):
    """Each host runs the script; MASTER_ADDR and NODE_RANK tell it the rest."""
    return lambda node: (
        [sys.executable, *command],
        {"MASTER_ADDR": "h1", "MASTER_PORT": str(PORT), "NODE_RANK": str(node)},
    )


def by_torchrun(command):
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "h1", "--master-port", PORT]
    return lambda node: (
        [sys.executable, "-m", "torch.distributed.run", *options, "--node-rank", node, *command],
        {},
    )


def start(lab, start_on):
    processes = []
    for node, host in enumerate(lab.hosts):
        command, variables = start_on(node)
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        processes.append(host.popen(command, env=environment, **options))
    return processes


def outputs(processes, limit_s=360):
    deadline = time.monotonic() + limit_s
    return [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]


def assert_trained(processes):
    found = outputs(processes)

    assert [process.returncode for process in processes] == [0, 0], found
    lines = sorted(line for out, _ in found for line in out.splitlines() if line.startswith("RESULT"))
    assert lines == [f"RESULT {rank} {rank // 2} 4 True True" for rank in range(4)]


@pytest.mark.sweep(guard="tests/cluster/test_two_hosts.py::test_two_hosts_train_as_one_process")
def test_two_hosts_train_as_one_process_where_a_name_leads_to_loopback(hosts, tmp_path):
    hosts.name_hosts(hosts.hosts[0], own="127.0.1.1")
    hosts.name_hosts(hosts.hosts[1], own="127.0.1.1")

    assert_trained(start(hosts, by_hand(script(tmp_path))))


def test_two_hosts_train_as_one_process(hosts, tmp_path):
    assert_trained(start(hosts, by_hand(script(tmp_path))))


@pytest.mark.sweep(guard="tests/cluster/test_two_hosts.py::test_two_hosts_train_as_one_process")
@pytest.mark.parametrize("own", [None, "127.0.1.1"])
def test_two_hosts_train_as_one_process_under_torchrun(hosts, tmp_path, own):
    for host in hosts.hosts:
        hosts.name_hosts(host, own=own)

    assert_trained(start(hosts, by_torchrun(script(tmp_path, devices=""))))


def start_training(hosts, how, folder):
    """Start a long run, and wait until each rank has trained some steps."""
    (folder / "pace").touch()
    devices = OWN if how is by_hand else ""
    processes = start(hosts, how(script(folder, devices=devices, steps=10000, timeout=TIMEOUT_S)))
    deadline = time.monotonic() + 360
    while not all((folder / f"step-3-{rank}").exists() for rank in range(4)):
        assert time.monotonic() < deadline, outputs(processes, 1)
        assert all(process.poll() is None for process in processes), outputs(processes)
        time.sleep(0.05)
    return processes


@pytest.mark.sweep(
    guard="tests/plugins/test_lost_peers.py::test_a_cut_of_five_seconds_is_survived_and_a_longer_one_names_the_peer"
)
@pytest.mark.parametrize("how", [by_torchrun, by_hand])
def test_a_cut_link_ends_both_hosts_and_each_names_the_other(hosts, tmp_path, how):
    processes = start_training(hosts, how, tmp_path)

    hosts.cut(2)
    found = outputs(processes, 60)

    for node, (process, (_, errors)) in enumerate(zip(processes, found, strict=True)):
        assert process.returncode not in (0, None), errors
        other = hosts.hosts[1 - node]
        place = rf"rank \d \({other.name}, {re.escape(other.address)}\)"
        silence = f"has heard nothing from {place}.* for {TIMEOUT_S} s, and cannot reach"
        assert re.search(silence, errors) or re.search(f"cannot reach {place}", errors), errors
    assert not any(host.pids() for host in hosts.hosts)


@pytest.mark.sweep(
    guard="tests/plugins/test_lost_peers.py::test_a_killed_rank_that_hosts_the_store_is_named_also_by_a_rank_that_is_late_to_notice"
)
@pytest.mark.parametrize("how", [by_torchrun, by_hand])
def test_the_host_of_the_store_that_dies_is_named_on_the_other_one(hosts, tmp_path, how):
    processes = start_training(hosts, how, tmp_path)

    hosts.cut(1)
    for pid in hosts.hosts[0].pids():
        os.kill(pid, signal.SIGKILL)
    _, errors = outputs(processes, 60)[1]

    assert processes[1].returncode not in (0, None), errors
    assert re.search(r"rank [01]\b.*\(h1, 10\.77\.0\.1\)", errors), errors
    assert not hosts.hosts[1].pids()
