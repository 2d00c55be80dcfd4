"""`save_hyperparameters` takes names, a mapping, a namespace or a dataclass, in a class, its parents and its children."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import types
import warnings

import attrs
import pytest
import torch

import stratagem as sg
from stratagem.errors import CheckpointError, ConfigError
from stratagem_trainer.hyperparameters import logged_hyperparameters

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}


class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Whole(Model):
    def __init__(self, hparams):
        super().__init__()
        self.save_hyperparameters(hparams)
        self.rate = self.hparams.lr


@dataclasses.dataclass
class Plain:
    lr: float
    width: int = 3


@attrs.define
class Attrs:
    lr: float
    width: int = 3


@pytest.mark.parametrize(
    "given",
    [argparse.Namespace(lr=0.5, width=3), types.SimpleNamespace(lr=0.5, width=3), {"lr": 0.5, "width": 3}, Plain(0.5),
     Attrs(0.5)],
    ids=["Namespace", "SimpleNamespace", "dict", "dataclass", "attrs"],
)  # fmt: skip
def test_one_object_with_everything_is_saved_and_comes_back(tmp_path, given):
    model = Whole(given)
    trainer = sg.Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(model, [torch.ones(2, 1)])
    trainer.save_checkpoint(tmp_path / "x.ckpt")

    assert model.hparams == {"lr": 0.5, "width": 3}
    for again in (
        Whole.load_from_checkpoint(tmp_path / "x.ckpt"),
        Whole.load_from_checkpoint(tmp_path / "x.ckpt", lr=2),
    ):
        assert again.hparams["width"] == 3
    assert again.rate == 2


class Base(Model):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()


class Child(Base):
    def __init__(self, backbone, lr=0.2, depth=1):
        super().__init__(lr)


def test_a_childs_argument_does_not_break_the_parents_call(tmp_path):
    with pytest.warns(
        UserWarning, match=r"Child.save_hyperparameters: backbone=Linear.* left out of checkpoints.*backbone=\.\.\.\)"
    ):
        model = Child(torch.nn.Linear(1, 1))
    trainer = sg.Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(model, [torch.ones(2, 1)])
    trainer.save_checkpoint(tmp_path / "x.ckpt")

    assert {**model.hparams, "backbone": None} == {"backbone": None, "lr": 0.2, "depth": 1}
    with pytest.raises(
        CheckpointError, match=r"Child needs 'backbone', .*pass Child.load_from_checkpoint\(path, backbone"
    ):
        Child.load_from_checkpoint(tmp_path / "x.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Child.load_from_checkpoint(tmp_path / "x.ckpt", backbone=torch.nn.Linear(1, 1)).hparams.depth == 1


def test_loggers_do_not_get_what_they_are_not_to():
    class Quiet(Model):
        def __init__(self, lr, path):
            super().__init__()
            self.save_hyperparameters("lr")
            self.save_hyperparameters("path", logger=False)

    model = Quiet(0.1, "here")

    assert model.hparams == {"lr": 0.1, "path": "here"}
    assert logged_hyperparameters(model) == {"lr": 0.1}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ((3,), {}, "save_hyperparameters was given 3; expected names of arguments, a mapping"),
        (({1: 2},), {}, "a mapping with the key 1; expected names"),
        (({"a": 1}, "b"), {}, "was given 2 values; expected names of arguments, or one object; merge"),
        (({"a": 1},), {"ignore": "b"}, "names 'b'"),
    ],
)
def test_what_cannot_be_saved_is_refused(names, options, message):
    class Odd(Model):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters(*names, **options)

    with pytest.raises(ConfigError, match=message):
        Odd()


def test_nothing_is_ignored():
    class Ignoring(Model):
        def __init__(self, lr=1):
            super().__init__()
            self.save_hyperparameters(ignore=None)

    assert Ignoring().hparams == {"lr": 1}


class Regression(Model):
    def __init__(self, optimizer=torch.optim.Adam, net=None, lr=0.1):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        return self.hparams.optimizer(self.parameters(), lr=self.hparams.lr)


def saved(model, folder):
    trainer = sg.Trainer(**QUIET, default_root_dir=folder)
    trainer.fit(model, [torch.ones(2, 1)])
    trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def test_a_default_that_a_checkpoint_cannot_hold_needs_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = Regression()
    path = saved(model, tmp_path)

    assert model.hparams == {"optimizer": torch.optim.Adam, "net": None, "lr": 0.1}
    assert Regression.load_from_checkpoint(path).hparams.optimizer is torch.optim.Adam


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, functools.partial(torch.optim.SGD, momentum=0.5)], ids=["class", "partial"]
)
def test_what_a_checkpoint_cannot_hold_stays_in_hparams_and_must_be_given_again(tmp_path, optimizer):
    with pytest.warns(UserWarning, match=r"Regression.save_hyperparameters: optimizer=.* is kept in hparams and left"):
        model = Regression(optimizer)
    path = saved(model, tmp_path)

    assert model.hparams.optimizer is optimizer
    with pytest.raises(
        CheckpointError, match=r"needs 'optimizer', which is not .*pass Regression.load_from_checkpoint"
    ):
        Regression.load_from_checkpoint(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Regression.load_from_checkpoint(path, optimizer=optimizer).hparams.optimizer is optimizer


def test_a_module_among_the_arguments_is_not_a_submodule_of_hparams(tmp_path):
    with pytest.warns(UserWarning, match="net=Linear"):
        model = Regression(net=torch.nn.Linear(1, 1))

    assert not [name for name, _ in model.named_modules() if "hparams" in name]
    assert "net" not in torch.load(saved(model, tmp_path))["hyper_parameters"]


def test_an_item_that_a_checkpoint_cannot_hold_is_added_to_the_object(tmp_path):
    with pytest.warns(UserWarning, match="optimizer="):
        model = Whole({"lr": 0.5, "optimizer": torch.optim.SGD})
    path = saved(model, tmp_path)

    with pytest.raises(CheckpointError, match="needs 'optimizer'"):
        Whole.load_from_checkpoint(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = Whole.load_from_checkpoint(path, optimizer=torch.optim.SGD)
    assert again.hparams == {"lr": 0.5, "optimizer": torch.optim.SGD}
    assert Whole.load_from_checkpoint(path, hparams={"lr": 1.0}).rate == 1.0


def test_loggers_get_names_of_what_is_not_a_number_or_text():
    with pytest.warns(UserWarning, match="left out"):
        model = Regression(torch.optim.SGD, torch.nn.Linear(1, 1))

    assert logged_hyperparameters(model) == {
        "optimizer": "torch.optim.sgd.SGD", "net": "torch.nn.modules.linear.Linear", "lr": 0.1
    }  # fmt: skip


def test_a_class_of_any_kind_may_have_hyperparameters():
    class Schedule(sg.HyperparametersMixin):
        def __init__(self, steps, kind="cosine"):
            self.save_hyperparameters()

    schedule = Schedule(3)
    assert schedule.hparams == {"steps": 3, "kind": "cosine"}
    assert schedule.hparams.steps == 3
    with pytest.raises(AttributeError, match="no hyper-parameter is called 'kinds'"):
        print(schedule.hparams.kinds)


def test_a_sequence_of_another_type_is_saved_as_a_list(tmp_path):
    model = Whole({"lr": 0.5, "sizes": collections.UserList([1, 2])})

    assert Whole.load_from_checkpoint(saved(model, tmp_path)).hparams.sizes == [1, 2]


def test_what_a_class_ignores_its_base_does_not_keep():
    class Base(Model):
        def __init__(self, width=3, depth=4):
            super().__init__()
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, width=5, depth=6):
            super().__init__(width, depth)
            self.save_hyperparameters(ignore="width")

    assert Derived().hparams == {"depth": 6}
