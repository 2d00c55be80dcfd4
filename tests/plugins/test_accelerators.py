"""Accelerators are asked before anything is chosen: they answer without torch at the top and without a driver."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stratagem.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator
from stratagem.errors import ConfigError

accelerators = pytest.importorskip("stratagem_accelerators")


def test_the_modules_that_auto_asks_import_no_torch():
    code = "import sys, stratagem_accelerators, stratagem_environments_local; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_auto_prefers_mps_to_cuda_to_cpu():
    assert MPSAccelerator.precedence > CUDAAccelerator.precedence > CPUAccelerator.precedence


def test_each_provides_its_device_and_its_backend():
    for cls, word, backend in (
        (CPUAccelerator, "device:cpu", "gloo"), (CUDAAccelerator, "device:cuda", "nccl"), (MPSAccelerator, "device:mps", "gloo"),
    ):  # fmt: skip
        assert word in cls.capabilities.provides
        assert (cls.backend, cls().device(0).type) == (backend, word.removeprefix("device:"))


def test_counting_does_not_start_cuda():
    CUDAAccelerator().count()

    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(("mps", "cuda", "expected"), [(1, 2, "mps"), (0, 2, "cuda"), (1, 0, "mps")])
def test_gpu_is_mps_where_there_is_one_else_cuda(monkeypatch, mps, cuda, expected):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(mps))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)

    assert accelerators.gpu().device(0).type == expected


def test_gpu_without_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(ConfigError, match="accelerator is 'gpu' and torch sees none"):
        accelerators.gpu()
