"""Accelerators are asked before anything is chosen: they answer without torch at the top and without a driver."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from stratagem.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator, XPUAccelerator
from stratagem.config.devices import parse_devices
from stratagem.errors import ConfigError

accelerators = pytest.importorskip("stratagem_accelerators")


def test_the_modules_that_auto_asks_import_no_torch():
    code = "import sys, stratagem_accelerators, stratagem_environments_local; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_prefers_mps_to_cuda_to_xpu_to_cpu():
    classes = (MPSAccelerator, CUDAAccelerator, XPUAccelerator, CPUAccelerator)
    assert sorted(classes, key=lambda cls: -cls.precedence) == list(classes)


def test_each_provides_its_device_and_its_backend():
    for cls, word, backend in (
        (CPUAccelerator, "device:cpu", "gloo"), (CUDAAccelerator, "device:cuda", "nccl"), (MPSAccelerator, "device:mps", "gloo"),
        (XPUAccelerator, "device:xpu", "xccl"),
    ):  # fmt: skip
        assert word in cls.capabilities.provides
        assert (cls.backend, cls().device(0).type) == (backend, word.removeprefix("device:"))


def test_counting_does_not_start_cuda():
    started = torch.cuda.is_initialized()
    CUDAAccelerator().count()

    assert torch.cuda.is_initialized() == started


@pytest.mark.parametrize(
    ("mps", "cuda", "xpu", "expected"), [(1, 2, 0, "mps"), (0, 2, 1, "cuda"), (1, 0, 1, "mps"), (0, 0, 1, "xpu")]
)
def test_gpu_is_mps_where_there_is_one_else_cuda_else_xpu(monkeypatch, mps, cuda, xpu, expected):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)

    assert accelerators.gpu().device(0).type == expected


def test_gpu_without_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(ConfigError, match="accelerator is 'gpu' and torch finds none"):
        accelerators.gpu()


MIG = "MIG-5c8a0c2d-1f7e-5b3a-9d1c-0a2b3c4d5e6f"


@pytest.mark.parametrize(
    ("visible", "count", "devices", "expected"),
    [
        ("GPU-8932f937-aa,GPU-b7c1-bb", 2, "GPU-b7c1", (1,)), ("GPU-8932f937-aa,GPU-b7c1-bb", 2, ["GPU-b7c1", 0], (1, 0)),
        (MIG, 1, MIG, (0,)), (f" {MIG} ", 1, "MIG-5c8a,", (0,)), ("GPU-8932f937-aa,GPU-b7c1-bb", 2, "GPU-b7,GPU-89", (1, 0)),
    ],
)  # fmt: skip
def test_devices_are_known_by_the_identifiers_that_are_visible(monkeypatch, visible, count, devices, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    assert parse_devices(devices, CUDAAccelerator()) == expected


@pytest.mark.parametrize(
    ("visible", "devices", "message"),
    [
        (None, MIG, f"devices names '{MIG}', and CUDA_VISIBLE_DEVICES is not set, .*with CUDA_VISIBLE_DEVICES={MIG} and"),
        ("GPU-89,GPU-8a", "GPU-8", "CUDA_VISIBLE_DEVICES is 'GPU-89,GPU-8a', where CUDA sees 1;"),
        ("MIG-a,MIG-b", ["MIG-b"], "of several MIG slices a process sees the first"),
        ("GPU-89", ["GPU-89", 0], "each device once"),
    ],
)  # fmt: skip
def test_devices_that_are_not_visible_are_refused(monkeypatch, visible, devices, message):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    with pytest.raises(ConfigError, match=message):
        parse_devices(devices, CUDAAccelerator())


@pytest.mark.parametrize("accelerator", [CPUAccelerator(), MPSAccelerator()])
def test_other_devices_have_no_identifiers(monkeypatch, accelerator):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="devices (names|is) .*numbers?"):
        parse_devices("GPU-8", accelerator)


@pytest.mark.parametrize(("order", "refused"), [("PCI_BUS", True), ("PCI_BUS_ID", False), ("FASTEST_FIRST", False)])
def test_an_order_that_cuda_does_not_know_is_refused(monkeypatch, order, refused):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    with (
        pytest.raises(ConfigError, match="CUDA_DEVICE_ORDER is 'PCI_BUS'.*did you mean 'PCI_BUS_ID'")
        if refused
        else nullcontext()
    ):
        CUDAAccelerator().activate(torch.device("cuda", 0))

    assert bool(chosen) is not refused


# --- Which device a rank has -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "expected"), [("A100", "8932f937-d72c"), ("A100 MIG 1g.5gb", "8932f937-d72c MIG-7")]
)  # fmt: skip
def test_a_device_is_known_to_other_ranks_by_its_uuid_and_a_slice_of_one_by_its_own(monkeypatch, model, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")
    found = SimpleNamespace(uuid="8932f937-d72c", name=model)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    assert CUDAAccelerator().identity(torch.device("cuda", 0)) == (expected, model)


def test_ranks_may_share_the_cpu():
    assert CPUAccelerator().identity(torch.device("cpu")) is None
