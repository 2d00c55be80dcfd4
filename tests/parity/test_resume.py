"""A run that was stopped and resumed ends with the weights of one that was not: bit for bit."""

from __future__ import annotations

import itertools
import random
import zipfile

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Noisy(Net):
    """Dropout uses randomness in every step; the scheduler and Adam have state of their own."""

    def forward(self, x):
        return self.net(torch.nn.functional.dropout(x, 0.2, self.training))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]


def loader(num_workers=0):
    return DataLoader(TensorDataset(*data(48)), 8, shuffle=True, num_workers=num_workers)


class SaveAt(sg.Callback):
    """Saves once, at an epoch's end or in the middle of one."""

    def __init__(self, path, epoch, batch=None):
        self.path, self.epoch, self.batch = path, epoch, batch

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if trainer.current_epoch == self.epoch and batch_idx == self.batch:
            trainer.save_checkpoint(self.path)

    @sg.hookimpl
    def on_train_epoch_end(self, trainer):
        if trainer.current_epoch == self.epoch and self.batch is None:
            trainer.save_checkpoint(self.path)


def train(path, batch, workers=0, **arguments):
    """Return the weights of an uninterrupted run that saved on its way, and of one resumed from there."""
    torch.manual_seed(11)
    whole = Noisy()
    saver = SaveAt(path, 1, batch)
    sg.Trainer(max_epochs=4, callbacks=[saver], **(QUIET | arguments)).fit(whole, loader(workers), loader())

    torch.manual_seed(99)
    torch.randn(5)
    resumed = Noisy()
    trainer = sg.Trainer(max_epochs=4, **(QUIET | arguments))
    trainer.fit(resumed, loader(workers), loader(), ckpt_path=path)
    return [{k: v.clone() for k, v in model.state_dict().items()} for model in (whole, resumed)], trainer.global_step


@pytest.mark.every_push("0-mid-epoch")
@pytest.mark.parametrize("batch", [None, 2], ids=["epoch boundary", "mid-epoch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_equals_uninterrupted(tmp_path, batch, workers):
    (whole, resumed), steps = train(tmp_path / "a.ckpt", batch, workers)

    assert steps == 24
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("batch", [None, 2], ids=["epoch boundary", "mid-window"])
def test_with_accumulation_and_loss_scaling(tmp_path, batch):
    options = {"accumulate_grad_batches": 3, "precision": {"name": "16-mixed", "init_scale": 1024.0}}
    (whole, resumed), steps = train(tmp_path / "a.ckpt", batch, **options)

    assert steps == 8
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def _ddp(rank, world_size, path, batch):
    return train(path, batch, strategy="ddp", devices=world_size)


@pytest.mark.every_push("None")
@pytest.mark.parametrize("batch", [None, 1])
def test_on_two_ranks(tmp_path, batch):
    for (whole, resumed), steps in run_in_processes(_ddp, 2, str(tmp_path / "a.ckpt"), batch):
        assert steps == 12
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_last_finds_the_newest_checkpoint_of_an_earlier_run(tmp_path):
    options = {"default_root_dir": tmp_path, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    sg.Trainer(max_epochs=1, **options).fit(Noisy(), loader())
    trainer = sg.Trainer(max_epochs=2, **options)
    trainer.fit(Noisy(), loader(), ckpt_path="last")

    assert trainer.global_step == 12


def test_last_and_best_without_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(sg.StratagemError, match='ckpt_path is "last"; expected a whole checkpoint in'):
        sg.Trainer(default_root_dir=tmp_path, **QUIET).fit(Noisy(), loader(), ckpt_path="last")
    with pytest.raises(sg.StratagemError, match='ckpt_path is "best"'):
        sg.Trainer(default_root_dir=tmp_path, **QUIET).fit(Noisy(), loader(), ckpt_path="best")


def test_best_is_found_by_another_process(tmp_path):
    """What the callback of an earlier run wrote down is enough."""
    options = {"default_root_dir": tmp_path, "logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    keep = {"name": "model_checkpoint", "monitor": "watched", "save_top_k": 2}
    earlier = sg.Trainer(max_epochs=3, callbacks=[keep], **options)
    module = Worse()
    earlier.fit(module, loader(), loader())
    best = earlier.checkpoint_callback.best_model_path
    assert "epoch=0" in best

    fresh, other = sg.Trainer(callbacks=[keep], **options), Worse()
    fresh.validate(other, loader(), ckpt_path="best")
    saved = sg.Trainer(**options)
    expected = Worse()
    saved.validate(expected, loader(), ckpt_path=best)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), expected.parameters(), strict=True))
    assert not torch.equal(next(other.parameters()), next(module.parameters()))


class Worse(Noisy):
    """Every epoch is worse than the one before."""

    def validation_step(self, batch, batch_idx):
        self.log("watched", float(self.trainer.current_epoch))


def test_another_world_size_reads_it_and_says_what_it_cannot_keep(tmp_path):
    run_in_processes(_ddp, 2, str(tmp_path / "a.ckpt"), None)

    trainer = sg.Trainer(max_epochs=4, **QUIET)
    with pytest.warns(UserWarning, match="random states of 2 processes and this run has 1"):
        trainer.fit(Noisy(), loader(), ckpt_path=tmp_path / "a.ckpt")

    assert trainer.global_step == 6 + 2 * 6


# --- Loaders, ranks, precisions, strategies, windows ---------------------------------------------------------------

SAMPLES = 56  # an odd number of batches: windows of three end in a short one


class Augmented(Dataset):
    """Every sample is another one each time; randomness of all three kinds."""

    def __init__(self):
        self.x, self.y = data(SAMPLES)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(16) + random.random(), self.y[index]


class Stream(IterableDataset):
    """Of a length that nobody knows."""

    def __init__(self):
        self.inner = Augmented()

    def __iter__(self):
        return (self.inner[index] for index in torch.randperm(SAMPLES).tolist())


class Normalized(Noisy):
    """Buffers change with every batch, also within a window; the epoch's metric is watched."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(16), *self.net)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("watched", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.losses.append(float(self.trainer._state.stage_metrics.epoch_values()["watched"]))


LOADERS = {
    "plain": lambda workers: DataLoader(Augmented(), 4, shuffle=True, num_workers=workers),
    "generator": lambda workers: DataLoader(
        Augmented(), 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(5)
    ),
    "stream": lambda workers: DataLoader(Stream(), 4, num_workers=workers),
    # Workers of a stateful loader begin again with their random numbers: no augmentation here.
    "stateful": lambda workers: StatefulDataLoader(
        Augmented() if workers == 0 else TensorDataset(*data(SAMPLES)), 4, shuffle=True, num_workers=workers
    ),
}


def _compare(rank, world_size, folder, cells):
    """Return the cells where a resumed run is not the uninterrupted one."""
    different = []
    for number, (kind, workers, options, batch) in enumerate(cells):
        outcomes = []
        for resumes in (False, True):
            random.seed(3 + resumes)
            torch.manual_seed(3)
            made = LOADERS[kind](workers)
            model = Normalized()
            torch.manual_seed(17 + resumes + rank)
            path = f"{folder}/{number}.ckpt"
            callbacks = [] if resumes else [SaveAt(path, 1, batch)]
            arguments = QUIET | {"devices": world_size, "max_epochs": 3, "callbacks": callbacks} | options
            trainer = sg.Trainer(**arguments)
            trainer.fit(model, made, ckpt_path=path if resumes else None)
            with trainer.run.gathered_state():
                state = trainer.run.ask("model_state", module=model)
            outcomes.append(({k: v.clone() for k, v in state.items()}, model.losses, trainer.global_step))
        (whole, losses, steps), (resumed, again, steps_again) = outcomes
        same = all(torch.equal(whole[name], resumed[name]) for name in whole)
        if not (same and losses[-len(again) :] == again and len(again) == 2 - (batch is None) and steps == steps_again):
            different.append((kind, workers, options, batch, losses, again, steps, steps_again))
    return different


BF16 = {"precision": "bf16-mixed"}
MIXED = {"precision": {"name": "16-mixed", "init_scale": 256.0}}
SETTINGS = [{}, {"accumulate_grad_batches": 3}, {"accumulate_grad_batches": 3} | MIXED, BF16]


@pytest.mark.every_push("stateful-0")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", list(LOADERS))
def test_every_kind_of_loader(tmp_path, kind, workers):
    cells = [(kind, workers, options, batch) for options, batch in itertools.product(SETTINGS, [None, 0, 4])]
    if (kind, workers) == ("stateful", 2):
        cells = cells[1:6:2]  # its workers take a second to start

    assert _compare(0, 1, tmp_path, cells) == []


@pytest.mark.sweep(guard="tests/parity/test_resume.py::test_every_kind_of_loader")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_ranks_with_every_kind_of_loader(tmp_path, strategy):
    plain = [("plain", 0, options, batch) for options, batch in itertools.product(SETTINGS, [None, 0, 4])]
    others = [(kind, workers, SETTINGS[1], 4) for kind in LOADERS for workers in (0, 2)]
    cells = [(k, w, {"strategy": strategy, "checkpoint": "sharded"} | o, b) for k, w, o, b in plain + others]

    assert run_in_processes(_compare, 2, str(tmp_path), cells, limit_s=360) == [[], []]


def test_a_finished_runs_checkpoint_loads_and_returns(tmp_path):
    module = Normalized()
    finished = sg.Trainer(max_epochs=2, **QUIET)
    finished.fit(module, loader())
    finished.save_checkpoint(tmp_path / "end.ckpt")
    again, trainer = Normalized(), sg.Trainer(max_epochs=2, **QUIET)
    trainer.fit(again, loader(), ckpt_path=tmp_path / "end.ckpt")

    assert (trainer.global_step, trainer.current_epoch) == (finished.global_step, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), again.state_dict().values(), strict=True)
    )


FORMATS = ["full", "safetensors", "sharded", "dcp"]


def test_last_and_best_are_found_in_every_form(tmp_path):
    """Another strategy, or another option, writes in another form: what was trained must be found all the same."""
    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
    keep = {"name": "model_checkpoint", "monitor": "watched"}
    for wrote in FORMATS:
        folder = tmp_path / wrote
        earlier = sg.Trainer(max_epochs=1, checkpoint=wrote, callbacks=[keep], default_root_dir=folder, **options)
        earlier.fit(Worse(), loader(), loader())
        for reads in FORMATS:
            trainer = sg.Trainer(checkpoint=reads, callbacks=[keep], default_root_dir=folder, max_epochs=1, **options)
            trainer.fit(Worse(), loader(), loader(), ckpt_path="last")
            assert trainer.global_step == earlier.global_step, (wrote, reads)
            trainer.validate(Worse(), loader(), ckpt_path="best")


def test_last_is_the_newest_of_all_forms_and_what_it_replaces_is_deleted(tmp_path):
    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    for number, form in enumerate(["sharded", "full", "dcp", "safetensors", "full"], start=1):
        keep = {"name": "model_checkpoint", "save_last": True}
        trainer = sg.Trainer(max_epochs=number, checkpoint=form, callbacks=[keep], **options)
        trainer.fit(Noisy(), loader(), ckpt_path="last" if number > 1 else None)

        assert trainer.global_step == 6 * number
        kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("epoch")]
        assert len({name.removesuffix(".sum") for name in kept}) == 1


def test_last_takes_no_other_archive_for_a_checkpoint(tmp_path):
    options = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    sg.Trainer(max_epochs=1, **options).fit(Noisy(), loader())
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:  # newer than the checkpoint
        archive.writestr("images/1.png", b"")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir(mode=0)

    trainer = sg.Trainer(max_epochs=2, **options)
    trainer.fit(Noisy(), loader(), ckpt_path="last")

    assert trainer.global_step == 12


class RowsAndColumns(torch.optim.Optimizer):
    """Keeps state as Adafactor does outside torch: other tensors for matrices than for vectors, some in integers."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if parameter.ndim == 2:
                state.setdefault("exp_avg", torch.zeros(parameter.shape, dtype=torch.uint8))
                state.setdefault("exp_avg_sq_row", torch.zeros(parameter.shape[0])).add_(parameter.grad.square().sum(1))
            else:
                state.setdefault("exp_avg_sq", torch.zeros(1)).add_(parameter.grad.square().sum())
            parameter.sub_(parameter.grad, alpha=1e-3)


class WithRowsAndColumns(Net):
    def configure_optimizers(self):
        return RowsAndColumns(self.parameters())


def test_an_optimizer_may_keep_what_it_likes(tmp_path):
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": tmp_path}
    batches = joined_batches(2, 8)
    sg.Trainer(max_epochs=1, **quiet).fit(WithRowsAndColumns(), batches)

    again = sg.Trainer(max_epochs=2, **quiet)
    again.fit(WithRowsAndColumns(), batches, ckpt_path="last")

    whole = sg.Trainer(max_epochs=2, enable_checkpointing=False, **quiet)
    whole.fit(WithRowsAndColumns(), batches)
    for mine, theirs in zip(again.optimizers[0].state.values(), whole.optimizers[0].state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
