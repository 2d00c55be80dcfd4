"""A stranger's package is installed with pip, found, chosen by name, and trained with on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import stratagem as sg
from stratagem.discovery import registry
from stratagem.errors import PluginError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_plainly

PYPROJECT = """
    [build-system]
    requires = ["flit_core"]
    build-backend = "flit_core.buildapi"

    [project]
    name = "acme-averaging"
    version = "1.2"
    description = "Averages gradients one by one."
    requires-python = ">=3.11"
    dependencies = ["stratagem-core>=0.1"]

    [project.entry-points."stratagem.strategy"]
    averaging = "acme_averaging:Averaging"

    [tool.flit.module]
    name = "acme_averaging"
"""

SOURCE = '''
    """A strategy in twenty lines: average each gradient after backward."""

    from attrs import define
    from stratagem import Capabilities, Strategy, hookimpl


    @define(eq=False, kw_only=True)
    class Averaging(Strategy):
        #: Average only every so many parameters, which is wrong, to show an option.
        every: int = 1
        capabilities = Capabilities(provides={"multi-process", "full-state", "clip-by-norm"})

        @hookimpl
        def wrap_model(self, module, run):
            return module.to(run.device)

        @hookimpl
        def backward(self, loss, module, run):
            loss.backward()
            for number, parameter in enumerate(module.parameters()):
                if number % self.every == 0:
                    parameter.grad = run.collectives.all_reduce(parameter.grad)
            return True
'''

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


@pytest.fixture
def installed(tmp_path):
    """Install it into a folder on the path: other tests run beside this one in the environment."""
    folder, target = tmp_path / "acme", str(tmp_path / "site")
    folder.mkdir()
    (folder / "pyproject.toml").write_text(textwrap.dedent(PYPROJECT))
    (folder / "acme_averaging.py").write_text(textwrap.dedent(SOURCE))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-build-isolation"]
    subprocess.run([*pip, "--no-deps", "--target", target, str(folder)], check=True, capture_output=True, text=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(target)
        patch.setenv("PYTHONPATH", target)
        registry.refresh()
        yield
    sys.modules.pop("acme_averaging", None)
    registry.refresh()


def _train(rank, world_size, batches):
    trainer = sg.Trainer(max_epochs=1, strategy="averaging", devices=world_size, gradient_clip_val=1.0, **QUIET)
    model = Net()
    trainer.fit(model, part(batches, int(os.environ["RANK"]), world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
def test_a_strangers_strategy_is_a_strategy(installed, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "stratagem", "plugins", "list", "--kind", "strategy"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "averaging" in listing
    assert "acme-averaging 1.2" in listing

    batches = joined_batches(10, 16)
    first, second = run_in_processes(_train, 2, batches)
    assert relative_difference(first, train_plainly(batches, max_norm=1.0)[0]) < 1e-6

    with pytest.raises(
        sg.StratagemError, match="accumulate_grad_batches=2 needs 'accumulation', which strategy 'averaging'"
    ):
        sg.Trainer(strategy="averaging", accumulate_grad_batches=2, **QUIET)
    with pytest.raises(sg.StratagemError, match="strategy.averaging.evry is unknown.*did you mean 'every'"):
        sg.Trainer(strategy={"name": "averaging", "evry": 2}, **QUIET)

    # The same strategy from the command line, a file and the environment.
    from_line = sg.Trainer.from_cli(["--strategy", "averaging", "--strategy.every", "2", "--accelerator", "cpu"])
    (tmp_path / "run.yaml").write_text("strategy: {name: averaging, every: 2}\naccelerator: cpu\n")
    from_file = sg.Trainer.from_config(tmp_path / "run.yaml")
    monkeypatch.setenv("STRATAGEM_TRAINER_STRATEGY", "averaging")
    monkeypatch.setenv("STRATAGEM_STRATEGY_EVERY", "2")
    from_environment = sg.Trainer(**QUIET)
    assert [trainer.strategy.every for trainer in (from_line, from_file, from_environment)] == [2, 2, 2]

    from stratagem.strategies import Averaging

    assert Averaging(every=3).every == 3


def test_without_the_package_its_name_is_unknown():
    with pytest.raises(PluginError, match="strategy 'averaging' is unknown"):
        sg.Trainer(strategy="averaging", **QUIET)
