"""Real processes of Open MPI and MPICH train as one process of plain PyTorch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("stratagem_environments_schedulers")
pytestmark = pytest.mark.xdist_group("mpi")

#: How each MPI starts ranks on this machine alone, as root and on few cores.
STARTERS = {
    "mpirun.openmpi": [
        "--oversubscribe", "--mca", "btl", "self,vader,tcp", "--mca", "btl_tcp_if_include", "lo", "--mca",
        "oob_tcp_if_include", "lo", "--mca", "btl_vader_single_copy_mechanism", "none",
    ],
    "mpiexec.hydra": ["-iface", "lo"],
}  # fmt: skip
PACKAGES = {"mpirun.openmpi": "openmpi-bin", "mpiexec.hydra": "mpich"}

MODEL = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 2, generator=generator))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))

def loss(model, batch):
    return 20 * nn.functional.mse_loss(model(batch[0]), batch[1])
"""
PROGRAM = f"""{MODEL}
import stratagem as sg

class Net(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        return loss(self.net, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    trainer = sg.Trainer(
        accelerator="cpu", max_epochs=2, enable_progress_bar=False, enable_checkpointing=False, logger=False,
        enable_model_summary=False, **json.loads(sys.argv[1]),
    )
    model = Net()
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("PMI_SIZE", "1")))
    trainer.fit(model, DataLoader(data(), batch_size=24 // size))
    # Not to the output, in which mpirun mixes the lines of its ranks.
    open(f"result-{{sys.argv[2]}}-{{trainer.global_rank}}.json", "w").write(json.dumps({{
        "rank": trainer.global_rank, "local": trainer.local_rank, "node": trainer.node_rank, "size": trainer.world_size,
        "weights": [p.flatten().tolist() for p in model.parameters()],
    }}))
"""


@pytest.fixture
def start(need, tmp_path):
    """Return a function that starts a program in ranks of an MPI, and returns each rank's result, or the messages."""

    def run(starter, ranks, *, options="{}", wrapper=None, programs=1, variables=None, fails=False):
        need(starter, package=PACKAGES[starter])
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        script = tmp_path / "rank.sh"
        calls = [f"{sys.executable} {program} '{options}' {number}\n" for number in range(programs)]
        script.write_text((wrapper or "") + "".join(calls))
        for left in tmp_path.glob("result-*.json"):
            left.unlink()
        command = [starter, *STARTERS[starter], "-np", str(ranks), "bash", str(script)]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        environment = os.environ | allowed | {"TMPDIR": str(tmp_path)} | (variables or {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=450)
        if fails:
            assert done.returncode != 0
            return done.stderr
        assert done.returncode == 0, done.stderr
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result-*.json"))]

    return run


def plain_weights():
    """Train in this process with plain PyTorch: the gradients of all ranks' batches, averaged."""
    names: dict = {}
    exec(textwrap.dedent(MODEL), names)
    model, norms = names["net"](), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for first in range(0, 48, 24):
            batch = names["data"]()[first : first + 24]
            optimizer.zero_grad()
            names["loss"](model, batch).backward()
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            optimizer.step()
    assert max(norms) > 1
    return [p.detach().flatten() for p in model.parameters()]


def check_weights(results, ranks):
    assert [each["rank"] for each in results] == list(range(ranks))
    assert {each["size"] for each in results} == {ranks}
    for each in results:
        for found, expected in zip(each["weights"], plain_weights(), strict=True):
            assert torch.allclose(torch.tensor(found), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.every_push("2-mpirun.openmpi")
@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_mpi_train_as_one_process(start, starter, ranks):
    """No variable tells an address: rank 0 chooses a port, and the others find it."""
    check_weights(start(starter, ranks), ranks)


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_ranks_of_mpi_train_as_one_process")
def test_two_programs_of_a_wrapper_script_do_not_meet_each_other(start, tmp_path):
    """Ranks that are done with the first program may start the second while rank 0 is still in the first."""
    found = start("mpiexec.hydra", 2, programs=2)

    check_weights(found[:2], 2)
    check_weights(found[2:], 2)
    assert not list(tmp_path.glob("stratagem-ports-*/*"))


def test_other_devices_than_ranks_are_refused(start):
    errors = start("mpiexec.hydra", 2, options='{"devices": 3}', fails=True)

    assert "devices is 3, which makes 3 processes on this node, and MPI_LOCALNRANKS is 2" in errors


#: Each rank becomes a node of its own: with a host name, and alone there.
ALONE_ON_A_NODE = """
if [ -z "$INSIDE" ]; then INSIDE=1 exec unshare --uts bash "$0"; fi
hostname node${OMPI_COMM_WORLD_RANK:-$PMI_RANK}
export OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1
[ -n "$PMI_RANK" ] && unset OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE || unset MPI_LOCALRANKID MPI_LOCALNRANKS
"""
#: The first two of three ranks share a node.
UNEVEN = """
if [ -z "$INSIDE" ]; then INSIDE=1 exec unshare --uts bash "$0"; fi
hostname node$((OMPI_COMM_WORLD_RANK / 2))
export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=$((2 - OMPI_COMM_WORLD_RANK / 2))
"""


@pytest.fixture
def own_host_names():
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("a rank cannot get a host name of its own: `unshare --uts` needs root")


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_ranks_of_mpi_train_as_one_process")
def test_mpi4py_tells_nodes_where_rank_0_is(start, own_host_names):
    pytest.importorskip("mpi4py")
    found = start("mpirun.openmpi", 2, wrapper=ALONE_ON_A_NODE, variables={"MASTER_ADDR": "127.0.0.1"})

    check_weights(found, 2)
    assert [each["node"] for each in found] == [0, 1]


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_ranks_of_mpi_train_as_one_process")
def test_nodes_with_different_numbers_of_ranks_train(start, own_host_names):
    pytest.importorskip("mpi4py")
    found = start("mpirun.openmpi", 3, wrapper=UNEVEN, variables={"MASTER_ADDR": "127.0.0.1"})

    check_weights(found, 3)
    assert [(each["node"], each["local"]) for each in found] == [(0, 0), (0, 1), (1, 0)]


@pytest.mark.sweep(guard="tests/cluster/test_mpi.py::test_other_devices_than_ranks_are_refused")
def test_mpi4py_of_another_mpi_is_explained(start, own_host_names):
    """The wheel uses Open MPI: under hydra it would be two worlds of one process each."""
    pytest.importorskip("mpi4py")
    errors = start("mpiexec.hydra", 2, wrapper=ALONE_ON_A_NODE, fails=True)

    assert "and mpi4py, which uses Open MPI" in errors
    assert "has a world of 1; expected mpi4py for the MPI whose mpiexec started this process" in errors
