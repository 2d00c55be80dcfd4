"""Resuming from a checkpoint that was written at an odd moment, or in another kind of run, is neither silent nor wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EMA, ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Noisy(Net):
    def forward(self, x):
        return self.net(torch.nn.functional.dropout(x, 0.2, self.training))

    def training_step(self, batch, batch_idx):
        self.log("index", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]), sync_dist=True)


def loader(batch_size=4, count=32, **options):
    return DataLoader(TensorDataset(*data(count)), batch_size, **options)


class SaveAlways(sg.Callback):
    """After every batch and, as `event`, around validation."""

    def __init__(self, folder):
        self.folder = folder

    @sg.hookimpl(trylast=True)
    def on_train_batch_end(self, trainer, batch_idx):
        trainer.save_checkpoint(self.folder / f"batch{batch_idx}.ckpt")

    @sg.hookimpl
    def on_validation_start(self, trainer):
        if trainer.fitting:
            trainer.save_checkpoint(self.folder / f"before{trainer.position.batches_done}.ckpt")

    @sg.hookimpl(trylast=True)
    def on_validation_end(self, trainer):
        if trainer.fitting:
            trainer.save_checkpoint(self.folder / f"after{trainer.position.batches_done}.ckpt")


@pytest.mark.every_push("{'accumulate_grad_batches': 3}")
@pytest.mark.parametrize("options", [
    {"val_check_interval": 4}, {"val_check_interval": 2, "accumulate_grad_batches": 4}, {"accumulate_grad_batches": 3},
], ids=str)  # fmt: skip
def test_every_moment_of_an_epoch_resumes_exactly(tmp_path, options):
    def train(path=None):
        torch.manual_seed(1 if path is None else 2)
        module = Noisy()
        callbacks = [SaveAlways(tmp_path)] if path is None else []
        trainer = sg.Trainer(max_epochs=1, callbacks=callbacks, enable_checkpointing=False, **QUIET | options)
        trainer.fit(module, loader(shuffle=True), loader(), ckpt_path=path)
        return [p.clone() for p in module.parameters()], {n: float(v) for n, v in trainer.callback_metrics.items()}

    weights, metrics = train()
    moments = sorted(tmp_path.glob("*.ckpt"))
    assert len(moments) >= 10
    different = []
    for path in moments:
        again, found = train(path)
        same = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
        if not same or found["index"] != metrics["index"] or found["val_loss"] != metrics["val_loss"]:
            different.append((path.name, found))
    assert different == []


def test_an_epoch_that_has_fewer_batches_by_now_ends_after_as_many_samples(tmp_path):
    keep = ModelCheckpoint(every_n_train_steps=6)
    sg.Trainer(max_steps=6, callbacks=[keep], default_root_dir=tmp_path, **QUIET).fit(Net(), loader())
    # 24 of 32 samples are done: one batch of 8 is left, and none of the first five of 4.
    for options, batches, steps in (({}, loader(8), 6 + 1 + 2 * 4), ({"limit_train_batches": 5}, loader(), 6 + 2 * 5)):
        trainer = sg.Trainer(max_epochs=3, enable_checkpointing=False, **QUIET | options)
        trainer.fit(Net(), batches, ckpt_path=keep.best_model_path)
        assert (trainer.current_epoch, trainer.global_step) == (3, steps)


def _on_two(rank, world_size, path, folder):
    trainer = sg.Trainer(max_epochs=2, strategy="ddp", devices=world_size, default_root_dir=folder, **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Net(), loader(), ckpt_path=path)
    return trainer.global_step


def test_at_another_number_of_processes_as_many_samples_are_done(tmp_path):
    keep = ModelCheckpoint(every_n_train_steps=6)
    sg.Trainer(max_steps=6, callbacks=[keep], default_root_dir=tmp_path, **QUIET).fit(Net(), loader())
    # 24 of 32 samples are done: one batch of four is left for each of two ranks, then an epoch of four.
    assert run_in_processes(_on_two, 2, keep.best_model_path, str(tmp_path / "two")) == [6 + 1 + 4] * 2


def test_a_checkpoint_that_takes_the_place_of_the_one_it_beats_stays(tmp_path):
    class Better(Noisy):
        def validation_step(self, batch, batch_idx):
            self.log("score", -float(self.trainer.global_step))

    for top, names in ((1, {"best.ckpt"}), (2, {"best.ckpt", "best-v1.ckpt"})):
        keep = ModelCheckpoint(monitor="score", filename="best", save_top_k=top, dirpath=tmp_path / str(top))
        sg.Trainer(max_epochs=3, callbacks=[keep], **QUIET).fit(Better(), loader(), loader())
        assert {path.name for path in (tmp_path / str(top)).glob("*.ckpt")} == names
        state = torch.load(keep.best_model_path, weights_only=True)
        assert state["loop"]["global_step"] == 24 == -keep.best_model_score


def test_averages_stay_in_their_run(tmp_path):
    trainer = sg.Trainer(max_epochs=1, callbacks=[EMA(decay=0.5)], default_root_dir=tmp_path, **QUIET)
    trainer.fit(Noisy(), loader(), loader())
    saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    other = Noisy()
    before = trainer.validate(other, loader())[0]["val_loss"]
    assert before == sg.Trainer(**QUIET).validate(Noisy(), loader())[0]["val_loss"]
    [average] = [state for key, state in saved["callbacks"].items() if key.startswith("callback.") and ":EMA" in key]
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in average["average"].items())
    assert any(not torch.equal(saved["state_dict"][name], value) for name, value in average["weights"].items())


def test_persistent_workers_keep_the_order(tmp_path):
    class Recorded(Net):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(float(batch[0].sum()))
            return super().training_step(batch, batch_idx)

    def run(epochs, path=None):
        torch.manual_seed(3)
        module = Recorded()
        made = loader(8, shuffle=True, num_workers=1, persistent_workers=True)
        trainer = sg.Trainer(max_epochs=epochs, default_root_dir=tmp_path, **QUIET)
        trainer.fit(module, made, ckpt_path=path)
        return module.seen

    whole = run(2)
    run(1)
    assert run(2, "last") == whole[4:]


def _stop_alone(rank, world_size):
    import stratagem_trainer.fit_state

    stratagem_trainer.fit_state.BARRIER_TIMEOUT_S = 2.0

    class Stop(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer):
            trainer.should_stop = trainer.should_stop or trainer.global_rank == 0

    with pytest.raises(sg.StratagemError) as caught:
        sg.Trainer(max_epochs=2, strategy="ddp", devices=world_size, callbacks=[Stop()], **QUIET).fit(Net(), loader())
    return str(caught.value)


@pytest.mark.slow
def test_one_rank_alone_cannot_stop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message in run_in_processes(_stop_alone, 2):
        assert "trainer.should_stop = True was called on rank 0 and on 1 of 2 ranks" in message


class Base(Net):
    def __init__(self, width=16, **more):
        super().__init__()
        self.save_hyperparameters()
        self.width = width


class Derived(Base):
    def __init__(self, depth, width=8):
        super().__init__(width=width + 1, extra=7)
        self.depth = depth


def test_hyper_parameters_are_those_of_the_class_that_was_built(tmp_path):
    module = Derived(5)
    assert module.hparams == {"width": 8, "extra": 7, "depth": 5}
    trainer = sg.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Derived.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (again.depth, again.width) == (5, 9)


@pytest.mark.parametrize(("options", "message"), [
    ({"limit_val_batches": 0.1}, "limit_val_batches is 0.1, and the loader has 8 batches: none of them"),
    ({"val_check_interval": 0.5, "stream": True}, "val_check_interval is 0.5 and the training loader has no length"),
])  # fmt: skip
def test_what_would_have_no_effect_is_refused(options, message):
    batches = (batch for batch in loader()) if options.pop("stream", False) else loader()
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(max_epochs=1, enable_checkpointing=False, **QUIET | options).fit(Noisy(), batches, loader())
