"""early_stopping ends training when it should, on all ranks at once, and says what is wrong with its metric."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.callbacks import EarlyStopping
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import outcome, share

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
NAN = float("nan")


class Scored(Net):
    """Logs a given score each epoch, after validation or after training."""

    def __init__(self, scores, stage="validation"):
        super().__init__()
        self.scores, self.stage = scores, stage

    def validation_step(self, batch, batch_idx):
        if self.stage == "validation":
            self.log("score", self.scores[self.current_epoch])

    def training_step(self, batch, batch_idx):
        if self.stage == "training":
            self.log("score", self.scores[self.current_epoch], on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def fit(scores, stage="validation", **options):
    callback = EarlyStopping(monitor="score", **options)
    trainer = sg.Trainer(max_epochs=len(scores), callbacks=callback, **QUIET)
    batches = joined_batches(2, 8)
    trainer.fit(Scored(scores, stage), batches, batches if stage == "validation" else None)
    return callback, trainer.current_epoch


@pytest.mark.every_push(
    "validation-no progress", "validation-not a number", "validation-good enough", "training-hopeless"
)
@pytest.mark.parametrize(
    ("scores", "options", "epochs"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, 5),
        ([5, 4, 4, 4, 4], {"patience": 1}, 3),
        ([5, 4, 4, 4, 4], {"patience": 2}, 4),
        ([5, 4, 4, 3, 3, 3], {"patience": 2}, 6),
        ([1, 2, 3, 3, 3], {"patience": 1, "mode": "max"}, 4),
        ([5, 4.5, 4, 3.9, 3.8], {"patience": 1, "min_delta": 0.3}, 4),
        ([5, 4.5, 4, 3.9, 3.8], {"patience": 1, "min_delta": -0.3}, 4),
        ([5, NAN, 4, 3], {"patience": 9}, 2),
        ([5, NAN, 4, 3], {"patience": 9, "check_finite": False}, 4),
        ([5, 0.4, 0.3, 0.2], {"stopping_threshold": 0.5}, 2),
        ([5, 50, 3, 2], {"divergence_threshold": 10.0, "patience": 9}, 2),
        ([5, 6, 7, 8], {"patience": 0}, 1),
    ],
    ids=[
        "progress", "no progress", "patience of two", "progress within patience", "max", "too little progress",
        "a little worse is progress", "not a number", "not a number, unchecked", "good enough", "hopeless", "no patience",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["validation", "training"])
def test_training_ends_after_so_many_epochs(scores, options, epochs, stage):
    if options.get("patience") == 0:
        epochs = 2  # the first value is always the best so far
    callback, trained = fit(scores, stage, **options)
    assert trained == epochs
    assert bool(callback.stopping_reason) == (epochs < len(scores) or callback.wait_count >= callback.patience)


def test_it_says_why(capsys):
    callback, _ = fit([5, 4, 4, 4], patience=2, verbose=True)
    assert callback.stopping_reason == "score has not improved on 4 in 2 checks"
    assert callback.stopped_epoch == 3
    assert "early stopping: score has not improved on 4 in 2 checks" in capsys.readouterr().out


def test_min_epochs_come_first():
    callback = EarlyStopping(monitor="score", patience=1)
    trainer = sg.Trainer(max_epochs=6, min_epochs=5, callbacks=callback, **QUIET)
    batches = joined_batches(2, 8)
    trainer.fit(Scored([1, 2, 3, 4, 5, 6]), batches, batches)
    assert trainer.current_epoch == 5


def test_a_resumed_run_goes_on_waiting(tmp_path):
    batches = joined_batches(2, 8)
    first = sg.Trainer(max_epochs=2, callbacks=EarlyStopping(monitor="score", patience=3), **QUIET)
    first.fit(Scored([4] * 9), batches, batches)
    first.save_checkpoint(tmp_path / "x.ckpt")
    again = sg.Trainer(max_epochs=9, callbacks=EarlyStopping(monitor="score", patience=3), **QUIET)
    again.fit(Scored([4] * 9), batches, batches, ckpt_path=tmp_path / "x.ckpt")
    assert again.current_epoch == 4


# --- Mistakes ----------------------------------------------------------------------------------------------------


def test_a_metric_that_nobody_logged():
    batches = joined_batches(2, 8)
    trainer = sg.Trainer(max_epochs=2, callbacks=EarlyStopping(monitor="val_lss"), **QUIET)
    with pytest.raises(ConfigError, match="monitor is 'val_lss', which nobody logged; expected one of .*val_loss"):
        trainer.fit(Net(), batches, batches)
    lenient = sg.Trainer(max_epochs=2, callbacks=EarlyStopping(monitor="val_lss", strict=False), **QUIET)
    lenient.fit(Net(), batches, batches)
    assert lenient.current_epoch == 2


def test_its_monitor_must_be_named():
    with pytest.raises(ConfigError, match="monitor"):
        sg.Trainer(callbacks="early_stopping", **QUIET)


class Differing(Net):
    def validation_step(self, batch, batch_idx):
        self.log("score", float(self.global_rank))


def _differs(rank, world_size):
    trainer = sg.Trainer(
        max_epochs=2, strategy="ddp", devices=world_size, callbacks=EarlyStopping(monitor="score"), **QUIET
    )
    batches = share(trainer, joined_batches(2, 8))
    return outcome(lambda: trainer.fit(Differing(), batches, batches))


def test_ranks_that_would_decide_differently_are_told():
    for said in run_in_processes(_differs, 2):
        assert said == (
            "refused: early_stopping.monitor 'score' is 0 on rank 0, 1 on rank 1; expected one value on all ranks, as all "
            "follow the same decision; log it with self.log('score', ..., sync_dist=True)."
        )


def _together(rank, world_size):
    callback = EarlyStopping(monitor="val_loss", patience=1, min_delta=100.0)
    trainer = sg.Trainer(max_epochs=9, strategy="ddp", devices=world_size, callbacks=callback, **QUIET)
    batches = share(trainer, joined_batches(2, 8))
    trainer.fit(Net(), batches, batches)
    return trainer.current_epoch, trainer.global_step


def test_all_ranks_end_together():
    assert run_in_processes(_together, 2) == [(2, 4), (2, 4)]
