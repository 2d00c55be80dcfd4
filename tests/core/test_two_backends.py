"""One process group with a backend for CPU tensors and one for those of a device: what travels over which.

There is no device here: its backend is torch's fake one, and whatever is moved to the device raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import stratagem as sg
from stratagem.accelerators import CPUAccelerator
from stratagem.api.run_parts import Timeouts
from stratagem.api.world import World
from stratagem.distributed import default_group, interfaces, process_group
from stratagem.distributed.default_group import backends_in, with_gloo
from stratagem.distributed.interfaces import interface_of
from stratagem.distributed.process_group import TorchCollectives
from stratagem.errors import ConfigError, LaunchError
from stratagem_testing import run_in_processes
from stratagem_trainer.metrics import LogOptions, StageMetrics

CUDA = torch.device("cuda", 0)
LIMIT = timedelta(seconds=77)


def _fake():
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend "fake"

    dist.Backend.backend_capability["fake"] = ["cuda"]


def _place(rank, world_size):
    port = int(os.environ["MASTER_PORT"])
    return World(rank=rank, world_size=world_size, main_port=port, store_hosted=True)


def _said(act):
    try:
        return act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class _OnADevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and refuses to be pickled there."""

    @property
    def device(self):
        return torch.device("cuda", 3)

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol):
        raise AssertionError("pickled with its device")


def _control_words(rank, world_size):
    _fake()
    talk = TorchCollectives.connect(_place(rank, world_size), CUDA, backend="fake", timeouts=Timeouts(LIMIT, LIMIT))
    book = StageMetrics(True, talk)
    book.log("loss", rank, LogOptions(sync_dist=True, on_step=True, on_epoch=True))
    book.reduce_step(0)
    far = _OnADevice(torch.tensor([1.0, 2.0]))
    found = {
        "backend": dist.get_backend(),
        "any": (talk.any(rank == 1), talk.any(False)),
        "unchecked": talk.unchecked.any(rank == 0),
        "objects": talk.all_gather_object(rank),
        "object": talk.broadcast_object({"of": rank}, 1),
        "tensors": [each["far"].tolist() for each in talk.all_gather_object({"far": far})],
        "tensor": talk.broadcast_object([far])[0].tolist(),
        "sum": talk.all_reduce(torch.ones(2), "sum").tolist(),
        "team": talk.split([[0], [1]]).any(rank == 1),
        "new_group": (talk.new_group().any(rank == 1), talk.new_group().timeout),
        "logged": (float(book.metrics["loss"].last), float(next(iter(book.epoch_values().values())))),
        "calls": _said(talk.barrier if rank else lambda: talk.any(True)),
        "lost": (talk.reports_lost_ranks, talk.new_group().reports_lost_ranks),
    }
    talk.barrier()
    talk.close()
    return found


@pytest.mark.slow
def test_decisions_and_objects_travel_over_gloo_beside_a_devices_backend():
    first, second = run_in_processes(_control_words, 2, limit_s=180)

    assert first["backend"] == "cpu:gloo,cuda:fake"
    assert first["any"] == second["any"] == (True, False)
    assert first["unchecked"] is second["unchecked"] is True
    assert first["objects"] == second["objects"] == [0, 1]
    assert first["object"] == second["object"] == {"of": 1}
    assert first["tensors"] == [[1.0, 2.0], [1.0, 2.0]]
    assert second["tensor"] == [1.0, 2.0]
    assert first["sum"] == second["sum"] == [2.0, 2.0]
    assert (first["team"], second["team"]) == (False, True)
    assert first["new_group"] == (True, LIMIT)
    assert first["logged"] == second["logged"] == (0.5, 0.5)
    assert first["calls"] == second["calls"]
    assert "all ranks to make the same call" in first["calls"]
    assert first["lost"] == (False, True)


def _gloo_beside_a_gpu(rank, world_size):
    talk = TorchCollectives.connect(_place(rank, world_size), CUDA, backend="gloo", timeouts=Timeouts(LIMIT, LIMIT))
    far = _OnADevice(torch.ones(2))
    found = (str(talk.device), str(talk.message_device), talk._in_rounds(far), talk._in_rounds(torch.ones(2)))
    talk.close()
    return found


def test_gloo_never_gets_the_address_of_memory_on_a_gpu():
    assert run_in_processes(_gloo_beside_a_gpu, 2, limit_s=180) == [("cuda:0", "cpu", False, True)] * 2


def _save_in_the_background(rank, world_size, folder):
    timed = {"name": "ddp", "timeout": 33}
    format_ = {"name": "full", "async_save": True}
    run = sg.Run(strategy=timed, devices=world_size, accelerator="cpu", checkpoint=format_)

    def refuse(*_, **__):
        raise AssertionError("a group is made in mid-training")

    def main(run):
        dist.new_group = refuse
        run.save(f"{folder}/a.ckpt", model=run.setup(torch.nn.Linear(2, 2)))
        run.saver.wait()
        return [each.timeout.total_seconds() for each in run.saver._groups]

    return run.launch(main)


def test_the_groups_of_a_save_in_the_background_are_made_at_connect(tmp_path):
    assert run_in_processes(_save_in_the_background, 2, str(tmp_path)) == [[33.0, 33.0]] * 2


def _leave(rank, world_size):
    left = []
    default_group.backends_of = lambda group: {"cpu": "gloo", "cuda": "nccl"}
    for module, name in ((dist.distributed_c10d, "_abort_process_group"), (dist, "destroy_process_group")):
        act = getattr(module, name)
        setattr(module, name, lambda act=act, name=name: (left.append(name), act()))
    for error in (ValueError("the user's"), None):
        with contextlib.suppress(ValueError), sg.Run(strategy="ddp", devices=world_size, accelerator="cpu"):
            if error is not None:
                raise error
    return left


def test_a_run_that_failed_does_not_wait_for_what_others_do_not_join():
    assert run_in_processes(_leave, 2) == [["_abort_process_group", "destroy_process_group"]] * 2


def _go_on_after_an_error(rank, world_size):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        with contextlib.suppress(ZeroDivisionError):
            run.launch(lambda run: 1 / 0)
        failed = run.collectives.failed
        run.launch(lambda run: None)
        return failed, run.collectives.failed


def test_a_run_that_goes_on_after_an_error_ends_as_others_do():
    assert run_in_processes(_go_on_after_an_error, 1) == [(True, False)]


@pytest.fixture
def recorded(monkeypatch):
    """What `init_process_group` and `new_group` are given, on a machine that has NCCL."""
    calls = []

    def init(backend, **options):
        calls.append((backend, options))

    def new_group(*_, **options):
        calls.append(("new_group", options))
        return _Group()

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(process_group, "default_store", lambda: None)
    monkeypatch.setattr(type(dist.group), "WORLD", _Group())
    yield calls
    monkeypatch.setattr(dist, "is_initialized", lambda: False)


class _Group:
    pass


def test_nccl_connects_at_once_with_gloo_beside_it(recorded):
    TorchCollectives.connect(World(), CUDA, backend="nccl", timeouts=Timeouts(LIMIT, LIMIT)).close()

    (backend, options), (_, compared) = recorded
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["device_id"] == CUDA
    assert options["timeout"] == LIMIT
    assert compared == {"backend": "gloo", "timeout": LIMIT}


def test_what_nccl_says_when_it_cannot_connect_is_a_launch_error(monkeypatch):
    text = "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.29\nncclInvalidUsage: ...\nLast error:\n"
    text += "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"

    def refuse(*_, **__):
        raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(LaunchError) as caught:
        TorchCollectives.connect(World(), CUDA, backend="nccl")

    assert "(Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000)" in str(caught.value)
    assert "give each rank a GPU of its own" in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "device", "whole"),
    [
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"), ("gloo", "cuda", "gloo"), ("gloo", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "cuda:nccl"), ("ucc", "cuda", "ucc"),
    ],
)  # fmt: skip
def test_gloo_comes_beside_a_backend_that_serves_a_device_alone(backend, device, whole):
    assert with_gloo(backend, torch.device(device)) == whole


def test_a_backend_in_capitals_is_the_same():
    assert with_gloo("NCCL", CUDA) == with_gloo("nccl", CUDA)


def test_the_backend_of_each_device_is_read_from_the_whole_name():
    assert backends_in("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert backends_in("nccl") == {"cuda": "nccl"}
    assert backends_in("gloo")["cpu"] == "gloo"


@pytest.mark.parametrize(
    ("existing", "device", "wanted", "refused"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl", False), ("cuda:nccl", "cuda", "nccl", False),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo", False), ("cpu:gloo,cuda:gloo", "cuda", "nccl", True),
        ("cuda:nccl", "cpu", "gloo", True),
    ],
)  # fmt: skip
def test_a_group_of_the_users_is_taken_if_its_backend_for_the_device_fits(
    recorded, monkeypatch, existing, device, wanted, refused
):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: existing)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: existing)

    def join():
        return TorchCollectives.connect(World(world_size=2), torch.device(device), backend=wanted)

    if refused:
        with pytest.raises(ConfigError, match=f"already belongs to a {existing} process group of 2"):
            join()
    else:
        assert (join()._comparing is None) == ("cpu" not in existing)


def test_a_group_of_nccl_alone_sends_decisions_by_way_of_the_device(recorded, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
    talk = TorchCollectives.connect(World(world_size=2), CUDA, backend="nccl")

    assert talk._sent_from(torch.ones(1)) == CUDA


@pytest.mark.skipif(not hasattr(socket, "if_nameindex"), reason="the system does not list its interfaces")
def test_gloo_listens_where_the_main_address_is_reached(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    ways = {"node0": "10.1.2.3", interfaces._ELSEWHERE: "10.9.9.9", "myself": "127.0.1.1"}
    monkeypatch.setattr(interfaces, "address_towards", lambda host, port: (socket.AF_INET, ways[host]))
    monkeypatch.setattr(interfaces, "interface_of", {"10.1.2.3": "ib0", "10.9.9.9": "eth0"}.get)

    found = {}
    for name in ("node0", "myself"):
        interfaces.choose_interface(World(num_nodes=2, world_size=2, main_address=name, main_port=1))
        found[name] = os.environ.get("GLOO_SOCKET_IFNAME")
        interfaces.unset_variables()
    assert found == {"node0": "ib0", "myself": "eth0"}
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_an_older_torch_gathers_under_its_own_name(monkeypatch):
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    talk = TorchCollectives(World(), torch.device("cpu"), owns_group=True)
    with warnings.catch_warnings(action="ignore"):
        found = talk.all_gather_async(torch.arange(3.0)).wait().tolist()
    talk.close()

    assert found == [0.0, 1.0, 2.0]


class Pretended(CPUAccelerator):
    backend = "nccl"


@pytest.mark.parametrize(
    ("accelerator", "strategy", "minutes"),
    [
        (Pretended(), "ddp", 10), (Pretended(), {"name": "ddp", "timeout": 1800}, 30), (Pretended(), "local_sgd", 10),
        ("cpu", "ddp", 30), ("cpu", {"name": "ddp", "start_timeout": 1}, 30),
    ],
)  # fmt: skip
def test_ranks_wait_less_long_over_nccl_unless_told(accelerator, strategy, minutes):
    run = sg.Run(strategy=strategy, accelerator=accelerator, devices=2)

    assert run.stack.timeouts().collective == timedelta(minutes=minutes)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({}, 1800), ({"timeout": 3}, 300), ({"timeout": 900}, 900), ({"timeout": 3, "start_timeout": 7}, 7)],
)
def test_a_start_may_take_longer_than_a_hang(options, seconds):
    run = sg.Run(strategy={"name": "ddp"} | options, accelerator="cpu", devices=2)

    assert run.stack.timeouts().start == timedelta(seconds=seconds)


def _receive_in_vain(rank, world_size, folder):
    run = sg.Run(strategy={"name": "ddp", "timeout": 2}, accelerator="cpu", devices=world_size)
    run.connect()
    if rank == 1:
        while not (folder / "done").exists():
            time.sleep(0.05)
        return ""
    try:
        run.collectives.unchecked.all_reduce(torch.ones(3), "max")
    except RuntimeError as error:
        return str(error)
    finally:
        (folder / "done").touch()


@pytest.mark.slow
def test_a_message_between_two_ranks_waits_as_long_as_a_collective(tmp_path):
    said, _ = run_in_processes(_receive_in_vain, 2, tmp_path, limit_s=60)

    assert "Timed out waiting 2000ms" in said


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_nccl_writes_its_last_calls_when_it_times_out_unless_told_not_to(recorded, monkeypatch, name):
    monkeypatch.setenv(name, "7")
    TorchCollectives.connect(World(), CUDA, backend="nccl").close()

    assert {key: value for key, value in os.environ.items() if key.startswith(("TORCH_FR_", "TORCH_NCCL_"))} == {
        name: "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "own", "expected"), [("nccl", None, "1"), ("nccl", "0", "0"), ("gloo", None, None)]
)
def test_gloo_connects_ranks_when_they_send_where_it_stands_beside_nccl(recorded, monkeypatch, backend, own, expected):
    if own is not None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", own)
    connected = TorchCollectives.connect(World(), CUDA if backend == "nccl" else torch.device("cpu"), backend=backend)

    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == expected
    connected.close()
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == own


def _split(rank, world_size):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    made, make, whole = [], dist.new_group, run.collectives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda ranks, **options: made.append(ranks) or make(ranks, **options))
        columns = whole.split([[0, 2], [1, 3]])
        rows, again = whole.split([[0, 1], [2, 3]]), whole.split([[0, 1], [2, 3]])
    found = [part.all_gather_object(rank) for part in (columns, rows, again, whole)]
    make([0, 1])  # as a program may: two ranks have one group more
    assert whole.split([[0, 2], [1, 3]]).all_gather_object(rank) == found[0]
    return made, found


def _split_of_a_part(rank, world_size):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    run.connect()
    bound, make, whole = [], dist.new_group, run.collectives
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist,
            "new_group",
            lambda ranks, **options: bound.append(dist.group.WORLD.bound_device_id) or make(ranks, **options),
        )
        half = whole.split([[0, 1], [2, 3]])
        dist.group.WORLD.bound_device_id = CUDA
        mine = half.split([[0], [1]]) if rank < 2 else half
        after = dist.group.WORLD.bound_device_id
        dist.group.WORLD.bound_device_id = None
    return bound, after == CUDA, mine.world_size


@pytest.mark.slow
def test_a_rank_makes_its_own_group_of_a_split_alone():
    """NCCL splits each group off in all ranks, one after the other: 856 for three axes at 1,024 ranks."""
    for rank, (made, found) in enumerate(run_in_processes(_split, 4)):
        own = [[rank % 2, rank % 2 + 2], *[[rank // 2 * 2, rank // 2 * 2 + 1]] * 2]
        assert made == own
        assert found == [*own, [0, 1, 2, 3]]


@pytest.mark.slow
def test_a_split_of_some_ranks_waits_for_no_other():
    """NCCL would split the group off the default group's communicator, which needs a call of all ranks."""
    for rank, (bound, is_put_back, size) in enumerate(run_in_processes(_split_of_a_part, 4)):
        assert bound == [None] * (2 if rank < 2 else 1)
        assert is_put_back
        assert size == (1 if rank < 2 else 2)


@pytest.mark.slow
def test_the_variables_that_are_set_are_not_warned_of():
    """torch tells every process of names that are out of date."""
    program = (
        "import torch.distributed as dist; from stratagem.distributed.default_group import trace_calls; trace_calls();"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "deprecated" not in result.stderr
