"""`horovod` trains as one process does, with real processes over Horovod's gloo.

Horovod's programs listen on all addresses of a machine, so the tests give them a network of their own, as root.
"""

import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from stratagem_horovod import address
from stratagem_horovod.conformance import HorovodConformance
from torch import nn

import stratagem
from stratagem.api import World
from stratagem.errors import ConfigError, LaunchError, PeerError
from stratagem_testing import EnvironmentConformance, LauncherConformance, StrategyConformance, run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_testing.reference import (
    Net,
    joined_batches,
    loss_of,
    net,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import QUIET, share, train, weights_of

CLONE_NEWNET = 0x40000000


@pytest.fixture(scope="module", autouse=True)
def network():
    """A network namespace that has only the loopback device."""
    if os.geteuid() != 0 or ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        pytest.skip("a network namespace can only be made by root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Runs write into the current folder."""
    monkeypatch.chdir(tmp_path)


# --- Checks of every plugin of these kinds -----------------------------------------------------------------------


class TestStrategy(HorovodConformance):
    plugin = "horovod"


class TestStrategyInGroups(StrategyConformance):
    plugin = {"name": "horovod", "num_groups": 2, "overlap": False}  # noqa: RUF012
    world_sizes = (2,)
    unplannable = "connects processes, and a plan has one"


class TestLauncher(LauncherConformance):
    plugin = "horovod"
    limit_s = 120


class TestEnvironment(EnvironmentConformance):
    plugin = "horovod"
    world = World(
        rank=3, local_rank=1, node_rank=1, world_size=4, local_world_size=2, num_nodes=2, main_address="10.0.0.1",
        main_port=4711, store_hosted=True,
    )  # fmt: skip
    variables = {  # noqa: RUF012
        "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "",
    }  # fmt: skip

    @pytest.fixture(autouse=True)
    def _server(self, monkeypatch):
        """Horovod's server, to which rank 0 has written its address for rank 3."""
        with rendezvous_server() as port:
            monkeypatch.setitem(self.variables, "HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
            address._request("127.0.0.1", port, "PUT", "3", b"10.0.0.1 4711")
            yield


class rendezvous_server:  # noqa: N801 - reads as a statement
    """Horovod's own server, in a thread."""

    def __enter__(self):
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self.server = RendezvousHTTPServer(("127.0.0.1", 0), RendezvousHandler, 0)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self.server.server_address[1]

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


# --- Training equals that of one process -------------------------------------------------------------------------


def trained(size, make=Net, batches=None, strategy="horovod", **arguments):
    """Return the weights that `size` processes have trained; they are equal on all ranks."""
    batches = joined_batches(6, 24) if batches is None else batches
    options = QUIET | {"strategy": strategy, "accelerator": "cpu"} | arguments
    first, *others = (result["weights"] for result in run_in_processes(train, size, make, batches, options))
    assert all(torch.equal(first[name].nan_to_num(), other[name].nan_to_num()) for other in others for name in first)
    return first


@pytest.mark.parametrize("options", [{}, {"num_groups": 3}, {"overlap": False}, {"gradient_predivide_factor": 2.0}])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_two_processes_train_as_one(options, accumulate, clip):
    batches = joined_batches(6, 24)
    reference, norms = train_module_plainly(Net(), batches, accumulate=accumulate, max_norm=clip)
    weights = trained(
        2, strategy={"name": "horovod", **options}, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )

    assert relative_difference(weights, reference) < 1e-6
    assert max(norms) > 1


def test_three_processes_train_as_one():
    assert relative_difference(trained(3), train_module_plainly(Net(), joined_batches(6, 24))[0]) < 1e-6


def test_a_sum_is_an_average_at_a_larger_learning_rate():
    half = functools.partial(Net, lr=Net().lr / 2)
    weights = trained(2, half, strategy={"name": "horovod", "op": "sum"})

    assert relative_difference(weights, train_module_plainly(Net(), joined_batches(6, 24))[0]) < 1e-6


def test_16_bits_round_gradients():
    weights = trained(2, strategy={"name": "horovod", "compression": "fp16"})

    assert 1e-6 < relative_difference(weights, train_module_plainly(Net(), joined_batches(6, 24))[0]) < 1e-2


class Large(Net):
    """One parameter has gradients of 40000 on each rank: their sum is no 16-bit number, their average is."""

    def training_step(self, batch, batch_idx):
        return 40000 * self.net[4].bias.sum() + 0 * super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def test_a_sum_in_16_bits_does_not_overflow():
    def bias(**options):
        return trained(2, Large, strategy={"name": "horovod", "compression": "fp16", **options})["net.4.bias"]

    assert torch.isfinite(bias()).all()
    with pytest.raises(ProcessesFailed, match=r"the loss of rank \d is nan in batch 1"):
        bias(gradient_predivide_factor=1.0)


def test_gradients_in_bfloat16_are_averaged():
    """Horovod 0.28 has no bfloat16: they are sent as 32-bit floats."""
    reference, _ = train_module_plainly(Net(), joined_batches(6, 24))
    assert relative_difference(trained(2, precision="bf16-true"), reference) < 5e-2
    assert relative_difference(trained(2, precision="bf16-mixed"), reference) < 5e-2


# --- Modules that need care --------------------------------------------------------------------------------------


class Words(stratagem.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.table = nn.Embedding(50, 16, sparse=True)
        self.net = net()

    def training_step(self, batch, batch_idx):
        words, y = batch
        return loss_of(self.net(self.table(words)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_sparse_gradients_are_refused_or_sent_as_dense_ones():
    torch.manual_seed(0)
    batches = [(torch.randint(0, 50, (24,)), torch.randn(24, 1)) for _ in range(4)]
    with pytest.raises(ProcessesFailed, match=r"layer '.*table' has sparse gradients.*sparse_as_dense is False"):
        trained(2, Words, batches)
    weights = trained(2, Words, batches, strategy={"name": "horovod", "sparse_as_dense": True})

    module = Words()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        optimizer.step()
    assert relative_difference(weights, module.state_dict()) < 1e-6


class Twice(Net):
    """A `backward` of its own that differentiates twice."""

    def backward(self, loss):
        (loss / 2).backward(retain_graph=True)
        (loss / 2).backward()


def test_two_gradients_of_a_parameter_need_no_overlap():
    with pytest.raises(ProcessesFailed, match=r"got a second gradient within one backward.*overlap to False"):
        trained(2, Twice)
    weights = trained(2, Twice, strategy={"name": "horovod", "overlap": False})

    assert relative_difference(weights, train_module_plainly(Net(), joined_batches(6, 24))[0]) < 1e-6


class Decayed(Net):
    """One layer is used by rank 1 only, and one by no rank; weights decay if they have a gradient."""

    def __init__(self):
        super().__init__()
        self.extra, self.idle = net(3), net(4)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.global_rank == 0 else loss + loss_of(self.extra(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3, weight_decay=0.1)


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}])
def test_what_no_rank_used_keeps_no_gradient(options):
    """A gradient of zeros would let it decay."""
    weights = trained(2, Decayed, strategy={"name": "horovod", **options})
    before = Decayed().state_dict()

    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor) == name.startswith("idle"), name


class Thawed(Net):
    """The first layer is frozen for the first three batches."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx >= 3)


def test_a_layer_that_is_trained_later_is_averaged_from_then_on():
    weights = trained(2, Thawed)

    module, batches = Net(), joined_batches(6, 24)
    optimizer = module.configure_optimizers()
    for index, (x, y) in enumerate(batches):
        module.net[0].requires_grad_(index >= 3)
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        optimizer.step()
    assert relative_difference(weights, module.state_dict()) < 1e-6


class Striped(stratagem.Module):
    """A convolution in channels_last: its gradients are not contiguous in memory."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0].to(memory_format=torch.channels_last)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_gradients_that_are_not_contiguous():
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4, 6, 6),) for _ in range(3)]
    weights = trained(2, Striped, batches)

    module = Striped()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        optimizer.step()
    assert relative_difference(weights, module.state_dict()) < 1e-6


# --- Start -------------------------------------------------------------------------------------------------------


class Different(Net):
    """Each rank begins with other weights and another learning rate."""

    def __init__(self, rank):
        super().__init__(seed=rank, lr=5e-3 * (rank + 1))


def fit_different(rank, size, batches):
    trainer = stratagem.Trainer(strategy="horovod", accelerator="cpu", devices=size, **QUIET)
    trainer.fit(Different(rank), share(trainer, batches))
    return weights_of(trainer), [group["lr"] for group in trainer.optimizers[0].param_groups]


def test_weights_and_optimizers_are_those_of_rank_0():
    batches = joined_batches(4, 24)
    (first, lr), (second, other) = run_in_processes(fit_different, 2, batches)

    assert lr == other == [5e-3]
    assert relative_difference(first, train_module_plainly(Net(), batches)[0]) < 1e-6
    assert relative_difference(second, first) == 0


def fit_and_look(rank, size, batches):
    import horovod.torch as hvd

    before = {name for name in os.environ if name.startswith("HOROVOD_")}
    seen = []
    for _ in range(3):  # Horovod is started and ended for each
        with stratagem.Run(strategy="horovod", accelerator="cpu", devices=size):
            seen.append((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()))
        seen.append(hvd.is_initialized())
    after = {name for name in os.environ if name.startswith("HOROVOD_")}
    return seen, after - before


def test_horovod_is_started_for_a_run_and_leaves_no_variables():
    for rank, (seen, left) in enumerate(run_in_processes(fit_and_look, 2, None)):
        assert seen == [(rank, 2, rank, 1), False] * 3
        assert not left


def own_init(rank, size, options):
    """A script that starts Horovod itself, as Horovod's examples do."""
    import horovod.torch as hvd

    port, *_ = options
    os.environ.update(
        {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": "2",
         "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
         "NODE_RANK": "0", "GROUP_WORLD_SIZE": "1",
         "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port), "HOROVOD_CONTROLLER": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    )  # fmt: skip
    hvd.init()
    strategy = {"name": "horovod", **options[1]}
    weights = train(rank, size, Net, joined_batches(3, 24), QUIET | {"strategy": strategy, "accelerator": "cpu"})
    return weights["weights"], hvd.is_initialized()


def test_a_script_that_calls_hvd_init_keeps_its_horovod():
    with rendezvous_server() as port:
        (weights, alive), _ = run_in_processes(own_init, 2, (port, {}))
    assert alive
    assert relative_difference(weights, train_module_plainly(Net(), joined_batches(3, 24))[0]) < 1e-6

    with rendezvous_server() as port, pytest.raises(ProcessesFailed, match=r"called hvd.init\(\), and options of"):
        run_in_processes(own_init, 2, (port, {"fusion_threshold_mb": 1.0}))


def test_the_timeline_shows_whether_messages_are_fused(tmp_path):
    def fused(**options):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        trained(2, strategy={"name": "horovod", "timeline_filename": str(path), "overlap": False, **options})
        return path.read_text().count("MEMCPY_IN_FUSION_BUFFER")

    assert fused() > 0
    assert fused(fusion_threshold_mb=0.0) == 0


@pytest.mark.parametrize(
    ("devices", "name", "reason"),
    [(2, "missing/t.json", "no file can be written in '/.*missing'"), (1, "t.json", "one process sends nothing")],
)
def test_a_timeline_that_would_not_be_written_is_refused(tmp_path, devices, name, reason):
    with pytest.raises((ConfigError, ProcessesFailed), match=f"timeline_filename is '.*', and {reason}"):
        trained(devices, strategy={"name": "horovod", "timeline_filename": str(tmp_path / name)})


# --- Options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "adasum"}, r"op is 'adasum', which Horovod computes over MPI.*expected 'average' or 'sum'"),
        ({"op": "sum", "gradient_predivide_factor": 2.0}, r"gradient_predivide_factor is 2 and .*op is 'sum'"),
        ({"compression": "fp8"}, r"compression.*'fp8'.*none.*fp16"),
        ({"num_groups": 0}, r"num_groups is 0; expected at least 1"),
        ({"gradient_predivide_factor": 0.0}, r"gradient_predivide_factor is 0.0; expected more than 0"),
        ({"fusion_treshold_mb": 1.0}, r"fusion_treshold_mb.*did you mean 'fusion_threshold_mb'"),
        ({"stall_check_shutdown_time_seconds": 0}, r"stall_check_shutdown_time_seconds is 0"),
    ],
)
def test_wrong_options_are_refused_before_any_process_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        stratagem.Trainer(strategy={"name": "horovod", **options}, accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"comm_hook": "fp16_compress"}, "'gradient-buckets'"),
        ({"strategy": ["diloco", "horovod"]}, "'within-team'|unknown"),
    ],
)
def test_what_it_does_not_provide_is_refused(arguments, message):
    with pytest.raises(stratagem.StratagemError, match=message):
        stratagem.Trainer(**{"strategy": "horovod", "accelerator": "cpu", "devices": 2} | arguments)


def test_without_horovod_the_error_names_ddp(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise ImportError('No module named horovod')")
    code = """
    import stratagem
    stratagem.Run(strategy="horovod", accelerator="cpu", devices=1).launch(print)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    assert re.search(
        r"strategy is 'horovod' and Horovod cannot be imported \(No module named horovod\); expected Horovod 0.28; "
        r'run `python -m stratagem_horovod.build`, .* or set strategy="ddp"', done.stderr,
    )  # fmt: skip


# --- Checkpoints -------------------------------------------------------------------------------------------------


def fit_from(rank, size, strategy, batches, path, resume):
    trainer = stratagem.Trainer(
        strategy=strategy, accelerator="cpu", devices=size, **(QUIET | {"max_epochs": 1 + resume})
    )
    trainer.fit(Net(), share(trainer, batches), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return weights_of(trainer)


@pytest.mark.parametrize(("first", "second"), [("horovod", "ddp"), ("ddp", "horovod"), ("horovod", "horovod")])
def test_a_checkpoint_goes_from_one_strategy_to_the_other(tmp_path, first, second):
    """With momentum: the second epoch would differ without the optimizer's state."""
    batches = joined_batches(4, 24)
    run_in_processes(fit_from, 2, first, batches, tmp_path / "x.ckpt", False)
    weights, _ = run_in_processes(fit_from, 2, second, batches, tmp_path / "x.ckpt", True)

    assert relative_difference(weights, train_module_plainly(Net(), batches * 2)[0]) < 1e-6


# --- horovodrun --------------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time
    import torch
    import stratagem
    from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
    from torch.utils.data import DataLoader, TensorDataset

    what = sys.argv[1]

    class Failing(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.trainer.global_rank == 1:
                print("PID", os.getpid(), flush=True)
                if what == "kill":
                    os.kill(os.getpid(), 9)
                raise ValueError("out of order")
            return super().training_step(batch, batch_idx)

    batches = joined_batches(6, 24)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches)))
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}
    options["devices"] = int(os.environ.get("DEVICES", 0)) or "auto"
    trainer = stratagem.Trainer(strategy=sys.argv[2], accelerator="cpu", **options)
    module = Net() if what == "train" else Failing()
    trainer.fit(module, DataLoader(data, 12))
    trainer.validate(module, DataLoader(data, 12))
    off = relative_difference(module.state_dict(), train_module_plainly(Net(), batches)[0])
    print("RANK", trainer.global_rank, trainer.local_rank, "OF", trainer.world_size, "OFF", off < 1e-6, flush=True)
    print("DOWN TO", type(trainer.run.environment).__name__, flush=True)
"""


def horovodrun(tmp_path, *arguments, size=2, hosts="localhost:2", options=()):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    command = ["horovodrun", "--gloo", "-np", str(size), "-H", hosts, "--network-interfaces", "lo", *options]
    return subprocess.run(
        [*command, sys.executable, str(path), *arguments], capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
def test_a_program_under_horovodrun_finds_its_ranks(tmp_path, strategy):
    done = horovodrun(tmp_path, "train", strategy)

    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"RANK .*", done.stdout)) == ["RANK 0 0 OF 2 OFF True", "RANK 1 1 OF 2 OFF True"]
    assert "DOWN TO HorovodEnvironment" in done.stdout


def test_two_programs_one_after_the_other_under_one_horovodrun(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    once = f"{sys.executable} {path} train horovod"
    command = ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2", "--network-interfaces", "lo"]
    done = subprocess.run(
        [*command, "sh", "-c", f"{once} && {once}"], capture_output=True, text=True, check=False, timeout=900
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OFF True") == 4


@pytest.mark.parametrize("what", ["kill", "raise"])
def test_when_a_rank_ends_the_others_end_with_an_error(tmp_path, what):
    done = horovodrun(tmp_path, what, "horovod")

    assert done.returncode != 0
    assert "RANK" not in done.stdout
    assert "Process name: " in done.stderr
    (pid,) = re.findall(r"PID (\d+)", done.stdout)
    assert not Path(f"/proc/{pid}").exists()
    assert what == "kill" or "out of order" in done.stderr


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    """Without a launcher that would end them."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": str(port), "DEVICES": "2"}
        for rank in range(2)
    ]  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), "kill", "horovod"], env=os.environ | place, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for place in places
    ]  # fmt: skip
    try:
        _, errors = processes[0].communicate(timeout=900)
        processes[1].wait(900)
    finally:
        for process in processes:
            process.kill()

    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, -signal.SIGKILL)
    assert "PeerError" in errors


class Alone(Net):
    """Rank 1 ends Horovod and raises; rank 0 computes gradients when Horovod has ended."""

    def training_step(self, batch, batch_idx):
        import horovod.torch as hvd

        if self.trainer.global_rank == 1:
            raise ValueError("out of order")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


def fit_alone(rank, size, overlap, batches):
    trainer = stratagem.Trainer(strategy={"name": "horovod", "overlap": overlap}, accelerator="cpu", devices=2, **QUIET)
    with pytest.raises(ValueError if rank == 1 else PeerError) as caught:
        trainer.fit(Alone(), share(trainer, batches))
    return str(caught.value)


@pytest.mark.parametrize("overlap", [True, False])
def test_horovod_that_has_ended_is_the_error_of_another_rank(overlap):
    """Not only where a message under way is lost."""
    first, _ = run_in_processes(fit_alone, 2, overlap, joined_batches(2, 24))

    assert first == "rank 1 failed with ValueError: out of order; this rank stops with it."


def test_one_process_of_horovodrun_trains_alone(tmp_path):
    done = horovodrun(tmp_path, "train", "horovod", size=1, hosts="localhost:1")

    assert "RANK 0 0 OF 1" in done.stdout, done.stdout + done.stderr


PLACE = {**TestEnvironment.variables, "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"HOROVOD_ELASTIC": "1"}, r"HOROVOD_ELASTIC is '1'.*without --min-np"),
        ({"HOROVOD_SIZE": "3"}, r"HOROVOD_SIZE is '3' and HOROVOD_LOCAL_SIZE is '2'.*as many processes on each host"),
        ({"HOROVOD_RANK": "4"}, r"HOROVOD_RANK is 4; expected 0 to 3"),
        ({}, r"rendezvous server at 127.0.0.1:1 does not answer"),
    ],
)
def test_jobs_that_cannot_work_are_refused(monkeypatch, changed, message):
    for name, value in (PLACE | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(stratagem.StratagemError, match=message):
        stratagem.Run(strategy="horovod", accelerator="cpu").connect()


def test_devices_that_horovodrun_did_not_start_are_refused(monkeypatch):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"devices is 3 and HOROVOD_LOCAL_SIZE is '2'.*3 slots on each host"):
        stratagem.Run(strategy="ddp", accelerator="cpu", devices=3).connect()


# --- The launcher ------------------------------------------------------------------------------------------------


def run_of(**options):
    launcher = {"name": "horovod", "network_interfaces": ["lo"], **options}
    return stratagem.Run(strategy="horovod", accelerator="cpu", devices=2, launcher=launcher)


def add(run):
    return run.collectives.all_reduce(torch.tensor(float(run.rank + 1)), "sum").item(), run.world_size


def test_the_launcher_returns_the_result_of_rank_0(tmp_path):
    assert run_of().launch(add) == (3.0, 2)
    assert run_of(hosts="localhost:2").launch(add) == (3.0, 2)
    assert not list(tmp_path.iterdir())


def fail(how, run):
    run.collectives.barrier()
    if run.rank == 1:
        how()
    run.collectives.barrier()


def raise_value_error():
    raise ValueError("out of order")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_value_error, "rank 1 failed with ValueError: out of order"),
        (kill_self, "rank 1 was killed by SIGKILL and left no error report"),
    ],
)
def test_the_launcher_raises_the_cause(how, message):
    with pytest.raises(LaunchError, match=message):
        run_of().launch(functools.partial(fail, how))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "a:2,b:2"}, r"hosts is 'a:2,b:2', devices makes 2 .* num_nodes is 1.*set devices=2 and num_nodes=2"),
        ({"hosts": "a"}, r"hosts is 'a'; expected hosts with their numbers of processes"),
    ],
)
def test_hosts_that_contradict_the_run_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        run_of(**options).launch(add)


def test_an_error_of_horovodrun_has_its_reason():
    with pytest.raises(LaunchError, match=r"horovodrun ended with exit code 1 \(.*[Ii]nterface"):
        run_of(network_interfaces=["missing7"]).launch(add)


def test_several_nodes_need_hosts():
    run = stratagem.Run(strategy="horovod", accelerator="cpu", devices=2, num_nodes=2, launcher="horovod")
    with pytest.raises(ConfigError, match=r"num_nodes is 2 and launcher.horovod.hosts is None.*host1:2,host2"):
        run.launch(add)


def test_what_does_not_pickle_is_refused():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to a process of horovodrun .*lock.*everything to pickle"):
        run_of().launch(lambda run: lock)
