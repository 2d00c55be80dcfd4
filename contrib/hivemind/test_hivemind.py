"""Peers in processes of their own train as one process does; they join, leave and die. All listen on 127.0.0.1 only."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from stratagem_hivemind import HivemindStrategy
from stratagem_hivemind.checks import addresses_of_peers

import stratagem
from stratagem.errors import ConfigError
from stratagem_testing import StrategyConformance
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
TOLERANCE = 1e-6
#: Of a process that trains: much more than it takes, since the machine may be busy.
LIMIT_S = 150
NOBODY = "/p2p/12D3KooWAHzsdP7isaNYUwVNAMh6fCFBzFXhrWhoq68Q8N5VAWnh"

#: Trains one peer. Each test writes its options as JSON.
PEER = '''
import json, os, signal, sys, time
from pathlib import Path
import torch
import stratagem
from stratagem_hivemind import HivemindStrategy
from stratagem_testing.reference import Net, Scheduled, joined_batches, part


class Peer(Scheduled if "--scheduled" in sys.argv else Net):
    """Keeps the weights after each step of the swarm, and waits or dies where the test wants it."""

    def on_train_batch_start(self, batch, batch_idx):
        steps = strategy._swarm.steps if strategy._swarm else -1
        if steps >= 0:
            kept[steps] = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        if batch_idx == given.get("hold_at") and steps >= 0:
            Path("holding").touch()
            while len(strategy._swarm.records()) < 2:
                time.sleep(0.05)
        self.net[0].requires_grad_(batch_idx >= given.get("thaw_at", 0))
        if batch_idx == given.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "count_peers" in given:
            seen.add(strategy.num_peers if self.trainer.is_global_zero else refusals())
        if batch_idx == given.get("fail_at"):
            raise ValueError("out of order")


def refusals():
    """Return the errors of what a process has not that is not rank 0 of its peer."""
    errors = []
    for name in ("dht", "num_peers"):
        try:
            errors.append(f"{name} is {getattr(strategy, name)}")
        except stratagem.errors.ConfigError as error:
            errors.append(str(error))
    return "; ".join(errors)


given = json.loads(Path(sys.argv[1]).read_text())
kept, seen = {}, set()
strategy = HivemindStrategy(host_maddrs=["/ip4/127.0.0.1/tcp/0"], **given["strategy"])
trainer = stratagem.Trainer(
    strategy=[strategy, given["inside"]] if "inside" in given else strategy, accelerator="cpu",
    logger=False, enable_progress_bar=False, enable_checkpointing=False, **{"max_epochs": 1} | given["trainer"],
)
if int(os.environ.get("LOCAL_RANK", 0)) == 0:
    address = str(strategy.dht.get_visible_maddrs()[0])
    Path(given["address"] + ".part").write_text(address)
    os.rename(given["address"] + ".part", given["address"])
batches = part(joined_batches(given["batches"], given["joined"]), given["number"], given["peers"])
batches = batches[given["begin"]:given.get("end")]
if "inside" in given:  # the trainer divides a loader over its processes
    samples = torch.utils.data.TensorDataset(*map(torch.cat, zip(*batches)))
    batches = torch.utils.data.DataLoader(samples, given["joined"] // given["peers"] // given["trainer"]["devices"])
model = Peer(given["seed"])
model.net[0].requires_grad_("thaw_at" not in given)
trainer.fit(model, batches, ckpt_path=given.get("ckpt_path"))
steps = strategy.state_dict()["steps"]
if seen:
    print("seen:", *seen, flush=True)
if "save" in given:
    trainer.save_checkpoint(given["save"])
if trainer.is_global_zero:
    result = {"weights": model.state_dict(), "kept": kept, "skipped": trainer.position.skipped_steps, "steps": steps,
              "lr": trainer.run.optimizers[0].param_groups[0]["lr"], "sigint": str(signal.getsignal(signal.SIGINT))}
    torch.save(result, given["result"])
'''


class Peers:
    """Starts peers, and reads what they trained."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        (folder / "peer.py").write_text(PEER)

    def start(
        self, number=0, *, peers=2, batches=4, joined=16, begin=0, arguments=(), trainer=None, strategy=None, **more
    ):
        """Start peer `number` of `peers`, which trains its part of joined batches; return its process."""
        first = self.folder / "address0"
        options = {"matchmaking_time": 3.0, "averaging_timeout": 60.0, "min_peers": 1}
        if number > 0:
            self.wait_for(first)
            options["initial_peers"] = [first.read_text()]
        given = {
            "number": number, "peers": peers, "batches": batches, "joined": joined, "seed": number, "begin": begin,
            "strategy": options | (strategy or {}), "trainer": trainer or {},
            "address": str(self.folder / f"address{number}"), "result": str(self.folder / f"result{number}"),
        } | more  # fmt: skip
        path = self.folder / f"given{number}.json"
        path.write_text(json.dumps(given))
        output = (self.folder / f"output{number}").open("w")
        process = subprocess.Popen(
            [sys.executable, "peer.py", str(path), *arguments], cwd=self.folder, stdout=output, stderr=output,
            env=os.environ | {"STRATAGEM_TEST_PEERS": str(self.folder)},
        )  # fmt: skip
        self.started.append(process)
        return process

    def wait_for(self, path):
        deadline = time.monotonic() + LIMIT_S
        while not path.exists():
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.05)

    def results(self, *numbers):
        for process in self.started:
            process.wait(LIMIT_S)
        paths = [self.folder / f"result{number}" for number in numbers or range(len(self.started))]
        assert all(path.exists() for path in paths), self.outputs()
        return [torch.load(path) for path in paths]

    def outputs(self):
        return "\n\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("output*")))

    def left(self):
        """Return the processes that peers started, and that run."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                mine = folder.name.isdigit() and f"STRATAGEM_TEST_PEERS={self.folder}".encode() in (
                    folder / "environ"
                ).read_bytes().split(b"\0")
                if mine and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append((int(folder.name), (folder / "cmdline").read_text().replace("\0", " ")))
        return found

    def assert_nothing_is_left(self):
        deadline = time.monotonic() + LIMIT_S
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.fixture
def peers(tmp_path, monkeypatch):
    for name in ("INITIAL_PEERS", "PL_INITIAL_PEERS"):
        monkeypatch.delenv(name, raising=False)
    peers = Peers(tmp_path)
    yield peers
    for process in peers.started:
        if process.poll() is None:
            process.kill()
            process.wait(900)
    for pid, _ in peers.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def plainly(batches, **options):
    weights, norms = train_module_plainly(Net(), batches, **options)
    assert max(norms) > 1
    return weights


# --- Parity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(("accumulate", "target"), [(1, None), (1, 48), (3, None)])
def test_two_peers_train_as_one_process_does(peers, accumulate, target, clip):
    """`target` is three batches of both peers."""
    trainer = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    strategy = {"min_peers": 2, "target_batch_size": target, "batch_size": 8}
    for number in range(2):
        peers.start(number, batches=6, trainer=trainer, strategy=strategy)
    results = peers.results()

    reference = plainly(joined_batches(6, 16), accumulate=3 if target else accumulate, max_norm=clip)
    for result in results:
        assert relative_difference(result["weights"], reference) < TOLERANCE
        assert result["skipped"] == (4 if target else 0)
        assert result["sigint"] == str(signal.getsignal(signal.SIGINT))
    peers.assert_nothing_is_left()
    assert re.search(r"first peer of 'stratagem'; others join with\n    INITIAL_PEERS=/ip4/127", peers.outputs())


def test_a_peer_may_be_several_processes(peers):
    """A peer of two processes with 8 samples each, and one of one process with 16."""
    peers.start(0, joined=32, strategy={"min_peers": 2}, inside="ddp", trainer={"devices": 2}, count_peers=True)
    peers.start(1, joined=32, strategy={"min_peers": 2}, count_peers=True)
    results = peers.results()

    reference = plainly(joined_batches(4, 32))
    outputs = [(peers.folder / f"output{number}").read_text() for number in range(2)]
    assert "seen: 2\n" in outputs[0]
    assert "seen: 2\n" in outputs[1]
    assert "dht of strategy 'hivemind' was read on rank 1 of a peer; expected rank 0" in outputs[0]
    assert "num_peers of strategy 'hivemind' was read on rank 1; expected rank 0" in outputs[0]
    assert all(relative_difference(result["weights"], reference) < TOLERANCE for result in results)
    peers.assert_nothing_is_left()


# --- Peers that come and go --------------------------------------------------------------------------------------


def halves_then_one(joined, together):
    """Return the batches of two peers for the first steps, and those of the first peer for the rest."""
    return joined[:together] + part(joined[together:], 0, 2)


@pytest.mark.parametrize("end", ["leaves", "is killed", "fails"])
def test_the_others_go_on_when_a_peer_is_gone(peers, end):
    joined = joined_batches(7, 16)
    peers.start(0, batches=7, strategy={"min_peers": 2})
    if end == "leaves":
        peers.start(1, batches=3, strategy={"min_peers": 2})
    else:
        peers.start(1, batches=7, strategy={"min_peers": 2}, **{"die_at" if end == "is killed" else "fail_at": 3})
    (result,) = peers.results(0)

    assert relative_difference(result["weights"], plainly(halves_then_one(joined, 3))) < TOLERANCE
    peers.assert_nothing_is_left()


def test_a_late_peer_receives_the_state_of_the_others(peers):
    """The second has other weights, and comes when the first has made three steps. Schedulers are part of the state."""
    patient = {"matchmaking_time": 10.0}  # on a busy machine: a peer that finds nobody in time steps alone
    peers.start(0, batches=7, hold_at=3, strategy=patient, arguments=["--scheduled"])
    peers.wait_for(peers.folder / "holding")
    peers.start(1, batches=7, begin=3, strategy=patient, arguments=["--scheduled"])
    first, second = peers.results()

    common = sorted(set(first["kept"]) & set(second["kept"]))
    assert common
    assert common[0] >= 3
    assert 0 not in second["kept"]
    for step in common:
        assert relative_difference(first["kept"][step], second["kept"][step]) < TOLERANCE
    assert first["lr"] == pytest.approx(5e-3 * 0.9 ** first["steps"])
    assert second["lr"] == pytest.approx(5e-3 * 0.9 ** second["steps"])


def test_peers_with_another_model_are_refused(peers):
    peers.start(0, batches=3, hold_at=1)
    peers.wait_for(peers.folder / "holding")
    made = 'model = Peer(given["seed"])'
    (peers.folder / "peer.py").write_text(PEER.replace(made, made + "; model.more = torch.nn.Linear(2, 2)"))
    second = peers.start(1)
    second.wait(LIMIT_S)

    assert "run_id='stratagem' train another model or optimizer" in (peers.folder / "output1").read_text()
    assert second.returncode == 1


# --- Checkpoints -------------------------------------------------------------------------------------------------


def test_a_checkpoint_moves_to_ddp_and_back(peers, tmp_path):
    """Epochs of two batches under hivemind, ddp and hivemind, each with other data: as six of one process."""
    saved = [str(tmp_path / f"{number}.ckpt") for number in range(2)]
    for number in range(2):
        save = str(tmp_path / f"peer{number}.ckpt")
        peers.start(number, batches=6, end=2, strategy={"min_peers": 2}, save=save)
    peers.results()
    (tmp_path / "peer0.ckpt").rename(saved[0])
    (tmp_path / "address0").unlink()

    program = tmp_path / "under_ddp.py"
    program.write_text(UNDER_DDP)
    subprocess.run([sys.executable, "under_ddp.py", *saved], cwd=tmp_path, check=True, timeout=LIMIT_S)
    for number in range(2):
        more = {"trainer": {"max_epochs": 3}, "ckpt_path": saved[1]}
        peers.start(number, batches=6, begin=4, strategy={"min_peers": 2}, **more)
    for process in peers.started[2:]:
        process.wait(LIMIT_S)
    results = peers.results(0, 1)

    reference = plainly(joined_batches(6, 16))
    assert all(relative_difference(result["weights"], reference) < TOLERANCE for result in results)


UNDER_DDP = """
import sys
import torch
import stratagem
from torch.utils.data import DataLoader, TensorDataset
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import QUIET

samples = TensorDataset(*map(torch.cat, zip(*joined_batches(6, 16)[2:4])))
trainer = stratagem.Trainer(**QUIET | {"max_epochs": 2}, strategy="ddp", devices=2, accelerator="cpu")
trainer.fit(Net(5), DataLoader(samples, 8), ckpt_path=sys.argv[1])
trainer.save_checkpoint(sys.argv[2])
"""


# --- Mistakes ----------------------------------------------------------------------------------------------------


def fit_of(**options):
    strategy = HivemindStrategy(host_maddrs=LOOPBACK, **options)
    return stratagem.Trainer(strategy=strategy, accelerator="cpu", **QUIET), strategy


def test_an_address_where_nobody_listens_is_one_sentence_in_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}{NOBODY}"
    trainer, strategy = fit_of(initial_peers=address)
    began = time.monotonic()

    with pytest.raises(
        ConfigError, match=r"strategy.hivemind.initial_peers is \['/ip4/.*no peer could be reached there"
    ):
        trainer.fit(Net(), joined_batches(1, 8))
    assert time.monotonic() - began < LIMIT_S
    assert strategy._dht is None


@pytest.mark.parametrize("address", ["127.0.0.1:4000", "/ip4/127.0.0.1/tcp/4000", "/ip4/127.0.0.1/tcp/x" + NOBODY])
def test_what_is_not_an_address_is_refused(address, monkeypatch):
    with pytest.raises(ConfigError, match=r"initial_peers has .*, which is not the address of a peer"):
        addresses_of_peers([address])
    monkeypatch.setenv("PL_INITIAL_PEERS", address)
    with pytest.raises(ConfigError, match=r"PL_INITIAL_PEERS has .*, which is not the address of a peer"):
        addresses_of_peers(None)


@pytest.mark.parametrize("name", ["INITIAL_PEERS", "PL_INITIAL_PEERS"])
def test_addresses_come_from_the_environment(name, monkeypatch):
    first, second = f"/ip4/127.0.0.1/tcp/1{NOBODY}", f"/ip4/127.0.0.1/tcp/2{NOBODY}"
    monkeypatch.setenv(name, f"{first}, {second}")

    assert addresses_of_peers(None) == [first, second]
    assert addresses_of_peers(HivemindStrategy(initial_peers=first).initial_peers) == [first]
    assert addresses_of_peers([]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"delay_optimizer_step": True},
            "strategy.hivemind.delay_optimizer_step is True, and the strategy averages in",
        ),
        ({"delay_grad_averaging": True}, "async_averaging averages while training continues"),
        ({"delay_state_averaging": True}, "delay_state_averaging is True"),
        ({"offload_optimizer": True}, "offload_optimizer is True, and the optimizer steps where"),
        ({"reuse_grad_buffers": True}, "reuse_grad_buffers is True"),
        ({"scheduler_fn": print}, "return the scheduler in configure_optimizers"),
        ({"averager_opts": {"prefix": "x"}}, "averager_opts has 'prefix'; expected some of"),
        ({"run_id": "a.b"}, "run_id is 'a.b'; expected text without"),
        ({"target_batch_size": 0}, "target_batch_size is 0; expected at least 1"),
        ({"target_batchsize": 8}, "did you mean 'target_batch_size'"),
        ({"use_ipfs": True, "initial_peers": ["/ip4/1"]}, "use_ipfs is True and initial_peers is set"),
    ],
)
def test_options_that_cannot_take_effect_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        HivemindStrategy(**options)
    assert HivemindStrategy(delay_optimizer_step=False, offload_optimizer=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": ["hivemind", "fsdp"]}, "'hivemind' cannot be used with strategy 'fsdp', which provides"),
        ({"strategy": "hivemind", "precision": "16-mixed"}, "which provides 'loss-scaling'"),
        ({"strategy": ["hivemind", "local_sgd"]}, "which provides 'teams'"),
        ({"strategy": "collaborative", "devices": 2}, "needs 'multi-process'"),
    ],
)
def test_combinations_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        stratagem.Trainer(accelerator="cpu", **QUIET, **arguments)


def test_a_parameter_that_becomes_trainable_is_refused(peers):
    process = peers.start(0, thaw_at=1)

    assert process.wait(LIMIT_S) == 1
    assert "'net.0.weight' was frozen when training began and is trained now, and the other peers" in peers.outputs()
    peers.assert_nothing_is_left()


def test_the_number_of_peers_is_known_while_it_trains():
    with pytest.raises(ConfigError, match=r"num_peers of strategy 'hivemind' was read outside fit; expected rank 0 of"):
        _ = HivemindStrategy().num_peers


def test_too_few_peers_are_an_error_after_the_timeout(peers):
    process = peers.start(0, strategy={"min_peers": 3, "wait_timeout": 1.0})
    process.wait(LIMIT_S)

    assert "min_peers is 3, and 1 peer has come to the run 'stratagem' within 1 s" in peers.outputs()
    peers.assert_nothing_is_left()


def test_a_loader_without_a_batch_size_needs_the_option(peers):
    peers.start(0, strategy={"target_batch_size": 64}).wait(LIMIT_S)

    assert "target_batch_size is 64, and the loader has no batch size; expected strategy.hivemind.batch_size" in (
        peers.outputs()
    )


class TestHivemind(StrategyConformance):
    plugin: ClassVar = {"name": "hivemind", "host_maddrs": LOOPBACK}
    world_sizes = (1,)
