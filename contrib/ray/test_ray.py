"""`ray` passes the checks for launchers; on a real cluster of two raylets it trains, and ends what it started.

Ray listens on all addresses of a machine, so the tests give it a network of their own: `unshare --net`, as root.
"""

import functools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from stratagem_ray import driver
from torch.utils.data import DataLoader, TensorDataset

import stratagem
from stratagem.accelerators import CPUAccelerator
from stratagem.api.capabilities import Capabilities
from stratagem.errors import ConfigError, LaunchError
from stratagem_testing import LauncherConformance
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly

#: Beside this file where the wheel is tested, else in the repository.
PAGE = next(
    path
    for path in (Path(__file__).with_name("ray.md"), Path(__file__).parents[2] / "docs" / "ray.md")
    if path.exists()
)


@pytest.fixture(scope="module")
def cluster(network):
    """Two machines with two CPUs each, to which this process is connected."""
    from ray.cluster_utils import Cluster

    # Ray only counts GPUs, and tells actors their numbers.
    head = {"num_cpus": 2, "num_gpus": 3, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, include_dashboard=False)
    ray.init(address=cluster.address, logging_level=logging.WARNING)
    os.environ["RAY_ADDRESS"] = cluster.address
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield cluster
    os.environ.pop("RAY_ADDRESS", None)
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Runs write into the current folder, which is the actors' too. A slow machine gets time to start them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "START_S", 900.0)


def run_of(devices=2, num_nodes=1, accelerator="cpu", **options):
    launcher = {"name": "ray", **options}
    return stratagem.Run(
        strategy="ddp", accelerator=accelerator, devices=devices, num_nodes=num_nodes, launcher=launcher
    )


def assert_gone(pids, limit_s=300):
    deadline = time.monotonic() + limit_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still run"
        time.sleep(0.05)


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# --- A program, before there is a cluster -----------------------------------------------------------------

PROGRAM = """
    import os, sys, time
    import torch
    import stratagem
    from torch.utils.data import DataLoader, TensorDataset

    class Module(stratagem.Module):
        def __init__(self, wait=False):
            super().__init__()
            self.layer, self.wait = torch.nn.Linear(4, 1), wait

        def training_step(self, batch, batch_idx):
            if self.wait:
                print("WAITING", os.getpid(), flush=True)
                time.sleep(600)
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def main(run):
        if run.rank == 0:
            print("HELLO of rank", run.rank)
        return run.rank, run.world_size

    arguments = {"strategy": "ddp", "devices": 2, "launcher": {"name": "ray", "num_cpus": 1}, "accelerator": "cpu"}
    print("LAUNCHED", stratagem.Run(**arguments).launch(main))
    trainer = stratagem.Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False, **arguments
    )
    trainer.fit(Module(wait=True), DataLoader(TensorDataset(torch.ones(8, 4)), 4))
"""


def test_a_program_without_a_cluster_starts_one_and_ctrl_c_ends_it(network, tmp_path):
    """Its classes are in ``__main__``; what rank 0 prints is its output."""
    path, output = tmp_path / "train.py", tmp_path / "output"
    path.write_text(textwrap.dedent(PROGRAM))
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"RAY_TMPDIR": folder}
    try:
        with output.open("w") as file:
            program = subprocess.Popen(
                [sys.executable, str(path)], env=environment, stdout=file, stderr=file, start_new_session=True
            )
        deadline = time.monotonic() + 900
        while output.read_text().count("WAITING") < 1 and program.poll() is None:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        program.send_signal(signal.SIGINT)
        program.wait(900)
    finally:
        program.kill()
        shutil.rmtree(folder, ignore_errors=True)
    text = output.read_text()

    assert "no Ray cluster was found: started one on this machine" in text
    assert "LAUNCHED (0, 2)" in text
    assert "HELLO of rank 0" in text
    assert "KeyboardInterrupt" in text
    assert_gone([int(line.split()[-1]) for line in text.splitlines() if "WAITING" in line])


@pytest.mark.parametrize("option", ["launcher.ray.address", "RAY_ADDRESS"])
def test_an_address_where_no_cluster_answers_is_refused(network, monkeypatch, option):
    """Neither where nothing listens nor where another server does, which never answers."""
    monkeypatch.setattr(driver, "ANSWER_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if option == "RAY_ADDRESS":
            server.close()
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"{option} is '{address}', and no Ray cluster answers .*ray start"):
            run_of(address=None if option == "RAY_ADDRESS" else address).launch(print)


# --- Checks of every launcher ---


class TestRay(LauncherConformance):
    plugin = "ray"
    limit_s = 120

    @pytest.fixture(autouse=True)
    def _on_the_cluster(self, cluster):
        """Let the programs of the checks find it through RAY_ADDRESS."""


# --- Training ----------------------------------------------------------------------------------------------------


class Placed(Net):
    """Writes down on which raylet each rank is."""

    def on_fit_start(self):
        world = self.trainer.run.world
        node = ray.get_runtime_context().get_node_id()
        Path(f"place-{world.rank}").write_text(f"{world.node_rank} {world.local_rank} {node}")


def loader_of(batches, batch_size):
    return DataLoader(TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True))), batch_size)


def test_the_page_trains_on_two_machines_as_one_process_does(cluster, tmp_path):
    spread, packed, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    batches = joined_batches(10, 16)
    reference, norms = train_plainly(batches)

    names = {"stratagem": stratagem, "model": Placed(), "batches": loader_of(batches, 4)}
    exec(spread, names)
    assert relative_difference(names["model"].state_dict(), reference) < 1e-6
    assert max(norms) > 1
    assert (names["trainer"].global_step, names["trainer"].world_size) == (10, 4)
    places = [(tmp_path / f"place-{rank}").read_text().split() for rank in range(4)]
    assert [place[:2] for place in places] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert places[0][2] == places[1][2] != places[2][2] == places[3][2]

    names |= {"model": Placed(), "batches": loader_of(batches, 8)}
    exec(packed, names)
    assert relative_difference(names["model"].state_dict(), reference) < 1e-6
    places = [(tmp_path / f"place-{rank}").read_text().split() for rank in range(2)]
    assert [place[:2] for place in places] == [["0", "0"], ["1", "0"]]
    assert places[0][2] == places[1][2]

    assert names["trainer"].test(names["model"], names["batches"])[0]["test_loss"] > 0


# --- Failures ----------------------------------------------------------------------------------------------------


def fail(how, folder, run):
    (folder / str(run.rank)).write_text(str(os.getpid()))
    run.collectives.barrier()
    if run.rank == 1:
        how()
    run.collectives.barrier()


def raise_value_error():
    raise ValueError("out of order")


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_value_error, "rank 1 failed with ValueError: out of order"),
        (kill_self, r"rank 1 on [\d.]+ \(pid {1}\) died and left no error report"),
    ],
)
def test_the_cause_is_raised_and_all_others_end(cluster, tmp_path, how, message):
    with pytest.raises(LaunchError) as caught:
        run_of().launch(functools.partial(fail, how, tmp_path))

    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert re.search(message.format(*pids), str(caught.value))
    assert how is kill_self or "raise_value_error" in caught.value.__notes__[0]
    assert_gone(pids)


def test_what_the_cluster_does_not_have_is_an_error_at_once(cluster):
    with pytest.raises(ConfigError, match=r"asks for 3 nodes, each on another machine, with 2 CPU for the 2 processes"
                       r" of a node, and the Ray cluster has 2 machines: .* with 2 CPU"):  # fmt: skip
        run_of(num_nodes=3).launch(print)
    with pytest.raises(ConfigError, match=r"asks for 1 node, with 1 CPU, 1 tape for the 1 process"):
        run_of(devices=1, resources={"tape": 1}).launch(print)


def test_what_other_jobs_use_is_waited_for_until_the_timeout(cluster):
    other = placement_group([{"CPU": 2}] * 2, strategy="STRICT_SPREAD")
    try:
        assert other.wait(900)
        with pytest.raises(
            ConfigError, match=r"had too little free for 1 s, of 2 machines.*raise launcher.ray.placement_t"
        ):
            run_of(placement_timeout=1).launch(print)
    finally:
        remove_placement_group(other)


def test_no_resources_at_all_are_refused(cluster):
    with pytest.raises(ConfigError, match=r"launcher.ray.num_cpus is 0 and no other resource is asked for"):
        run_of(num_cpus=0).launch(print)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_gpus": 1}, r"launcher.ray.num_gpus is 1 and the accelerator is CPUAccelerator"),
        ({"resources": {"GPU": 1}}, r"launcher.ray.resources names GPU; expected .* set launcher.ray.num_gpus"),
        ({"placement": "STRICT_SPRED"}, r"launcher.ray.placement is 'STRICT_SPRED'.*STRICT_SPREAD"),
        ({"placement_timeout": 0}, r"launcher.ray.placement_timeout is 0"),
    ],
)
def test_options_that_contradict_are_refused(cluster, options, message):
    with pytest.raises(ConfigError, match=message):
        run_of(**options).launch(print)


class PretendGPU(CPUAccelerator):
    """One that trains on the CPU where a run on GPUs would use them."""

    capabilities = Capabilities(provides={"device:cuda"})
    indexed = True

    def count(self):
        return 2

    def device(self, index):
        return torch.device("cpu")


def gpus_of(run):
    return run.collectives.all_gather_object(os.environ["CUDA_VISIBLE_DEVICES"])


def test_a_process_sees_the_gpus_of_its_node_and_no_others(cluster):
    other = placement_group([{"GPU": 1}])
    try:
        assert other.wait(900)
        seen = run_of(accelerator=PretendGPU()).launch(gpus_of)
    finally:
        remove_placement_group(other)

    assert len(set(seen)) == 1
    assert len(set(seen[0].split(","))) == 2


def test_a_list_of_gpus_is_refused(cluster):
    with pytest.raises(ConfigError, match=r"devices is \[0, 1\] and the launcher is 'ray', which chooses the GPUs"):
        run_of(accelerator=PretendGPU(), devices=[0, 1]).launch(print)


def test_a_module_that_a_machine_lacks_is_named(cluster, tmp_path, monkeypatch):
    (tmp_path / "of_the_user.py").write_text("def main(run): pass")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_user

    with pytest.raises(ConfigError, match=r"cannot import a module of the script .*'of_the_user'.*working_dir"):
        run_of(devices=1).launch(of_the_user.main)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run_of(devices=1, runtime_env={"env_vars": {"PYTHONPATH": paths}}).launch(of_the_user.main)


def test_what_does_not_pickle_is_refused(cluster):
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to a Ray actor .*lock.*everything to pickle"):
        run_of().launch(lambda run: lock)


def test_another_cluster_than_the_connected_one_is_refused(cluster):
    with pytest.raises(ConfigError, match=r"launcher.ray.address is '127.0.0.1:1' and this program is connected to"):
        run_of(address="127.0.0.1:1").launch(print)


def wait_for_the_end(folder, run):
    (folder / f"raylet-{run.rank}").write_text(ray.get_runtime_context().get_node_id())
    run.collectives.barrier()
    time.sleep(600)


def test_a_machine_that_is_lost_is_named(cluster, tmp_path):
    """The last test: the cluster has one machine fewer."""
    (node,) = cluster.worker_nodes
    ranks = []

    def lose():
        paths, deadline = [tmp_path / f"raylet-{rank}" for rank in range(2)], time.monotonic() + 900
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks.extend(rank for rank, path in enumerate(paths) if path.read_text() == node.node_id)
        time.sleep(1)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(LaunchError) as caught:
        run_of(devices=1, num_nodes=2).launch(functools.partial(wait_for_the_end, tmp_path))
    thread.join()

    assert re.match(rf"rank {ranks[0]} on [\d.]+ \(pid \d+\) (died|was lost with its machine)", str(caught.value))
