"""A fit warns of what keeps a GPU slow, where that GPU could be faster and the user has not decided it."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.api.values import PrecisionPolicy
from stratagem.config.settings import RunSettings
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer import stage_runner as session
from stratagem_trainer.hints import warn_of_another_order, warn_of_slow_choices

FULL, HALF = PrecisionPolicy(), PrecisionPolicy(compute_dtype=torch.bfloat16)
LAST = torch.channels_last


def hints(monkeypatch, module, policy=FULL, capability=(9, 0), device="cuda", **settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    run = types.SimpleNamespace(device=torch.device(device), policy=policy, settings=RunSettings(**settings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_slow_choices(module, run)
    return [str(each.message) for each in caught]


def test_products_in_full_precision_are_told(monkeypatch):
    (told,) = hints(monkeypatch, nn.Linear(2, 2))

    assert 'float32_matmul_precision="high" uses TF32' in told


@pytest.mark.parametrize(
    "options",
    [
        {"capability": (7, 5)}, {"device": "cpu"}, {"policy": HALF}, {"module": nn.Linear(2, 2).double()},
        {"float32_matmul_precision": "highest"}, {"float32_matmul_precision": "high"},
    ],
    ids=str,
)  # fmt: skip
def test_products_are_left_alone(monkeypatch, options):
    assert hints(monkeypatch, **({"module": nn.Linear(2, 2)} | options)) == []


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_a_precision_that_the_process_has_set_gives_no_hint(monkeypatch, precision):
    torch.set_float32_matmul_precision(precision)
    try:
        assert hints(monkeypatch, nn.Linear(2, 2)) == []
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("module", "capability", "told"),
    [
        (nn.Conv2d(2, 4, 3), (7, 0), True), (nn.Conv2d(2, 4, 3).to(memory_format=LAST), (7, 0), False),
        (nn.Conv2d(2, 4, 3), (6, 1), False), (nn.LazyConv2d(4, 3), (8, 0), False), (nn.Conv1d(2, 4, 3), (8, 0), False),
    ],
)  # fmt: skip
def test_convolutions_in_another_order_are_told(monkeypatch, module, capability, told):
    found = hints(monkeypatch, module, HALF, capability)

    assert ["memory_format=torch.channels_last" in each for each in found] == [True] * told


@pytest.mark.parametrize(
    ("names", "devices", "order", "told"),
    [
        ("ab", [1], None, True), ("ab", "0,1", None, True), ("aa", [1], None, False), ("ab", 2, None, False),
        ("ab", [1], "PCI_BUS_ID", False), ("ab", "2", None, False),
    ],
)  # fmt: skip
def test_numbers_that_mean_other_gpus_elsewhere_are_told(monkeypatch, names, devices, order, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    run = types.SimpleNamespace(device=torch.device("cuda"), settings=RunSettings(devices=devices))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_another_order(run)

    assert ["CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(each.message) for each in caught] == [True] * told


@pytest.mark.parametrize("barebones", [False, True])
def test_a_fit_asks_once(monkeypatch, barebones):
    asked = []
    monkeypatch.setattr(session, "warn_of_slow_choices", lambda module, run: asked.append(type(module).__name__))
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    sg.Trainer(accelerator="cpu", max_epochs=2, barebones=barebones, **quiet).fit(Net(), joined_batches(2, 4))

    assert asked == ["Net"] * (not barebones)
