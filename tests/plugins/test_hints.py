"""A run warns of likely mistakes, and of what keeps a GPU slow where it could be faster and the user has not decided it."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.api.kinds import PrecisionPolicy
from stratagem.config.settings import RunSettings
from stratagem_callbacks import hints as given
from stratagem_testing.reference import Net, joined_batches

FULL, HALF = PrecisionPolicy(), PrecisionPolicy(compute_dtype=torch.bfloat16)
LAST = torch.channels_last


def hints(monkeypatch, module, policy=FULL, capability=(9, 0), device="cuda", **settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    run = types.SimpleNamespace(device=torch.device(device), policy=policy, settings=RunSettings(**settings))
    return list(given.slow_choices(module, run))


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

    assert ["CUDA_DEVICE_ORDER=PCI_BUS_ID" in each for each in given.another_order(run)] == [True] * told


@pytest.mark.parametrize("barebones", [False, True])
def test_a_fit_asks_once(monkeypatch, barebones):
    asked = []
    monkeypatch.setattr(given, "slow_choices", lambda module, run: asked.append(type(module).__name__) or [])
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    sg.Trainer(accelerator="cpu", max_epochs=2, barebones=barebones, **quiet).fit(Net(), joined_batches(2, 4))

    assert asked == ["Net"] * (not barebones)


def test_submodules_in_eval_mode_are_named_once():
    model = nn.ModuleDict({name: nn.Sequential(nn.Linear(1, 1)) for name in "abcdefg"})
    assert list(given.eval_modes(model)) == []
    for part in model.values():
        part.eval()

    [parts] = given.eval_modes(model)
    assert "has parts in eval mode, which stay so: a, b, c, d, e and 2 more" in parts
    [whole] = given.eval_modes(model.eval())
    assert "is in eval mode and stays so" in whole


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().step()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        raise AssertionError


@pytest.mark.parametrize("barebones", [False, True])
def test_what_is_not_called_under_manual_optimization_is_told(barebones):
    module = ByHand()
    module.lr_scheduler_step = lambda *_: None
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "callbacks": ["hints"]}
    with pytest.warns(UserWarning, match="ByHand defines optimizer_zero_grad, lr_scheduler_step and optimizes by hand"):
        sg.Trainer(accelerator="cpu", max_epochs=1, barebones=barebones, **quiet).fit(module, joined_batches(2, 4))
