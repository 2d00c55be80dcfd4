"""Loaders that are made again, validation counted over epochs, no training, predictions that are not kept, results shown."""

from __future__ import annotations

import gc
import multiprocessing

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


class Net(sg.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        self.seen, self.validated_at = [], []

    def forward(self, batch):
        return self.layer(batch)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, float(batch[0, 0])))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean())

    def on_validation_start(self):
        self.validated_at.append(len(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Data(sg.DataModule):
    """A training set that depends on the epoch it is made in, and on the random numbers of that moment."""

    def __init__(self):
        self.made = []

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        self.made.append(epoch)
        torch.rand(1)
        return torch.utils.data.DataLoader([torch.full((2,), epoch + n / 10) for n in range(3 + epoch % 2)], 1)

    def val_dataloader(self):
        return [torch.ones(1, 2) * (1 + self.trainer.current_epoch)]


def fit(module, data=None, loaders=(), ckpt_path=None, **arguments):
    trainer = sg.Trainer(**QUIET | {"max_epochs": 4} | arguments)
    trainer.fit(module, *loaders, datamodule=data, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(("every", "made"), [(0, [0]), (1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_loaders_are_made_again_for_every_nth_epoch(every, made):
    module, data = Net(), Data()
    trainer = fit(module, data, reload_dataloaders_every_n_epochs=every)

    assert data.made == made
    expected = [(epoch, (max(e for e in made if e <= epoch))) for epoch in range(4)]
    assert [(epoch, int(value)) for epoch, value in module.seen] == [
        (epoch, made_in) for epoch, made_in in expected for _ in range(3 + made_in % 2)
    ]
    assert trainer.train_dataloader is trainer._state.train_batches.loader


@pytest.mark.every_push("after_9-2")
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stop", [2, 3, 4, 6, 8, 9], ids=lambda stop: f"after_{stop}")
def test_a_run_that_resumes_uses_the_loaders_of_that_epoch(tmp_path, every, stop):
    whole, first, second = Net(), Net(), Net()
    options = {"reload_dataloaders_every_n_epochs": every}
    fit(whole, Data(), **options)
    fit(first, Data(), max_steps=stop, **options).save_checkpoint(tmp_path / "x.ckpt")
    fit(second, Data(), ckpt_path=tmp_path / "x.ckpt", **options)

    assert first.seen + second.seen == whole.seen
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_loaders_that_cannot_be_made_again_are_refused():
    with pytest.raises(ConfigError, match="reload_dataloaders_every_n_epochs is 1 and fit got a training loader"):
        fit(Net(), loaders=[[torch.ones(1, 2)]], reload_dataloaders_every_n_epochs=1)


def test_validation_counts_batches_over_epochs(tmp_path):
    loaders = [[torch.ones(1, 2)] * 3, [torch.ones(1, 2)]]
    whole, first, second = Net(), Net(), Net()
    counted = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    fit(whole, loaders=loaders, **counted)
    assert whole.validated_at == [5, 10]

    fit(first, loaders=loaders, **counted, max_steps=4).save_checkpoint(tmp_path / "x.ckpt")
    fit(second, loaders=loaders, **counted, ckpt_path=tmp_path / "x.ckpt")
    assert [*first.validated_at, *(4 + n for n in second.validated_at)] == [5, 10]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 5}, "is 5 and an epoch has 3 batches; .*set check_val_every_n_epoch=None"),
        ({"check_val_every_n_epoch": None}, "val_check_interval is 1.0 with check_val_every_n_epoch=None; expected a who"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch is 0; expected at least 1"),
    ],
)  # fmt: skip
def test_intervals_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        fit(Net(), loaders=[[torch.ones(1, 2)] * 3, [torch.ones(1, 2)]], **options)


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_fit_without_training_batches_trains_nothing(limit):
    module, events = Net(), []
    module.on_fit_start = lambda: events.append("start")
    module.on_train_start = lambda: events.append("train")
    module.on_fit_end = lambda: events.append("end")
    with pytest.warns(UserWarning, match="limit_train_batches is 0: nothing is trained"):
        trainer = fit(module, loaders=[[torch.ones(1, 2)], [torch.ones(1, 2)]], limit_train_batches=limit,
                      num_sanity_val_steps=1)  # fmt: skip

    assert (module.seen, events, trainer.global_step) == ([], ["start", "end"], 0)
    assert module.validated_at == [0]
    assert trainer.estimated_stepping_batches == 0


def test_predictions_are_kept_unless_they_are_not_wanted():
    module, trainer = Net(), sg.Trainer(**QUIET)
    batches, ended = [torch.ones(1, 2), torch.zeros(1, 2)], []
    module.on_predict_batch_end = lambda outputs, batch, batch_idx: ended.append(outputs)

    assert trainer.predict(module, batches, return_predictions=False) == []
    kept = trainer.predict(module, batches)
    assert [float(each) for each in kept] == [float(each) for each in ended[:2]]


def test_results_are_shown_unless_they_are_not_wanted(capsys):
    module, trainer = Net(), sg.Trainer(**QUIET | {"enable_progress_bar": True})
    one, other = (torch.utils.data.DataLoader([torch.full((2,), value)]) for value in (1.0, 0.0))

    loss = trainer.validate(module, one)[0]["val_loss"]
    assert f"validate: val_loss {loss:.4g}\n" in capsys.readouterr().out
    trainer.validate(module, [one, other], verbose=False)
    assert "validate" not in capsys.readouterr().out
    module.validation_step = lambda batch, batch_idx, dataloader_idx: module.log("loss", batch.sum())
    trainer.validate(module, [one, other])
    assert "validate 0: loss/dataloader_idx_0 2\nvalidate 1: loss/dataloader_idx_1 0\n" in capsys.readouterr().out
    sg.Trainer(**QUIET).validate(module, [one, other])
    assert not capsys.readouterr().out


class Options(torch.optim.SGD):
    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            group["scale"] = scale
        return super().step(closure)


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).square().mean())
        optimizer.step(scale=0.5)

    def configure_optimizers(self):
        return Options(self.parameters(), lr=0.1)


class Stepping(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure, scale=0.5)

    def configure_optimizers(self):
        return Options(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [ByHand, Stepping])
def test_a_step_passes_options_to_the_optimizer(module):
    trainer = fit(module(), loaders=[[torch.ones(1, 2)]], max_epochs=1)

    assert trainer.optimizers[0].param_groups[0]["scale"] == 0.5


@pytest.mark.parametrize("module", [ByHand, Stepping])
def test_options_that_a_precision_would_drop_are_refused(module):
    with pytest.raises(ConfigError, match="optimizer.step got scale, and .*16-mixed.* steps it"):
        fit(module(), loaders=[[torch.ones(1, 2)]], max_epochs=1, precision="16-mixed")


class FromWorkers(Data):
    def train_dataloader(self):
        return torch.utils.data.DataLoader([torch.ones(2)] * 2, 1, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return self.train_dataloader()


class Collecting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return torch.ones(2)


def _load_after_a_run(rank, world_size):
    gc.disable()
    trainer = sg.Trainer(**QUIET, strategy="fsdp", devices=2, max_epochs=1)
    trainer.fit(Net(), [torch.ones(1, 2)])
    trainer.close()
    del trainer
    return len(list(torch.utils.data.DataLoader(Collecting(), num_workers=1)))


@pytest.mark.slow
def test_workers_do_not_free_the_process_group_of_an_earlier_run():
    """The destructor of a group would wait in the worker, for threads of the rank: forever, or until it crashes."""
    assert run_in_processes(_load_after_a_run, 2, limit_s=120) == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
def test_workers_that_persist_end_with_the_call_and_with_their_loader(every):
    class Counting(Net):
        def on_train_epoch_start(self):
            workers.append(len(multiprocessing.active_children()))

    workers, before = [], len(multiprocessing.active_children())
    trainer = fit(Counting(), FromWorkers(), max_epochs=3, reload_dataloaders_every_n_epochs=every)
    assert workers == [before, before if every else before + 2, before if every else before + 2]
    assert len(multiprocessing.active_children()) == before
    trainer.validate(datamodule=FromWorkers())
    assert len(multiprocessing.active_children()) == before


def test_options_of_log_that_lightning_has_say_what_to_do_instead():
    class Logging(Net):
        def validation_step(self, batch, batch_idx):
            self.log("loss", 1.0, sync_dist=True, sync_dist_group=None)

    with pytest.raises(ConfigError, match=r"log\('loss'\) got sync_dist_group; .*torch.distributed.all_reduce"):
        sg.Trainer(**QUIET).validate(Logging(), [torch.ones(1, 2)])
