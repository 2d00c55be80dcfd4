"""Switches of torch: set while a run is connected, left alone where nothing was asked for."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from attrs import define, field

import stratagem as sg
from stratagem.accelerators import CPUAccelerator
from stratagem.config.settings import RunSettings
from stratagem.errors import ConfigError, StratagemError
from stratagem.runtime.numerics import switch
from stratagem_testing import run_in_processes

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def state():
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic, cudnn.benchmark, torch.get_float32_matmul_precision(), os.environ.get(WORKSPACE),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("habit", ["highest", "high"])
def test_what_was_not_asked_for_stays(habit):
    torch.set_float32_matmul_precision(habit)
    torch.backends.cudnn.benchmark = True
    before = state()
    with switch(RunSettings(), "cuda"):
        assert state() == before
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("wanted", [True, "warn"])
def test_deterministic_kernels_of_all_libraries(wanted):
    torch.backends.cudnn.benchmark = True
    before = state()
    with switch(RunSettings(deterministic=wanted), "cuda"):
        assert state() == (True, wanted == "warn", True, False, "highest", ":4096:8")
    assert state() == (*before[:-1], ":4096:8")
    del os.environ[WORKSPACE]
    torch.backends.cudnn.benchmark = False


@define(eq=False, kw_only=True)
class Looking(CPUAccelerator):
    """A device that notes how things are when it is started."""

    seen: list = field(factory=list, init=False)

    def activate(self, device):
        self.seen.append(state())


def test_switches_are_set_before_the_device_starts_and_put_back_at_the_end():
    before, accelerator = state(), Looking()
    run = sg.Run(accelerator=accelerator, deterministic=True, float32_matmul_precision="medium")
    run.connect()

    assert accelerator.seen.pop() == state() == (True, False, True, False, "medium", None)
    run.close()
    assert state() == before


def _states(rank, world_size):
    trainer = sg.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        deterministic="warn",
        float32_matmul_precision="high",
        logger=False,
    )
    trainer.run.connect()
    return state()


def test_every_process_is_switched():
    assert run_in_processes(_states, 2) == [(True, True, True, False, "high", None)] * 2


def test_a_run_that_cannot_connect_leaves_nothing_switched(monkeypatch):
    run = sg.Run(accelerator="cpu", deterministic=True)

    def fail(device):
        raise RuntimeError("no such device")

    monkeypatch.setattr(CPUAccelerator, "activate", lambda self, device: fail(device))
    with pytest.raises(RuntimeError, match="no such device"):
        run.connect()


@pytest.mark.parametrize("value", [":4096:8", ":16:8"])
def test_a_workspace_of_the_users_stays(monkeypatch, value):
    monkeypatch.setenv(WORKSPACE, value)
    with switch(RunSettings(deterministic=True), "cuda"):
        assert os.environ[WORKSPACE] == value
    assert os.environ[WORKSPACE] == value
    monkeypatch.delenv(WORKSPACE)


def test_a_workspace_that_is_not_deterministic_is_refused(monkeypatch):
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(
        ConfigError, match="CUBLAS_WORKSPACE_CONFIG is ':0:0' in the environment; expected ':4096:8' or"
    ):
        switch(RunSettings(deterministic=True), "cuda")
    with switch(RunSettings(deterministic=True), "cpu"):
        pass
    monkeypatch.delenv(WORKSPACE)


def test_a_workspace_that_comes_late_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(
        UserWarning, match="after CUDA was started: cuBLAS may have read CUBLAS_WORKSPACE_CONFIG already"
    ):
        switch(RunSettings(deterministic=True), "cuda").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        switch(RunSettings(deterministic=True), "cuda").close()  # it was set then
    del os.environ[WORKSPACE]


def test_both_ways_to_set_the_precision_are_refused(monkeypatch):
    def mixed():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", mixed)
        with pytest.raises(ConfigError, match="'high' and this process has set an fp32_precision of torch.backends"):
            switch(RunSettings(float32_matmul_precision="high"), "cpu")


def test_a_misspelt_precision_is_refused():
    with pytest.raises(StratagemError, match="float32_matmul_precision is 'hihg'"):
        sg.Trainer(accelerator="cpu", float32_matmul_precision="hihg")


def test_runs_may_close_in_any_order():
    before = state()
    first = switch(RunSettings(float32_matmul_precision="high", deterministic=True), "cpu")
    second = switch(RunSettings(float32_matmul_precision="medium", deterministic=True), "cpu")
    within = state()
    first.close()

    assert state() == within
    second.close()
    assert state() == before


class _Fails(sg.Callback):
    @sg.hookimpl
    def teardown(self, run):
        raise ValueError("cannot tear down")


def test_switches_are_put_back_after_a_teardown_that_fails():
    before = state()
    run = sg.Run(devices=1, accelerator="cpu", float32_matmul_precision="high", plugins=[_Fails()])
    run.connect()
    with pytest.raises(ValueError, match="cannot tear down"):
        run.close()

    assert state() == before
