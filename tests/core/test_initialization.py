"""A model built without values gets the same ones under every strategy and at every number of processes."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem.initialization import Filler, has_no_values, without_values
from stratagem.testing import ProcessesFailed, run_in_processes
from stratagem.testing.reference import Net, joined_batches, loss_of, relative_difference
from stratagem.testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Late(sg.Module):
    """Built in configure_model, once processes exist."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(
                nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
            )
            self.seen_meta = self.net[0].weight.is_meta
            self.register_buffer("scale", torch.arange(1.0, 3.0))

    def forward(self, x):
        return self.net(x) * self.scale[0]

    def training_step(self, batch, batch_idx):
        return loss_of(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3, momentum=0.9)


def _train_late(rank, world_size, strategy, batches, empty):
    torch.manual_seed(21)
    trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
    module = Late()
    if empty:
        with trainer.init_module(empty_init=True):
            module.configure_model()
    trainer.fit(module, share(trainer, batches))
    return weights_of(trainer), module.seen_meta


@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 2), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ({"name": "fsdp", "auto_wrap_policy": {nn.Linear}}, 2)],
    ids=str,
)
def test_the_same_values_under_every_strategy_at_every_number_of_processes(strategy, world_size):
    batches = joined_batches(4, 24)
    reference, was_empty = run_in_processes(_train_late, 1, "single_device", batches, True)[0]

    assert was_empty
    for weights, was_empty in run_in_processes(_train_late, world_size, strategy, batches, True):
        assert was_empty
        assert relative_difference(weights, reference) < 1e-6


def test_configure_model_builds_without_values_where_parameters_are_sharded():
    batches = joined_batches(4, 24)
    reference, _ = run_in_processes(_train_late, 1, "single_device", batches, True)[0]

    for weights, was_empty in run_in_processes(_train_late, 2, "fsdp", batches, False):
        assert was_empty
        assert relative_difference(weights, reference) < 1e-6
    assert not run_in_processes(_train_late, 2, "ddp", batches, False)[0][1]


# --- Without processes -------------------------------------------------------------------------------------------


def test_parameters_have_no_memory_and_buffers_have():
    with without_values():
        module = nn.BatchNorm1d(4)

    assert module.weight.is_meta
    assert module.running_mean.tolist() == [0.0] * 4
    assert has_no_values(module)
    assert not nn.Linear(2, 2).weight.is_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_stay_tied_and_the_first_decides():
    with without_values():
        module, other = Tied(), nn.ModuleDict({"embedding": nn.Embedding(5, 3)})
    Filler(module, 3, torch.device("cpu")).fill(module)
    Filler(other, 3, torch.device("cpu")).fill(other)

    assert module.head.weight is module.embedding.weight
    assert torch.equal(module.embedding.weight, other["embedding"].weight)


def test_values_depend_on_the_seed_and_the_name_alone():
    def filled(seed, parts):
        with without_values():
            module = nn.ModuleDict({name: nn.Linear(3, 3) for name in parts})
        torch.manual_seed(0)
        filler = Filler(module, seed, torch.device("cpu"))
        for name in sorted(parts, reverse=True):
            filler.fill(module[name])
        return module["a"].weight

    assert torch.equal(filled(1, ["a"]), filled(1, ["b", "a"]))
    assert not torch.equal(filled(1, ["a"]), filled(2, ["a"]))


def test_the_streams_of_random_numbers_are_left_alone():
    with without_values():
        module = nn.Linear(3, 3)
    before = torch.get_rng_state()
    Filler(module, 1, torch.device("cpu")).fill(module)

    assert torch.equal(before, torch.get_rng_state())


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def test_parameters_that_nobody_can_fill_are_named():
    with without_values():
        module = nn.Sequential(nn.Linear(3, 3), Gain())

    with pytest.raises(ConfigError, match="Gain has a parameter 'gain' and no reset_parameters"):
        Filler(module, 1, torch.device("cpu")).fill(module)


def test_an_error_while_building_leaves_modules_as_they_were():
    with pytest.raises(RuntimeError, match="on purpose"), without_values():
        raise RuntimeError("on purpose")

    assert not nn.Linear(2, 2).weight.is_meta


# --- A model that does not fit -----------------------------------------------------------------------------------

LAYERS, WIDTH = 48, 1024  # 4 MiB a layer


class Large(Net):
    def __init__(self):
        sg.Module.__init__(self)
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(16, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)),
                                     nn.Linear(WIDTH, 1))  # fmt: skip

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def _train_within(rank, world_size, strategy, spare_bytes):
    status = Path("/proc/self/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + spare_bytes, used + spare_bytes))

    def act():
        trainer = sg.Trainer(max_epochs=1, strategy=strategy, devices=world_size, **QUIET)
        trainer.fit(Large(), share(trainer, joined_batches(2, 12)))

    return outcome(act)


def test_a_model_larger_than_one_process_may_hold_trains_on_two():
    """Parameters and gradients are 400 MB; a process may use 320 MB more than it has at the start."""
    in_units = {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}

    try:
        alone = run_in_processes(_train_within, 1, "single_device", 320 << 20)
    except ProcessesFailed as error:
        alone = [str(error)]
    assert "memory" in alone[0], alone
    assert run_in_processes(_train_within, 2, in_units, 320 << 20) == ["nothing", "nothing"]
