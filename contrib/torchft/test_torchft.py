"""Replicas of `torchft_ddp`, `torchft_diloco` and `torchft_local_sgd` train together, die, and come back.

torchft's servers listen on all addresses of a machine, so the tests have a network of their own: `unshare --net`, as
root.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # what forks need is imported before them
import torchft.checkpointing
import torchft.coordination
import torchft.local_sgd
import torchft.manager
import torchft.process_group  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

import stratagem
from stratagem.errors import ConfigError, LaunchError
from stratagem_testing import StrategyConformance, run_in_processes
from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.reference import Net, data, joined_batches, part, relative_difference, train_plainly

CLONE_NEWNET = 0x40000000
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: Of the replicas, so that a test which fails ends soon.
SHORT = {"timeout": 20, "quorum_timeout": 20, "connect_timeout": 5, "hostname": "localhost"}


@pytest.fixture(scope="session", autouse=True)
def _network():
    """A network namespace that has only the loopback device; processes that are forked later are in it."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        pytest.skip("a network namespace can only be made by root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@contextlib.contextmanager
def lighthouse(min_replicas=2, join_timeout_ms=5000, heartbeat_timeout_ms=1000):
    """Run a lighthouse in a process, and name its address in the variable."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            server = torchft.coordination.LighthouseServer(
                bind="[::]:0",
                min_replicas=min_replicas,
                join_timeout_ms=join_timeout_ms,
                quorum_tick_ms=20,
                heartbeat_timeout_ms=heartbeat_timeout_ms,
            )
            os.write(writing, server.address().encode())
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        port = os.read(reading, 200).decode().rpartition(":")[2]
        os.environ["TORCHFT_LIGHTHOUSE"] = f"localhost:{port}"
        yield child
    finally:
        os.environ.pop("TORCHFT_LIGHTHOUSE", None)
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def become_replica(number, count):
    """Forget what the processes of one run know of each other: each is a replica, a run of its own."""
    for name in (*LAUNCH_VARIABLES, "STRATAGEM_STORE_HOSTED", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update(REPLICA_GROUP_ID=str(number), NUM_REPLICA_GROUPS=str(count))


def loader_of(batches, batch_size, shuffle=False):
    return DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True))), batch_size, shuffle)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trainer_of(name="torchft_ddp", inner="single_device", options=(), **arguments):
    strategy = [{"name": name, **SHORT, **dict(options)}, inner]
    return stratagem.Trainer(**(QUIET | {"strategy": strategy, "max_epochs": 1} | arguments))


# --- Parity ------------------------------------------------------------------------------------------------------


def train_replica(rank, world_size, batches, arguments):
    become_replica(rank, world_size)
    trainer, model = trainer_of(**arguments), Net(seed=rank)  # the replicas begin with the weights of one of them
    trainer.fit(model, part(batches, rank, world_size))
    return weights(model), trainer.global_step


@pytest.mark.parametrize(
    ("accumulate", "clip"), [(1, None), (1, 0.5), (3, None), (3, 0.5)], ids=["plain", "clipped", "window", "both"]
)
def test_two_replicas_train_as_one_process_does(accumulate, clip):
    batches = joined_batches(7, 16)
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    with lighthouse():
        results = run_in_processes(train_replica, 2, batches, arguments)
    expected = [train_plainly(batches, accumulate, clip, model=Net(seed=seed).net) for seed in range(2)]
    differences = [relative_difference(results[0][0], reference) for reference, _ in expected]

    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])
    assert min(differences) < 1e-6
    assert max(expected[0][1]) > 1
    print(f"difference {min(differences):.1e}")
