"""Training that ends within an epoch tells its end, validates where asked to stop, and resumes to the bit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def loader(count=32, batch_size=8, **options):
    return DataLoader(TensorDataset(*data(count)), batch_size, **options)


class Watched(Net):
    """Dropout and a scheduler show a resumed run that is not the same; epochs of four batches."""

    def __init__(self):
        super().__init__()
        self.told, self.ends, self.validations, self.stop_at = [], 0, 0, None

    def forward(self, x):
        return self.net(torch.nn.functional.dropout(x, 0.2, self.training))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("index", float(batch_idx), on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self):
        if self.trainer.global_step == self.stop_at:
            self.trainer.should_stop = True

    def on_train_epoch_end(self):
        self.ends += 1
        self.log("at_end", float(self.trainer.global_step))

    def on_validation_epoch_end(self):
        self.validations += 0 if self.trainer.sanity_checking else 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Ends(sg.Callback):
    def __init__(self, path=None):
        self.path, self.seen = path, []

    @sg.hookimpl
    def on_train_epoch_end(self, trainer):
        self.seen.append((trainer.global_step, trainer.position.epoch_ended, float(trainer.callback_metrics["index"])))
        if self.path is not None and not trainer.position.epoch_ended:
            trainer.save_checkpoint(self.path)


AT_ONCE = {"max_time": timedelta(microseconds=1)}
STOPS = [
    # options, stop_at, steps, epoch ends, validations, the epoch that is under way
    ({"max_steps": 6, "max_epochs": None}, None, 6, 2, 1, 1),
    ({"max_steps": 3, "max_epochs": None}, None, 3, 1, 0, 0),
    ({"max_steps": 8, "max_epochs": None}, None, 8, 2, 2, 2),
    ({}, 6, 6, 2, 2, 1),
    ({}, 2, 2, 1, 1, 0),
    ({}, 4, 4, 1, 1, 1),
    ({"min_epochs": 1}, 2, 4, 1, 1, 1),
    ({"val_check_interval": 2}, 2, 2, 1, 1, 0),
    ({"check_val_every_n_epoch": 2}, 2, 2, 1, 0, 0),
    ({"check_val_every_n_epoch": 2}, 6, 6, 2, 1, 1),
    ({"min_steps": 2} | AT_ONCE, None, 2, 1, 1, 0),
    ({"min_steps": 4} | AT_ONCE, None, 4, 1, 1, 1),
]


@pytest.mark.parametrize(("options", "stop_at", "steps", "ends", "validations", "epoch"), STOPS)
def test_an_end_within_an_epoch_is_told_and_validated(options, stop_at, steps, ends, validations, epoch):
    module, callback = Watched(), Ends()
    module.stop_at = stop_at
    trainer = sg.Trainer(callbacks=[callback], num_sanity_val_steps=0, **QUIET | {"max_epochs": 5} | options)
    trainer.fit(module, loader(), loader())
    within = steps % 4
    (*_, last) = callback.seen

    assert (trainer.global_step, module.ends, module.validations, trainer.current_epoch) == (
        steps, ends, validations, epoch,
    )  # fmt: skip
    assert last == (steps, not within, (within - 1) / 2 if within else 1.5)
    assert float(trainer.callback_metrics["at_end"]) == steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5 ** (steps // 4))


def patient():
    return EarlyStopping(monitor="index", patience=9, check_on_train_epoch_end=True)


def _weights(module):
    return [p.detach().clone() for p in module.parameters()]


def _run(path, moment, options):
    """Return an uninterrupted run, and one that ended within its second epoch and was resumed in a new trainer."""
    settings = QUIET | {"max_epochs": 3} | options
    torch.manual_seed(11)
    whole, watched = Watched(), Ends()
    trainer = sg.Trainer(callbacks=[watched, patient()], **settings)
    trainer.fit(whole, loader(shuffle=True), loader())

    torch.manual_seed(11)
    cut = Watched()
    callbacks = [Ends(path if moment == "epoch end" else None), patient()]
    halves = "accumulate_grad_batches" in settings or settings.get("devices") == 2  # half as many steps in an epoch
    first = sg.Trainer(callbacks=callbacks, **settings | {"max_steps": 3 if halves else 6})
    first.fit(cut, loader(shuffle=True), loader())
    if moment == "afterwards":
        first.save_checkpoint(path)

    torch.manual_seed(5)
    resumed, again = Watched(), Ends()
    second = sg.Trainer(callbacks=[again, patient()], **settings)
    second.fit(resumed, loader(shuffle=True), loader(), ckpt_path=path)
    same = all(torch.equal(a, b) for a, b in zip(_weights(whole), _weights(resumed), strict=True))
    waits = trainer.callbacks[-1].wait_count, second.callbacks[-1].wait_count
    return same, watched.seen[1:], again.seen, waits, trainer.global_step, second.global_step


CUTS = [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 1}]


@pytest.mark.every_push("afterwards-{}")
@pytest.mark.parametrize("options", CUTS, ids=str)
@pytest.mark.parametrize("moment", ["epoch end", "afterwards"])
def test_a_checkpoint_of_a_cut_epoch_resumes_exactly(tmp_path, moment, options):
    same, wanted, found, waits, *steps = _run(tmp_path / "a.ckpt", moment, options)

    assert same
    assert found == wanted
    assert waits[0] == waits[1]
    assert steps[0] == steps[1]


def _on_two(rank, world_size, path):
    return _run(path, "epoch end", {"strategy": "ddp", "devices": world_size})


def test_it_resumes_exactly_on_two_ranks(tmp_path):
    for same, wanted, found, waits, *steps in run_in_processes(_on_two, 2, str(tmp_path / "a.ckpt")):
        assert (same, found, waits[0], steps[0]) == (True, wanted, waits[1], steps[1])


def test_a_second_fit_goes_on_within_the_epoch():
    weights = []
    for limits in ([12], [3, 6, 12]):
        torch.manual_seed(3)
        module = Watched()
        trainer = sg.Trainer(max_steps=12, **QUIET)
        for limit in limits:
            trainer.max_steps = limit
            trainer.fit(module, loader(shuffle=True))
        weights.append(_weights(module))
        assert (trainer.global_step, trainer.current_epoch) == (12, 3)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_callbacks_that_watch_what_a_cut_epoch_lacks_go_on(tmp_path):
    """Nothing was validated when training ended."""
    keep = ModelCheckpoint(dirpath=tmp_path, monitor="val_loss", save_on_train_epoch_end=True)
    watch = EarlyStopping(monitor="val_loss", check_on_train_epoch_end=True)
    arguments = QUIET | {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    trainer = sg.Trainer(max_steps=2, callbacks=[keep, watch], **arguments)
    trainer.fit(Watched(), loader(), loader())

    assert (trainer.global_step, watch.wait_count, keep.best_model_path) == (2, 0, "")


def test_averages_are_of_whole_epochs():
    averages = []
    for limits in ([12], [6, 12]):
        torch.manual_seed(3)
        module = Watched()
        swa = {"name": "stochastic_weight_averaging", "swa_lrs": 0.01, "swa_epoch_start": 0}
        trainer = sg.Trainer(max_epochs=3, callbacks=[swa], **QUIET)
        for limit in limits:
            trainer.max_steps = limit
            trainer.fit(module, loader(shuffle=True))
        averages.append(trainer.callbacks[-1].count)
    assert averages == [3, 3]


@pytest.mark.parametrize("between", ["test", "predict", "validate"])
def test_a_validation_that_is_due_is_not_forgotten(tmp_path, between):
    """Training stops where a validation is due; what the trainer does before it saves does not count as that one."""
    options = QUIET | {"max_epochs": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    first, second = Watched(), Watched()
    trainer = sg.Trainer(**options | {"max_steps": 2})
    trainer.fit(first, loader(), loader(8))
    getattr(trainer, between)(first, loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    sg.Trainer(**options).fit(second, loader(), loader(8), ckpt_path=tmp_path / "a.ckpt")

    whole = Watched()
    sg.Trainer(**options).fit(whole, loader(), loader(8))
    calls = {"validate": 1}.get(between, 0)  # of the trainer's own
    assert first.validations - calls + second.validations == whole.validations == 2
