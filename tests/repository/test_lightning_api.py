"""docs/lightning-api.md has every public name of Lightning's, and says of each what is true."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import attrs
import pytest

import stratagem as sg
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem.loggers import CSVLogger, TensorBoardLogger
from stratagem.stack.plugins import hook_specifications
from stratagem_migrate.names import NAMES
from stratagem_trainer.moved_methods import moved_methods

PAGE = Path(__file__).parents[2] / "docs/lightning-api.md"
VERSION = "2.6.6"
PACKAGES = (f"lightning=={VERSION}", "lightning-utilities==0.15.*")

#: Prints the names by section of the page.
LISTS = """
import inspect, json, sys
sys.path.append(sys.argv[1])
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader

def names(cls, base=object):
    return sorted(name for name in set(dir(cls)) - set(dir(base)) if not name.startswith("_"))

def arguments(*functions):
    found = {name for function in functions for name in inspect.signature(function).parameters}
    return sorted(found - {"self", "cls", "kwargs"})

methods = (pl.Trainer.fit, pl.Trainer.validate, pl.Trainer.test, pl.Trainer.predict, pl.Trainer.save_checkpoint,
           pl.LightningModule.log, pl.LightningModule.load_from_checkpoint)
print(json.dumps({
    "Arguments of the Trainer": arguments(pl.Trainer.__init__),
    "Trainer": names(pl.Trainer),
    "Arguments of its methods, of `log` and of `load_from_checkpoint`": arguments(*methods),
    "CombinedLoader": arguments(CombinedLoader.__init__),
    "LightningModule": names(pl.LightningModule, torch.nn.Module),
    "LightningDataModule": names(pl.LightningDataModule),
    "Callback": names(pl.Callback),
    "Options of ModelCheckpoint": arguments(ModelCheckpoint.__init__),
    "ModelCheckpoint": names(ModelCheckpoint, pl.Callback),
    "Options of EarlyStopping": arguments(EarlyStopping.__init__),
    "Logger": names(Logger),
    "CSVLogger": names(CSVLogger, Logger),
    "TensorBoardLogger": names(TensorBoardLogger, Logger),
}))
"""


def sections():
    """Return for each section of the page its names: what is the same, and what the table says of the others."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        text, _, table = body.partition("|")
        same = re.findall(r"`([^`]+)`", text)
        rows = re.findall(r"^\|? ?`([^`]+)` \| (\w+) \| (.+) \|$", table, re.MULTILINE)
        found[title] = same, {name: (status, reason) for name, status, reason in rows}
    return found


def ours():
    """Return what there is here, by section."""
    trainer = sg.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    methods = (sg.Trainer.fit, sg.Trainer.validate, sg.Trainer.test, sg.Trainer.predict, sg.Trainer.save_checkpoint,
               sg.Module.log, sg.Module.load_from_checkpoint)  # fmt: skip
    return {
        "Arguments of the Trainer": set(inspect.signature(sg.Trainer).parameters),
        "Trainer": {*dir(trainer)},
        "Arguments of its methods, of `log` and of `load_from_checkpoint`": {
            name for method in methods for name in inspect.signature(method).parameters
        },
        "CombinedLoader": set(inspect.signature(sg.CombinedLoader).parameters),
        "LightningModule": {*dir(sg.Module)} - refusing(sg.Module(), "to_onnx", "to_tensorrt", "to_torchscript"),
        "LightningDataModule": {*dir(sg.DataModule)},
        "Callback": {*dir(sg.Callback)},
        "Options of ModelCheckpoint": set(inspect.signature(ModelCheckpoint).parameters),
        "ModelCheckpoint": {*dir(ModelCheckpoint)},
        "Options of EarlyStopping": set(inspect.signature(EarlyStopping).parameters),
        "Logger": {*dir(sg.Logger)},
        "CSVLogger": {*dir(CSVLogger)},
        "TensorBoardLogger": {*dir(TensorBoardLogger)},
    }


def refusing(module, *methods):
    """Return those of `methods` that are refused with what to use instead."""
    found = set()
    for name in methods:
        with pytest.raises(ConfigError, match=r"export\(module|compile\(module"):
            getattr(module, name)("file", method="trace")
        found.add(name)
    return found


def test_what_the_page_calls_the_same_exists_and_what_it_calls_refused_does_not():
    page, here = sections(), ours()

    assert {*page} == {*here}
    for title, (same, differs) in page.items():
        assert set(same) <= here[title], title
        assert {status for status, _ in differs.values()} <= {"changed", "refused"}, title
        refused = {name for name, (status, _) in differs.items() if status == "refused"}
        assert not refused & here[title], title
        assert not set(same) & set(differs), title
    assert sum(len(same) + len(differs) for same, differs in page.values()) > 300


#: Lightning's defaults of the Trainer's arguments that are not None.
DEFAULTS = {
    "accelerator": "auto", "accumulate_grad_batches": 1, "barebones": False, "check_val_every_n_epoch": 1,
    "detect_anomaly": False, "devices": "auto", "fast_dev_run": False, "inference_mode": True, "max_steps": -1,
    "num_nodes": 1, "overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0, "strategy": "auto",
    "sync_batchnorm": False, "use_distributed_sampler": True, "enable_autolog_hparams": True,
}  # fmt: skip


def test_each_default_of_lightnings_trainer_means_the_same_when_it_is_passed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    same, differs = sections()["Arguments of the Trainer"]
    defaults = {name: DEFAULTS.get(name) for name in [*same, *differs] if name != "enable_autolog_hparams"}
    assert DEFAULTS.keys() <= {*same, *differs}
    plain = sg.Trainer()
    fields = [each.name for each in attrs.fields(type(plain.settings)) if each.name not in ("origins", "options")]

    for given in (*({name: value} for name, value in defaults.items()), defaults):
        trainer = sg.Trainer(**given)
        for name in fields:
            assert getattr(trainer.settings, name) == getattr(plain.settings, name) or name == "callbacks", (
                given,
                name,
            )
        assert [type(each) for each in trainer.callbacks] == [type(each) for each in plain.callbacks]
        assert [type(each) for each in trainer.loggers] == [type(each) for each in plain.loggers]
    with pytest.raises(ConfigError, match="leave it out: save_hyperparameters"):
        sg.Trainer(enable_autolog_hparams=True)


def test_none_for_an_argument_that_is_never_none_keeps_what_a_file_sets(tmp_path):
    (file := tmp_path / "run.toml").write_text("log_every_n_steps = 3\nchecks = 'spike_detection'\n")
    trainer = sg.Trainer.from_config(file, log_every_n_steps=None, checks=None, num_sanity_val_steps=None)
    assert (trainer.settings.log_every_n_steps, trainer.settings.checks) == (3, None)
    assert trainer.settings.num_sanity_val_steps == 2
    with pytest.raises(ConfigError, match="has no argument 'max_epoch'"):
        sg.Trainer(max_epoch=None)


@pytest.mark.when_changed(
    "docs/lightning-api.md", "tests/repository/test_lightning_api.py",
    guard="tests/repository/test_lightning_api.py::test_what_the_page_calls_the_same_exists_and_what_it_calls_refused_does_not",
)  # fmt: skip
@pytest.mark.slow
def test_the_page_has_every_name_of_the_installed_lightning(tmp_path):
    folder = environment(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stratagem")
    own = next(path for path in sys.path if path.endswith("site-packages"))
    result = subprocess.run([folder / "bin/python", "-c", LISTS, own], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]

    expected = json.loads(result.stdout)
    found = {title: sorted([*same, *differs]) for title, (same, differs) in sections().items()}
    assert found == expected


#: Prints the methods and properties of Lightning's plugins by class.
PLUGINS = """
import inspect, json, sys
sys.path.append(sys.argv[1])
from lightning.pytorch import accelerators, callbacks, loggers, profilers, strategies
from lightning.pytorch.callbacks import progress
from lightning.pytorch.plugins import environments, io, precision

found = {}
for module in (callbacks, progress, loggers, strategies, accelerators, profilers, environments, io, precision):
    for name, cls in vars(module).items():
        if inspect.isclass(cls):
            static = {each: inspect.getattr_static(cls, each) for each in dir(cls) if not each.startswith("_")}
            kinds = (property, staticmethod, classmethod)
            found[name] = [each for each, value in static.items() if callable(value) or isinstance(value, kinds)]
print(json.dumps(found))
"""

#: What Lightning and its users read and nobody needs to override, and kinds whose own hooks a plugin must implement.
READ = {"trainer", "name", "version", "save_dir", "root_dir", "log_dir", "model", "optimizers", "num_nodes"}
OWN_HOOKS = {"Strategy", "ParallelStrategy", "ClusterEnvironment", "Accelerator"}


@pytest.mark.when_changed(
    "plugins/migrate/stratagem_migrate/moved.toml", "plugins/migrate/stratagem_migrate/names.py",
    guard="tests/core/test_overridden_methods.py::test_names_that_mean_nothing_to_the_class_are_free",
)  # fmt: skip
@pytest.mark.slow
def test_every_method_of_an_installed_counterpart_is_there_or_refused():
    folder = environment(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stratagem")
    own = next(path for path in sys.path if path.endswith("site-packages"))
    result = subprocess.run([folder / "bin/python", "-c", PLUGINS, own], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]

    compared = 0
    for name, methods in json.loads(result.stdout).items():
        place = NAMES[name].imported_from if name in NAMES else None
        if place is None or name in OWN_HOOKS:
            continue
        cls = getattr(importlib.import_module(place[0]), place[1])
        if isinstance(cls, type):
            known = {*dir(cls), *hook_specifications(), *moved_methods(type("Derived", (cls,), {})), *READ}
            assert not set(methods) - known, name
            compared += 1
    assert compared > 35


def environment(cache):
    """Return an environment with Lightning, made once; torch is this one's."""
    folder = cache / f"lightning-{VERSION}"
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES]
        subprocess.run(pip, check=True, capture_output=True)
        (folder / "made").touch()
    return folder
