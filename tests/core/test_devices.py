"""The devices= grammar, with sixteen pretend GPUs and with a CPU."""

from __future__ import annotations

import pytest
import torch
from attrs import define

import stratagem as sg
from stratagem.accelerators import CPUAccelerator, CUDAAccelerator
from stratagem.api.kinds import Accelerator
from stratagem.config.devices import devices_of_processes, parse_devices
from stratagem.errors import ConfigError, StratagemError
from stratagem_trainer.usable_devices import find_usable_cuda_devices


@define(eq=False, kw_only=True)
class Sixteen(Accelerator):
    visible: int = 16

    def count(self):
        return self.visible


ALL = tuple(range(16))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("auto", ALL), ("AUTO", ALL), (-1, ALL), ("-1", ALL), (3, (0, 1, 2)), ("3", (0, 1, 2)), ([0], (0,)),
        ([1, 3], (1, 3)), ((1, 3), (1, 3)), ("1,3", (1, 3)), ("1, 3", (1, 3)), ("2,", (2,)), (16, ALL),
    ],
)  # fmt: skip
def test_devices_on_an_indexed_accelerator(value, expected):
    assert parse_devices(value, Sixteen()) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "devices is 0; expected at least one device"), ("0", 'which gpus="0" once meant'), ([], r"devices is \[\]"),
        (17, "devices is 17 and there are 16; expected at most 16"), ([16], "there are 16; expected 0 to 15"),
        ([0, 0], "each device once"), ([True], "whole numbers"), (True, "devices is True"), (1.0, "devices is 1.0"),
        ("many", "devices is 'many'"), (-2, "devices is -2"), (None, "devices is None"),
    ],
)  # fmt: skip
def test_bad_devices_are_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_devices(value, Sixteen())


@pytest.mark.parametrize(("value", "expected"), [("auto", (0,)), (2, (0, 1)), ("2", (0, 1))])
def test_devices_on_a_cpu_are_processes(value, expected):
    assert parse_devices(value, CPUAccelerator()) == expected


@pytest.mark.parametrize("value", [0, -1, "0", [0], [0, 1], "0,1", "2,", 1.5])
def test_a_cpu_has_no_numbered_devices(value):
    with pytest.raises(ConfigError, match="expected a number of processes"):
        parse_devices(value, CPUAccelerator())


def test_a_slip_of_the_hand_does_not_fill_the_memory():
    with pytest.raises(ConfigError, match="devices is 1000000000; expected at most 1024 processes on one machine"):
        parse_devices(10**9, CPUAccelerator())


@pytest.mark.parametrize(
    ("value", "visible", "running", "expected"),
    [
        ("auto", 16, 8, tuple(range(8))), ("auto", 1, 8, (0,) * 8), (8, 1, 8, (0,) * 8), ("8", 1, 8, (0,) * 8),
        (-1, 1, 8, (0,) * 8), (-1, 4, 4, (0, 1, 2, 3)), ([2, 3], 4, 2, (2, 3)), ("auto", 1, 1, (0,)),
        (2, 1, None, (0, 0)), ("2", 2, None, (0, 1)), ("auto", 2, None, (0, 1)), (-1, 1, None, (0,)),
    ],
)  # fmt: skip
def test_devices_of_processes_that_exist(value, visible, running, expected):
    """A scheduler may let each process see one device alone: it is number 0 to all of them."""
    assert devices_of_processes(value, Sixteen(visible=visible), running, "environment 'x'") == expected


@pytest.mark.parametrize(
    ("value", "visible", "message"),
    [
        ("auto", 4, "environment 'x' has 8 processes on this node, and each of them sees 4 devices; expected a device for"),
        (4, 1, "devices is 4 and there are 1"), ([1], 1, "there are 1; expected 0 to 0"), (True, 1, "devices is True"),
    ],
)  # fmt: skip
def test_more_processes_than_devices_are_refused(value, visible, message):
    with pytest.raises(ConfigError, match=message):
        devices_of_processes(value, Sixteen(visible=visible), 8, "environment 'x'")


@pytest.mark.parametrize("arguments", [{}, {"devices": 4}], ids=str)
def test_under_torchrun_each_process_may_see_one_gpu_alone(monkeypatch, arguments):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
                        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    stack = sg.Run(accelerator=Sixteen(visible=1), **arguments).stack

    assert stack.num_processes == 4
    assert stack.devices_of(3) == (0,)
    with pytest.raises(ConfigError, match="gave this process the local rank 4, and the run has 4 devices on this node"):
        stack.devices_of(4)


def test_asking_for_more_cuda_devices_than_exist():
    with pytest.raises(ConfigError, match="num_devices is 99"):
        find_usable_cuda_devices(99)
    with pytest.raises(ConfigError, match="num_devices is 0"):
        find_usable_cuda_devices(0)


@pytest.fixture
def three_gpus(monkeypatch, tmp_path):
    """Return how to have three GPUs, and a torch in new processes that does `on_use` where a tensor is made on one."""

    def see(on_use):
        (tmp_path / "torch.py").write_text(f"def tensor(value, device):\n    {on_use}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    return see


@pytest.mark.when_changed(
    "plugins/trainer/stratagem_trainer/usable_devices.py",
    guard="tests/core/test_devices.py::test_a_process_that_dies_while_it_tries_is_told",
)
def test_devices_are_tried_in_another_process(three_gpus):
    """A tensor on each leaves memory on each, for as long as the process lives."""
    three_gpus("if device == 'cuda:1': raise RuntimeError('CUDA-capable device(s) is/are busy or unavailable')")

    assert find_usable_cuda_devices() == [0, 2]
    assert find_usable_cuda_devices(2) == [0, 2]
    assert find_usable_cuda_devices(1) == [0]
    with pytest.raises(StratagemError, match="2 of 3 CUDA devices accept work; expected 3"):
        find_usable_cuda_devices(3)


def test_a_process_that_dies_while_it_tries_is_told(three_gpus):
    three_gpus("raise SystemExit(3)")
    with pytest.raises(StratagemError, match="tried the 3 CUDA devices ended with exit code 3"):
        find_usable_cuda_devices()


@pytest.mark.gpu
def test_usable_cuda_devices_are_found():
    assert find_usable_cuda_devices(1) == [0]


def test_accelerators_describe_their_devices():
    assert str(CPUAccelerator().device(1)) == "cpu"
    assert str(CUDAAccelerator().device(1)) == "cuda:1"
    assert CUDAAccelerator.precedence > CPUAccelerator.precedence
