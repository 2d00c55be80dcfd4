"""Replicas of `torchft_ddp`, `torchft_diloco` and `torchft_local_sgd` train together, die, and come back.

torchft's servers listen on all addresses of a machine, so the tests have a network of their own: `unshare --net`, as
root.
"""

import contextlib
import ctypes
import os
import pickle
import re
import signal
import socket
import subprocess
import time
import traceback
import urllib.request

import pytest
import torch
import torch._dynamo  # what forks need is imported before them
import torchft.checkpointing
import torchft.coordination
import torchft.local_sgd
import torchft.manager
import torchft.process_group
from torch.utils.data import DataLoader, TensorDataset

import stratagem
from stratagem.api import CLOSURE_OPTIMIZERS, MANUAL_OPTIMIZATION, MULTIPLE_OPTIMIZERS
from stratagem.distributed.launched import die_with, libc
from stratagem.errors import ConfigError, LaunchError
from stratagem_ddp.strategy import DDPStrategy
from stratagem_testing import StrategyConformance, run_in_processes
from stratagem_testing.processes import LAUNCH_VARIABLES
from stratagem_testing.reference import (
    Branching,
    ByHand,
    Indexed,
    Lbfgs,
    Net,
    branching_batches,
    data,
    joined_batches,
    part,
    relative_difference,
    train_branching_plainly,
    train_plainly,
)

os.environ.setdefault("RUST_LOG", "warn")  # torchft reads it when its first server starts
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
def lighthouse(min_replicas=2):
    """Run a lighthouse in a process, and name its address in the variable."""
    reading, writing = os.pipe()
    libc()
    parent, child = os.getpid(), os.fork()
    if not child:
        try:
            die_with(parent)
            server = torchft.coordination.LighthouseServer(
                bind="[::]:0", min_replicas=min_replicas, join_timeout_ms=5000, quorum_tick_ms=20,
                heartbeat_timeout_ms=1000,
            )  # fmt: skip
            os.write(writing, server.address().encode())
            signal.pause()
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


# --- A replica that dies and comes back --------------------------------------------------------------------------


class Recorded(Net):
    """Writes down what each step trained on, and dies at batch `dies_at`.

    Replica 0 begins first, unless it cannot begin alone; it waits for the others, and for a third process to come back.
    """

    def __init__(self, seed, folder, dies_at=None, begins_alone=True):
        super().__init__(seed)
        self.folder, self.dies_at, self.begins_alone = folder, dies_at, begins_alone
        self.seen, self.at_start = [], None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self):
        if self.begins_alone and os.environ["REPLICA_GROUP_ID"] != "0":
            wait_until((self.folder / "began").exists)

    def on_train_start(self):
        (self.folder / "began").touch()

    def training_step(self, batch, batch_idx):
        if self.at_start is None:
            self.at_start = (self.trainer.global_step, self.trainer.current_epoch, batch_idx, weights(self))
        self.seen.append((self.trainer.current_epoch, batch_idx, [round(float(x), 5) for x in batch[0][:, 0]]))
        if self.dies_at == (self.trainer.current_epoch, batch_idx):
            os.kill(os.getpid(), signal.SIGKILL)
        if count := {(0, 0): 2, (1, 3): 3}.get((self.trainer.current_epoch, batch_idx)):
            if batch_idx:
                (self.folder / "moved on").touch()
            wait_until(lambda: len(known_replicas()) >= count)  # the next quorum waits for them
        return super().training_step(batch[:2], batch_idx)


def known_replicas():
    """Return the names of all replicas that the lighthouse has heard, each life with one of its own."""
    with urllib.request.urlopen(f"http://{os.environ['TORCHFT_LIGHTHOUSE']}/status") as page:
        return set(re.findall(r"stratagem_\d+:[\w-]+", page.read().decode()))


def wait_until(holds, limit_s=300):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def supervised(live, folder, number):
    """Call ``live(life)`` in a process, again if it was killed; return its result and how many were killed."""
    for life in range(3):
        path, child = folder / f"result-{number}-{life}", os.fork()
        if not child:
            code = 1
            try:
                path.write_bytes(pickle.dumps(live(life)))
                code = 0
            except BaseException:  # noqa: BLE001 - it is printed, and the process ends
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"replica {number} failed in life {life}"
            return pickle.loads(path.read_bytes()), life
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("killed three times")


def train_for_life(rank, world_size, folder, options, arguments, needs_both=False):
    become_replica(rank, world_size)

    def live(life):
        if life and not needs_both:  # the others find that it is gone
            wait_until((folder / "moved on").exists)
        dies_at = (0, 13) if rank == 1 and life == 0 else None
        model = Recorded(rank + 10 * life, folder, dies_at, begins_alone=not needs_both)
        trainer = trainer_of(options=options, max_epochs=3, **arguments)
        trainer.fit(model, loader_of(joined_batches(16, 8), 4, shuffle=True))
        return {
            "weights": weights(model), "seen": model.seen, "at_start": model.at_start, "steps": trainer.global_step,
            "skipped": trainer.position.skipped_steps, "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "momentum": [state["momentum_buffer"] for state in trainer.optimizers[0].state.values()],
        }  # fmt: skip

    return supervised(live, folder, rank)


def test_a_replica_that_is_killed_comes_back_with_the_weights_of_the_other(tmp_path):
    with lighthouse(min_replicas=1):
        (stayed, _), (came_back, deaths) = run_in_processes(train_for_life, 2, tmp_path, {}, {})
    step, epoch, batch, begun_with = came_back["at_start"]

    assert deaths == 1
    # The one that stayed lost no step: it trained each of its batches once.
    assert stayed["steps"] == came_back["steps"] == 3 * 16
    assert stayed["skipped"] == 0
    assert [each[:2] for each in stayed["seen"]] == [(e, b) for e in range(3) for b in range(16)]
    # The other one continues within an epoch, with the batches that it would have read then, and not with the first.
    assert step == 16 * epoch + batch > 16 + 3
    assert [each[:2] for each in came_back["seen"]] == [
        (e, b) for e in range(3) for b in range(16) if (e, b) >= (epoch, batch)
    ]
    for mine, others in zip(came_back["seen"][-16:], stayed["seen"][-16:], strict=True):
        assert not set(mine[2]) & set(others[2])
    assert relative_difference(begun_with, weights(Net(seed=11))) > 0.1  # not with its own
    assert came_back["lr"] == stayed["lr"] == pytest.approx(5e-3 * 0.99**48)
    assert all(torch.equal(stayed["weights"][name], came_back["weights"][name]) for name in stayed["weights"])
    for one, other in zip(stayed["momentum"], came_back["momentum"], strict=True):
        assert torch.equal(one, other)


def test_a_replica_that_dies_alone_with_too_few_left_is_waited_for(tmp_path):
    """The steps are the same as without a failure: no step is made with the gradients of one replica."""
    with lighthouse(min_replicas=1):
        (stayed, _), (came_back, deaths) = run_in_processes(
            train_for_life, 2, tmp_path, {"min_replica_size": 2, "quorum_timeout": 60}, {}, True
        )

    assert deaths == 1
    assert came_back["at_start"][:3] == (13, 0, 13)
    assert stayed["steps"] == came_back["steps"] == 48
    assert all(torch.equal(stayed["weights"][name], came_back["weights"][name]) for name in stayed["weights"])


def test_a_replica_of_diloco_comes_back(tmp_path):
    arguments, options = {"name": "torchft_diloco"}, {"sync_every": 4}
    with lighthouse(min_replicas=1):
        (stayed, _), (came_back, deaths) = run_in_processes(train_for_life, 2, tmp_path, options, arguments)

    assert deaths == 1
    assert stayed["steps"] == came_back["steps"] == 48
    assert [each[:2] for each in stayed["seen"]] == [(e, b) for e in range(3) for b in range(16)]
    step, epoch, batch, _ = came_back["at_start"]
    assert step == 16 * epoch + batch
    assert step % 4 == 0
    assert came_back["lr"] == stayed["lr"] == pytest.approx(5e-3 * 0.99**48)
    assert all(torch.equal(stayed["weights"][name], came_back["weights"][name]) for name in stayed["weights"])


# --- Periodic exchanges ------------------------------------------------------------------------------------------


class Kept(Net):
    """Keeps its weights after each batch: those after the last one are not averaged yet."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.after_batch = weights(self)


def train_periodically(rank, world_size, batches, name, options):
    become_replica(rank, world_size)
    trainer, model = trainer_of(name, options=options), Kept()
    trainer.fit(model, part(batches, rank, world_size))
    return weights(model), model.after_batch


def train_with_own_strategy(rank, world_size, batches, strategy):
    trainer, model = stratagem.Trainer(**QUIET, strategy=strategy, devices=world_size, max_epochs=1), Kept()
    trainer.fit(model, part(batches, rank, world_size))
    return weights(model), model.after_batch


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        (("torchft_diloco", {"sync_every": 3}), {"name": "diloco", "period": 3}),
        (
            ("torchft_diloco", {"sync_every": 3, "outer_lr": 0.5, "outer_momentum": 0.5, "nesterov": False}),
            {"name": "diloco", "period": 3, "outer_lr": 0.5, "outer_momentum": 0.5, "nesterov": False},
        ),
        (("torchft_local_sgd", {"sync_every": 3}), {"name": "local_sgd", "period": 3}),
    ],
    ids=["diloco", "classical", "local_sgd"],
)
def test_exchanges_train_as_the_strategies_for_one_run_do(theirs, own):
    batches = joined_batches(8, 16)  # two exchanges, and two steps that are averaged at the end
    with lighthouse():
        results = run_in_processes(train_periodically, 2, batches, *theirs)
    reference = run_in_processes(train_with_own_strategy, 2, batches, own)
    difference = max(relative_difference(results[rank][0], reference[rank][0]) for rank in range(2))
    within = max(relative_difference(results[rank][1], reference[rank][1]) for rank in range(2))

    assert difference < 1e-6
    assert within < 1e-6
    assert relative_difference(results[0][1], results[1][1]) > 1e-3  # they differ between two exchanges
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in results[0][0])


def train_with_torchfts_own(rank, world_size, batches):
    """Train with torchft's DiLoCo in a loop of torchft's documentation."""
    become_replica(rank, world_size)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module = Net()
    layers = [module.net[0], module.net[2], module.net[4]]
    optimizer = module.configure_optimizers()
    manager = torchft.manager.Manager(
        pg=torchft.process_group.ProcessGroupGloo(), load_state_dict=module.load_state_dict,
        state_dict=module.state_dict, min_replica_size=world_size, use_async_quorum=False, rank=0, world_size=1,
        store_addr="localhost", store_port=store.port, hostname="localhost", replica_id=f"plain_{rank}",
        lighthouse_addr=f"http://{os.environ['TORCHFT_LIGHTHOUSE']}", init_sync=False,
    )  # fmt: skip
    outer = [torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True) for each in layers]
    with torchft.local_sgd.DiLoCo(manager, layers, optimizer, outer, sync_every=6):
        for x, y in part(batches, rank, world_size):
            module.criterion(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    manager.shutdown(wait=False)
    return weights(module)


def test_fragments_train_as_torchfts_own_diloco_does():
    batches = joined_batches(13, 16)
    with lighthouse():
        results = run_in_processes(train_periodically, 2, batches, "torchft_diloco", {"sync_every": 6, "fragments": 3})
    with lighthouse():
        reference = run_in_processes(train_with_torchfts_own, 2, batches)
    difference = max(relative_difference(results[rank][1], reference[rank]) for rank in range(2))

    assert difference < 1e-6


# --- Replicas of several processes, spares -----------------------------------------------------------------------


def train_group(rank, world_size, batches, inner, accumulate):
    become_replica(rank, world_size)
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    trainer = trainer_of(inner=inner, devices=2, launcher="fork", **arguments)
    model = Net(seed=rank)
    trainer.fit(model, loader_of(batches, 4))
    return weights(model), trainer.global_step


@pytest.mark.parametrize(("inner", "accumulate"), [("ddp", 3), ("fsdp", 1)])
def test_replicas_of_two_processes_each_train_as_one_process_does(inner, accumulate):
    batches = joined_batches(6, 16)
    with lighthouse():
        results = run_in_processes(train_group, 2, batches, inner, accumulate)
    expected = [train_plainly(batches, accumulate, 0.5, model=Net(seed=seed).net)[0] for seed in range(2)]
    difference = min(max(relative_difference(result[0], each) for result in results) for each in expected)

    assert [result[1] for result in results] == [6 // accumulate] * 2
    assert difference < 1e-6


def test_a_spare_contributes_nothing():
    batches = joined_batches(5, 24)
    with lighthouse(min_replicas=3):
        options = {"world_size_mode": "fixed_with_spares", "min_replica_size": 2}
        results = run_in_processes(train_replica, 3, batches, {"options": options})
    of_two = [tuple(tensor[:16] for tensor in batch) for batch in batches]
    expected = [train_plainly(of_two, model=Net(seed=seed).net)[0] for seed in range(3)]

    assert min(relative_difference(results[2][0], reference) for reference in expected) < 1e-6


def train_branching(rank, world_size, batches):
    become_replica(rank, world_size)
    trainer, model = trainer_of(), Branching()
    trainer.fit(model, part(batches, rank, world_size))
    return weights(model)


def test_a_parameter_that_one_replica_does_not_use_counts_as_zero_there():
    batches = branching_batches(4, 16, 2)
    expected, norms = train_branching_plainly(Branching(), batches, 2)
    with lighthouse():
        results = run_in_processes(train_branching, 2, batches)

    assert max(relative_difference(result, expected) for result in results) < 1e-6
    assert max(norms) > 1


# --- Data --------------------------------------------------------------------------------------------------------


class Counting(Indexed):
    def validation_step(self, batch, batch_idx):
        self.validated = [*getattr(self, "validated", []), *batch[2].tolist()]
        return super().validation_step(batch[:2], batch_idx)


def read_a_part(rank, world_size, shuffle, own_sampler):
    become_replica(rank, world_size)
    set_of_samples = TensorDataset(*data(36), torch.arange(36))
    sampler = torch.utils.data.DistributedSampler(set_of_samples, 4, 2 + rank, shuffle=False) if own_sampler else None
    model = Counting()
    trainer = trainer_of(max_epochs=2, num_sanity_val_steps=0, limit_val_batches=100)
    loader = DataLoader(set_of_samples, 3, shuffle=shuffle, sampler=sampler)
    trainer.fit(model, loader, DataLoader(set_of_samples, 6))
    return model.indices, model.validated


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_replica_reads_its_part_and_validates_with_all(shuffle):
    with lighthouse():
        (first, validated), (second, _) = run_in_processes(read_a_part, 2, shuffle, False)

    assert sorted(first[:18] + second[:18]) == sorted(first[18:] + second[18:]) == list(range(36))
    assert (first[:18] != first[18:]) is shuffle
    assert validated == list(range(36)) * 2


def test_a_sampler_that_divides_the_data_is_left_alone():
    with lighthouse():
        (first, _), (second, _) = run_in_processes(read_a_part, 2, False, True)

    assert len(first) == 18
    assert not set(first) & set(second)


# --- Checkpoints -------------------------------------------------------------------------------------------------


def train_and_resume(rank, world_size, batches, first, second):
    become_replica(0, 1)
    names = [first, second]
    for index, name in enumerate(names):
        strategy = [{"name": name, **SHORT}, "single_device"] if name.startswith("torchft") else name
        trainer = stratagem.Trainer(**QUIET, strategy=strategy, max_epochs=2, max_steps=4 + 6 * index)
        model = Net(seed=index)
        trainer.fit(model, batches, ckpt_path="one.ckpt" if index else None)
        trainer.save_checkpoint("one.ckpt")
        trainer.run.close()
    return weights(model)


@pytest.mark.parametrize(
    ("first", "second"),
    [("torchft_ddp", "ddp"), ("ddp", "torchft_ddp"), ("torchft_ddp", "torchft_ddp")],
)
def test_checkpoints_are_read_by_other_strategies(first, second):
    batches = joined_batches(5, 16)
    with lighthouse(min_replicas=1):
        (result,) = run_in_processes(train_and_resume, 1, batches, first, second)
    expected, _ = train_plainly(batches * 2)

    assert relative_difference(result, expected) < 1e-6


def resume_diloco(rank, world_size, batches, stops):
    become_replica(rank, world_size)
    name = f"replica-{rank}.ckpt"
    for index, stop in enumerate(stops):
        trainer = trainer_of("torchft_diloco", options={"sync_every": 4}, max_steps=stop)
        model = Saving(name if index + 1 < len(stops) else None)
        trainer.fit(model, part(batches, rank, world_size), ckpt_path=name if index else None)
        trainer.run.close()
    return weights(model)


class Saving(Net):
    """Saves after its sixth batch, within a period."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.path and batch_idx == 5:
            self.trainer.save_checkpoint(self.path)


def test_diloco_resumes_within_a_period():
    batches = joined_batches(12, 16)
    with lighthouse():
        expected = run_in_processes(resume_diloco, 2, batches, [12])
    with lighthouse():
        resumed = run_in_processes(resume_diloco, 2, batches, [7, 12])

    assert relative_difference(resumed[0], expected[0]) < 1e-6
    assert relative_difference(resumed[1], expected[1]) < 1e-6


# --- What is refused, and what fails -----------------------------------------------------------------------------


def failure_of(rank, world_size, arguments, environment):
    become_replica(rank, world_size)
    os.environ.update(environment)
    began = time.monotonic()
    try:
        trainer_of(**arguments).fit(Net(), joined_batches(400, 4))
    except Exception as error:  # noqa: BLE001 - compared by the test
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


def the_failure(arguments=(), world_size=1, **environment):
    return run_in_processes(failure_of, world_size, dict(arguments), environment)[0]


def test_an_address_where_nothing_listens_is_refused():
    kind, text, seconds = the_failure(TORCHFT_LIGHTHOUSE="localhost:1")
    assert (kind, seconds < 10) == ("ConfigError", True)
    assert "TORCHFT_LIGHTHOUSE is 'localhost:1', and nothing listens there (Connection refused)" in text
    assert "torchft_lighthouse --min_replicas 1" in text
    kind, text, _ = the_failure({"options": {"lighthouse": "http://no-such-host:29510"}})
    assert kind == "ConfigError"
    assert "strategy.torchft_ddp.lighthouse is 'http://no-such-host:29510', and nothing listens there" in text


def test_a_server_that_is_not_a_lighthouse_is_refused_in_time():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        kind, text, seconds = the_failure({"options": {"lighthouse": address, "connect_timeout": 2}})
    assert kind == "ConfigError"
    assert f"strategy.torchft_ddp.lighthouse is '{address}', and no lighthouse answers there" in text
    assert seconds < 20


@pytest.mark.parametrize("address", ["", "localhost", "ftp://localhost:1"])
def test_what_is_not_an_address_is_refused(address):
    kind, text, _ = the_failure(TORCHFT_LIGHTHOUSE=address)
    assert kind == "ConfigError"
    assert "TORCHFT_LIGHTHOUSE" in text


def test_too_few_replicas_are_waited_for_and_then_named():
    with lighthouse(min_replicas=2):
        kind, text, seconds = the_failure({"options": {"quorum_timeout": 2}})
    assert kind == "LaunchError"
    assert "no quorum of replicas was reached after step 0" in text
    assert seconds < 20
    with lighthouse(min_replicas=1):
        kind, text, _ = the_failure({"options": {"quorum_timeout": 2, "min_replica_size": 2}})
    assert kind == "LaunchError"
    assert "strategy.torchft_ddp.min_replica_size is 2 and 1 replica was there for 2 s" in text


class Ending(Net):
    """Ends the lighthouse at its third batch."""

    def __init__(self, child):
        super().__init__()
        self.child = child

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            os.kill(self.child, signal.SIGKILL)


def lose_the_lighthouse(rank, world_size, child):
    become_replica(0, 1)
    with pytest.raises(LaunchError) as caught:
        trainer_of(options={"quorum_timeout": 3}).fit(Ending(child), joined_batches(10, 4))
    return str(caught.value)


def test_a_lighthouse_that_is_lost_during_training_ends_it():
    with lighthouse(min_replicas=1) as child:
        (text,) = run_in_processes(lose_the_lighthouse, 1, child)
    assert "no quorum of replicas was reached after step 3" in text or "after step 4" in text
    assert "start the lighthouse" in text


def test_exchanges_that_all_fail_end_training(monkeypatch):
    monkeypatch.setattr(torchft.process_group.ProcessGroupGloo, "allreduce", lambda *_: 1 / 0)
    with lighthouse(min_replicas=1):
        kind, text, _ = the_failure({"options": {"quorum_timeout": 2}})
    assert kind == "LaunchError"
    assert "1 replica was there for 2 s, and every exchange of strategy.torchft_ddp failed after step 0 (divis" in text


def differ(rank, world_size):
    arguments = {"options": {"timeout": 3, "quorum_timeout": 3}, "accumulate_grad_batches": 1 + rank, "max_steps": 4}
    return failure_of(rank, world_size, arguments, {})[1]


def test_replicas_that_train_differently_are_refused():
    with lighthouse():
        texts = run_in_processes(differ, 2)
    assert any("accumulate_grad_batches is" in text and "in another one" in text for text in texts)


class Thawing(Net):
    """The first layer is trained in the first part of a fit only, or in the last part only."""

    def __init__(self, seed, at_first):
        super().__init__(seed)
        self.at_first = at_first
        self.net[0].requires_grad_(at_first)

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(self.at_first == (batch_idx < 3))


def thaw(rank, world_size, name, at_first):
    become_replica(rank, world_size)
    model = Thawing(rank, at_first)
    try:
        trainer_of(name, options={"sync_every": 2}).fit(model, part(joined_batches(6, 16), rank, world_size))
    except ConfigError as error:
        return str(error)
    return weights(model)


@pytest.mark.parametrize("name", ["torchft_local_sgd", "torchft_diloco"])
def test_a_layer_may_be_frozen_and_not_thawed_between_exchanges(name):
    with lighthouse():
        frozen = run_in_processes(thaw, 2, name, True)
        refused = run_in_processes(thaw, 2, name, False)

    assert all(torch.equal(frozen[0][key], frozen[1][key]) for key in frozen[0])
    assert all("'net.0.weight' was frozen when training began and is trained now" in text for text in refused)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"name": "torchft_ddp", "lighthous": "x:1"}, "lighthous.*did you mean 'lighthouse'"),
        ({"name": "torchft_ddp", "replica_id": 2, "num_replicas": 2}, r"replica_id is 2 with num_replicas=2"),
        ({"name": "torchft_ddp", "min_replica_size": 0}, "min_replica_size is 0"),
        ({"name": "torchft_ddp", "world_size_mode": "fixed"}, "fixed_with_spares"),
        ({"name": "torchft_diloco", "sync_every": 4, "fragments": 3}, "sync_every is 4 with fragments=3"),
        (["torchft_ddp", "torchft_diloco", "ddp"], "cannot be used with strategy 'torchft_diloco'"),
        (["torchft_diloco", "diloco", "ddp"], "teams"),
        (["torchft_ddp", "dp"], "within-team"),
    ],
)
def test_options_and_combinations_that_cannot_work_are_refused(strategy, message):
    with pytest.raises(ConfigError, match=message):
        stratagem.Trainer(**QUIET, strategy=strategy)


def test_a_loss_scale_is_refused():
    with pytest.raises(ConfigError, match="loss-scaling"):
        stratagem.Trainer(**QUIET, strategy="torchft_ddp", precision="16-mixed")


@pytest.mark.parametrize(("make", "message"), [(ByHand, "'manual-optimization'"), (Lbfgs, "LBFGS")])
def test_modules_that_cannot_be_trained_are_refused(make, message, monkeypatch):
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "1")
    with lighthouse(min_replicas=1), pytest.raises(ConfigError, match=message):
        trainer_of().fit(make(), joined_batches(1, 4))


def test_a_replica_needs_its_number():
    with lighthouse(min_replicas=1), pytest.raises(ConfigError, match="replica_id is not set and neither is REPLICA_G"):
        trainer_of().fit(Net(), joined_batches(1, 4))


class Skipping(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def skip(rank, world_size):
    become_replica(0, 1)
    with pytest.raises(ConfigError, match="no gradients were averaged over the replicas"):
        trainer_of().fit(Skipping(), joined_batches(3, 4))


def test_a_batch_cannot_be_skipped():
    with lighthouse(min_replicas=1):
        run_in_processes(skip, 1)


# --- Checks of every strategy ------------------------------------------------------------------------------------


class Alone(StrategyConformance):
    """One replica of one or two processes: it trains as the strategy inside."""

    limit_s = 300
    unplannable = "averages with other runs, and a plan is of one"

    @pytest.fixture(autouse=True, scope="class")
    def _alone(self):
        with lighthouse(min_replicas=1), pytest.MonkeyPatch.context() as patch:
            patch.setenv("REPLICA_GROUP_ID", "0")
            patch.setenv("NUM_REPLICA_GROUPS", "1")
            yield

    def claims(self, word):
        refused = {MANUAL_OPTIMIZATION, MULTIPLE_OPTIMIZERS, CLOSURE_OPTIMIZERS}
        return word in (self.capabilities.provides | DDPStrategy.capabilities.provides) - refused

    def choose(self, **arguments):
        chosen = super().choose(**arguments)
        return chosen | {"strategy": [chosen["strategy"], "ddp"]}

    def test_a_second_run_is_like_the_first(self):
        pytest.skip("the check passes the strategy alone, without one for several processes inside")


class TestEveryStep(Alone):
    plugin = "torchft_ddp"

    @property
    def _is_outer(self):
        return False  # compare it with one process


class TestPeriodic(Alone):
    plugin = "torchft_diloco"


def train_one_after_the_other(rank, world_size, batches):
    become_replica(rank, world_size)
    trainer = trainer_of()
    results = []
    for seed in range(2):
        model = Net(seed=seed + rank)
        trainer.fit(model, part(batches, rank, world_size))
        results.append(weights(model))
    trainer.run.close()
    second = trainer_of()
    model = Net(seed=rank)
    second.fit(model, part(batches, rank, world_size))
    return [*results, weights(model)]


def test_a_second_module_and_a_second_run_begin_as_the_first():
    batches = joined_batches(3, 16)
    with lighthouse():
        first, second = run_in_processes(train_one_after_the_other, 2, batches)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    expected = [train_plainly(batches, model=Net(seed=seed).net)[0] for seed in range(2)]
    assert min(relative_difference(first[2], each) for each in expected) < 1e-6
