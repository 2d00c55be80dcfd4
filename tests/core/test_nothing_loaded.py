"""Weights of which no name fits the model are refused, whoever loads them; the error says how to rename them."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.api.state_fit import check_weights
from stratagem.cli import main
from stratagem.errors import CheckpointError
from stratagem_checkpoint_tools.actions import renamed

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
SAID = r"model state has no tensor of this model: its 4 names all begin with 'model.'; expected names such as 'net\."


class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def training_step(self, batch):
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    validation_step = test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Loose(Model):
    strict_loading = False


def loader():
    return DataLoader(TensorDataset(torch.ones(4, 2)), 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files of weights whose names begin with ``model.``."""
    folder = tmp_path_factory.mktemp("files")
    torch.save({f"model.{name}": value for name, value in Model().state_dict().items()}, folder / "plain.pt")
    assert (
        main(["checkpoint", "convert", str(folder / "plain.pt"), str(folder / "a.safetensors"), "--weights-only"]) == 0
    )
    trainer = sg.Trainer(max_epochs=1, default_root_dir=folder, **QUIET)

    class Other(Model):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Module()
            self.model.net, self.net = self.net, None

        def training_step(self, batch):
            return self.model.net(batch[0]).square().mean()

    trainer.fit(Other(), loader())
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.close()
    return folder


@pytest.mark.parametrize("file", ["plain.pt", "a.safetensors", "whole.ckpt"])
@pytest.mark.parametrize("kind", [Model, Loose])
def test_every_way_to_load_refuses_them(files, file, kind, tmp_path):
    path, model = files / file, kind()
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    with sg.Run(accelerator="cpu", environment="local") as run:
        prepared, _ = run.setup(model, model.configure_optimizers())
        ways = {
            "fit": lambda: trainer.fit(kind(), loader(), ckpt_path=path),
            "test": lambda: trainer.test(kind(), loader(), ckpt_path=path),
            "load_from_checkpoint": lambda: kind.load_from_checkpoint(path, strict=kind is Model),
            "Run.load": lambda: run.load(path, model=prepared, strict=kind is Model),
        }
        for way, load in ways.items():
            with pytest.raises(CheckpointError, match=SAID) as refused:
                load()
            assert "--rename 'model.='" in str(refused.value), way
            assert "strict_loading" not in str(refused.value), way


@pytest.mark.parametrize(
    ("saved", "own", "begin", "rule"),
    [
        (["model.net.0.w", "model.net.0.b"], ["net.0.w", "net.0.b"], "all begin with 'model.'", "model.="),
        (["net.w", "head.w"], ["m.net.w", "m.head.w"], "are such as 'net.w'", "^=m."),
        (["transformer.w"], ["net.w"], "all begin with 'transformer.'", "transformer.=net."),
        (["module.a.w", "module.b.w"], ["net.a.w", "net.b.w"], "all begin with 'module.'", "module.=net."),
        (["w"], ["net.w"], "are such as 'w'", "^=net."),
        (["other.x", "some.y"], ["net.w", "more.w"], "are such as 'other.x'", None),
    ],
)
def test_the_rule_that_is_advised_renames_them(saved, own, begin, rule):
    weights = {name: torch.zeros(1) for name in saved}
    with pytest.raises(CheckpointError) as refused:
        check_weights({name: torch.Size([1]) for name in own}, weights, strict=False)

    told = re.search(r"--rename '(.*)'`", str(refused.value))
    assert begin in str(refused.value)
    assert (told and told[1]) == rule
    if rule is not None:
        assert set(renamed({"state_dict": weights}, [rule])["state_dict"]) == set(own)


def test_what_fits_in_part_is_loaded_where_that_is_asked_for():
    weights = {"net.0.bias": torch.ones(2), "other": torch.ones(1)}
    check_weights({"net.0.bias": torch.Size([2]), "net.1.bias": torch.Size([1])}, weights, strict=False)
    check_weights({}, weights, strict=False)


def test_an_empty_state_is_refused(tmp_path):
    class Empty(Loose):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"].clear()

    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Empty(), loader())
    trainer.save_checkpoint(path := tmp_path / "empty.ckpt")
    for load in (
        lambda: trainer.test(Loose(), loader(), ckpt_path=path),
        lambda: trainer.fit(Loose(), loader(), ckpt_path=path),
        lambda: Loose.load_from_checkpoint(path, strict=False),
        lambda: check_weights({"net.0.bias": torch.Size([2])}, {}, strict=False),
    ):
        with pytest.raises(
            CheckpointError, match="model state has no tensor of this model: it is empty; expected names"
        ):
            load()
