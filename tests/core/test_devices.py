"""The devices= grammar, with sixteen pretend GPUs and with a CPU."""

from __future__ import annotations

import pytest
from attrs import define

from stratagem.accelerators import CPUAccelerator, CUDAAccelerator
from stratagem.devices import find_usable_cuda_devices, parse_devices
from stratagem.errors import ConfigError
from stratagem.plugin import Accelerator


@define(eq=False, kw_only=True)
class Sixteen(Accelerator):
    def count(self):
        return 16


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


def test_asking_for_more_cuda_devices_than_exist():
    with pytest.raises(ConfigError, match="num_devices is 99"):
        find_usable_cuda_devices(99)
    with pytest.raises(ConfigError, match="num_devices is 0"):
        find_usable_cuda_devices(0)


@pytest.mark.gpu
def test_usable_cuda_devices_are_found():
    assert find_usable_cuda_devices(1) == [0]


def test_accelerators_describe_their_devices():
    assert str(CPUAccelerator().device(1)) == "cpu"
    assert str(CUDAAccelerator().device(1)) == "cuda:1"
    assert CUDAAccelerator.precedence > CPUAccelerator.precedence
