"""Methods of callbacks and loggers that are hooks by their names, and methods of loggers that are called by hand."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from attrs import define, field

import stratagem as sg
from stratagem.errors import ConfigError, PluginError
from stratagem_testing.processes import run_in_processes

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 2}
BATCHES = [torch.ones(2, 1)] * 2


class Net(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callbacks=(), module=None, **arguments):
    trainer = sg.Trainer(**QUIET | {"logger": False, "callbacks": callbacks} | arguments)
    trainer.fit(module or Net(), BATCHES)
    return trainer


# --- Callbacks -----------------------------------------------------------------------------------------------------


class AsInLightning(sg.Callback):
    """Written for Lightning: no marks, ``pl_module``, calls of the base's methods."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.seen = limit, []

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.seen.append(("setup", stage))

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.seen.append(("start", type(pl_module).__name__))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((batch_idx, float(batch.sum())))

    def on_train_epoch_end(self, *arguments):
        trainer, _ = arguments
        self.seen.append(("epoch", trainer.current_epoch))

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["mine"] = self.limit

    def state_dict(self):
        return super().state_dict() | {"count": len(self.seen)}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.loaded = state_dict["count"]


def test_a_callback_written_for_lightning_is_called(tmp_path):
    callback = AsInLightning(3)
    trainer = fit([callback])

    epoch = [(0, 2.0), (1, 2.0)]
    assert callback.seen == [("setup", "fit"), ("start", "Net"), *epoch, ("epoch", 0), *epoch, ("epoch", 1)]
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = AsInLightning(3)
    sg.Trainer(**QUIET | {"max_epochs": 3}, logger=False, callbacks=[again]).fit(
        Net(), BATCHES, ckpt_path=tmp_path / "x.ckpt"
    )
    assert again.loaded == len(callback.seen)
    assert torch.load(tmp_path / "x.ckpt")["mine"] == 3


class Mixin:
    def on_fit_end(self, trainer, pl_module):
        self.ended = trainer.global_step


@define(eq=False, kw_only=True)
class Mixed(Mixin, sg.Callback):
    """Slots, options, a mixin that is not a callback, and a marked hook beside unmarked ones."""

    width: int = 3
    ended: int = field(init=False, default=0)
    began: int = field(init=False, default=0)

    @sg.hookimpl(tryfirst=True)
    def on_fit_start(self, trainer):
        self.began += 1

    def on_train_epoch_start(self, module):
        self.began += 10


def test_methods_of_a_mixin_and_of_a_class_with_slots_are_called():
    callback = Mixed()
    fit([callback])

    assert (callback.began, callback.ended) == (21, 4)
    assert pickle.loads(pickle.dumps(callback)).began == 21


class Deeper(Mixed):
    def on_train_epoch_start(self, trainer, pl_module):
        super().on_train_epoch_start(pl_module)


def test_a_method_that_overrides_an_unmarked_one_is_called_once():
    callback = Deeper()
    fit([callback])

    assert callback.began == 21


def test_an_empty_state_of_the_base_is_not_saved(tmp_path):
    class Stateless(sg.Callback):
        def on_fit_end(self):
            pass

    fit([Stateless()]).save_checkpoint(tmp_path / "x.ckpt")

    assert not torch.load(tmp_path / "x.ckpt")["callbacks"]


def test_a_hook_set_to_none_is_left_out():
    class Quiet(Mixed):
        on_train_epoch_start = None

    callback = Quiet()
    fit([callback])
    assert callback.began == 1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda self, trainer, module, more: None, r"Odd.on_fit_end takes \(self, trainer, module, more\); expected \(self, trainer, module\)"),
        (lambda self, *, more: None, r"Odd.on_fit_end takes \(self, more\); expected \(self, trainer, module\)"),
        (3, "Odd.on_fit_end is a int; expected a method"),
    ],
)  # fmt: skip
def test_a_method_that_cannot_be_called_is_refused(method, message):
    with pytest.raises(PluginError, match=message):
        type("Odd", (sg.Callback,), {"on_fit_end": method})


# --- Loggers -------------------------------------------------------------------------------------------------------


class Lines(sg.Logger):
    """Written for Lightning, without marks."""

    def __init__(self):
        super().__init__()
        self.metrics, self.params = [], {}

    def log_metrics(self, metrics, step):
        self.metrics.append((step, metrics))

    def log_hyperparams(self, params):
        self.params.update(params)


class ByHand(Net):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()

    def on_train_start(self):
        for logger in self.loggers:
            logger.log_hyperparams(argparse.Namespace(depth=4))

    def on_train_epoch_end(self):
        for logger in self.loggers:
            logger.log_metrics({"mine": torch.tensor(0.5)}, step=100 + self.current_epoch)
        self.logger.log_metrics({"late": 1})


def test_a_logger_written_for_lightning_is_called_by_the_loop_and_by_hand():
    logger = Lines()
    fit(logger=logger, module=ByHand(), log_every_n_steps=1)

    assert logger.params == {"width": 3, "depth": 4}
    assert [row for row in logger.metrics if "mine" in row[1]] == [(100, {"mine": 0.5}), (101, {"mine": 0.5})]
    assert [step for step, row in logger.metrics if "late" in row] == [2, 4]


def test_the_csv_file_has_what_was_logged_by_hand(tmp_path):
    trainer = fit(logger="csv", module=ByHand(), default_root_dir=tmp_path)

    text = Path(trainer.log_dir, "metrics.csv").read_text()
    assert "mine" in text.splitlines()[0]
    assert "late" in text.splitlines()[0]
    assert json.loads(Path(trainer.log_dir, "hparams.json").read_text()) == {"width": 3, "depth": 4}


def test_outside_a_run_and_with_something_else_is_refused():
    from stratagem.loggers import CSVLogger

    with pytest.raises(
        ConfigError, match="CSVLogger.log_metrics was called outside a run; expected a logger of a train"
    ):
        CSVLogger().log_metrics({"a": 1}, 3)
    logger = Lines()
    trainer = fit(logger=logger)
    with pytest.raises(
        ConfigError, match="log_hyperparams was given 3; expected a mapping, a namespace or a dataclass"
    ):
        logger.log_hyperparams(3)
    assert copy.deepcopy(logger).metrics == logger.metrics
    trainer.close()


def log_on_two_ranks(rank, world_size):
    logger = Lines()
    fit(logger=logger, module=ByHand(), devices=world_size, strategy="ddp")
    return len([row for row in logger.metrics if "mine" in row[1]]), logger.params


def test_only_rank_0_writes_what_is_logged_by_hand():
    first, second = run_in_processes(log_on_two_ranks, 2)

    assert first == (2, {"width": 3, "depth": 4})
    assert second == (0, {})


class OnConnect(sg.Logger):
    """Has a hook that a base class may have, too."""

    written: ClassVar[list[Any]] = []

    @sg.hookimpl
    def on_connect(self):
        pass

    def log_metrics(self, metrics, step):
        self.written.append((metrics, step))

    def log_hyperparams(self, params):
        pass


def test_a_logger_is_called_by_hand_within_a_run():
    logger = OnConnect()
    with sg.Run(plugins=[logger], accelerator="cpu"):
        logger.log_metrics({"loss": 0.5}, 3)

    assert OnConnect.written == [({"loss": 0.5}, 3)]
