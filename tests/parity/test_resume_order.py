"""Resumed within an epoch, several processes use each of its samples once, whatever the seed is now."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stratagem as sg
from stratagem_testing.reference import Net

SAMPLES = 48
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Seeing(Net):
    """Writes down which samples it has trained on, a line for each batch."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def training_step(self, batch, batch_idx):
        with open(f"{self.path}.{self.global_rank}", "a") as file:
            file.write(" ".join(str(int(number)) for number in batch[0][:, 0]) + "\n")
        return self.net(batch[0]).pow(2).mean() * 1e-6


def samples():
    return TensorDataset(torch.arange(float(SAMPLES))[:, None].expand(SAMPLES, 16).contiguous())


class Drawn(Sampler):
    """A sampler of the user's own, which draws from torch's generator, or from one that it has."""

    def __init__(self, generator=None):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


def generator():
    made = torch.Generator()
    made.manual_seed(torch.initial_seed())
    return made


LOADERS = {
    "shuffled": lambda: DataLoader(samples(), 2, shuffle=True),
    "in order": lambda: DataLoader(samples(), 2),
    "workers": lambda: DataLoader(samples(), 2, shuffle=True, num_workers=1),
    "own sampler": lambda: DataLoader(samples(), 2, sampler=Drawn()),
    "own generator": lambda: DataLoader(samples(), 2, sampler=Drawn(generator())),
    "own batches": lambda: DataLoader(samples(), batch_sampler=BatchSampler(Drawn(), 2, False)),
    "stateful": lambda: StatefulDataLoader(samples(), 2, shuffle=True),
}


def fit(root, seed, make, devices, ckpt_path=None, strategy="ddp", **arguments):
    sg.seed_everything(seed)
    launcher = {"launcher": "fork"} if devices > 1 else {}
    chosen = QUIET | {"max_epochs": 1, "devices": devices, "strategy": strategy, "default_root_dir": root} | launcher
    trainer = sg.Trainer(**(chosen | arguments))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Seeing(root / "seen"), make(), ckpt_path=ckpt_path)
    if ckpt_path is None:
        trainer.save_checkpoint(root / "within.ckpt")
    trainer.close()
    return [str(each.message) for each in told]


def seen(root):
    return [int(word) for path in root.glob("seen.*") for word in path.read_text().split()]


@pytest.mark.every_push("own batches-1")
@pytest.mark.parametrize(
    ("make", "accumulate"), [*((make, 1) for make in LOADERS if make != "in order"), ("shuffled", 3)]
)
def test_another_seed_does_not_shuffle_the_rest_of_the_epoch(tmp_path, make, accumulate):
    fit(tmp_path, 1, LOADERS[make], 2, max_steps=4 // accumulate + 1, accumulate_grad_batches=accumulate)
    fit(tmp_path, 2, LOADERS[make], 2, tmp_path / "within.ckpt", accumulate_grad_batches=accumulate)

    assert sorted(seen(tmp_path)) == list(range(SAMPLES))


@pytest.mark.every_push("ddp_sharded")
@pytest.mark.parametrize("strategy", ["ddp_sharded", "fsdp"])
def test_under_every_strategy_of_several_processes(tmp_path, strategy):
    fit(tmp_path, 1, LOADERS["shuffled"], 2, max_steps=4, strategy=strategy)
    fit(tmp_path, 2, LOADERS["shuffled"], 2, tmp_path / "within.ckpt", strategy=strategy)

    assert sorted(seen(tmp_path)) == list(range(SAMPLES))


@pytest.mark.every_push("shuffled-2-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "before", "after"),
    [("shuffled", 2, 4), ("shuffled", 4, 2), ("shuffled", 2, 1), ("own sampler", 4, 2), ("own generator", 2, 4)],
)
def test_at_another_number_of_processes(tmp_path, make, before, after):
    fit(tmp_path, 1, LOADERS[make], before, max_steps=4)
    fit(tmp_path, 2, LOADERS[make], after, tmp_path / "within.ckpt", strategy="ddp" if after > 1 else "single_device")

    assert sorted(seen(tmp_path)) == list(range(SAMPLES))


def test_with_the_batch_size_that_keeps_the_samples_of_a_step(tmp_path):
    fit(tmp_path, 1, LOADERS["in order"], 2, max_steps=3)
    told = fit(tmp_path, 2, lambda: DataLoader(samples(), 4), 1, tmp_path / "within.ckpt", strategy="single_device")

    assert sorted(seen(tmp_path)) == list(range(SAMPLES))
    assert not any("twice" in each for each in told)


def test_an_order_that_is_lost_is_told(tmp_path):
    fit(tmp_path, 1, LOADERS["own sampler"], 2, max_steps=4)
    told = fit(tmp_path, 2, LOADERS["own sampler"], 1, tmp_path / "within.ckpt", strategy="single_device")

    assert any("and the rest of the epoch comes in another order: some samples come twice or not at all" in each
               for each in told)  # fmt: skip


def test_a_second_fit_keeps_the_order_under_another_seed(tmp_path):
    sg.seed_everything(1)
    trainer = sg.Trainer(strategy="ddp_fork", devices=2, max_steps=4, max_epochs=1, **QUIET)
    model = Seeing(tmp_path / "seen")
    trainer.fit(model, LOADERS["shuffled"]())
    sg.seed_everything(2)
    trainer.max_steps = -1
    trainer.fit(model, LOADERS["shuffled"]())

    assert sorted(seen(tmp_path)) == list(range(SAMPLES))
