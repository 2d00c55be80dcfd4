"""`Trainer.plan` and `Run.plan`: the plan that the command makes of the same script, and a process that stays as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import stratagem as sg
from programs import scripts
from stratagem.discovery import registry
from stratagem.errors import PluginError

pytestmark = pytest.mark.xdist_group("calls of plan")

SCRIPT = """
import sys, torch, stratagem as sg
from torch import nn
class Words(sg.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.norm = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(16)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.words.weight
    def training_step(self, batch):
        return self.head(self.norm(self.lstm(self.words(batch))[0])).float().square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(64, 16, dtype=torch.long), batch_size=4)
def trainer(strategy):
    precision = "bf16-true" if strategy in ("ddp", "fsdp") else None
    return sg.Trainer(max_steps=9, strategy=strategy, precision=precision, enable_progress_bar=False)
layers = nn.Sequential(nn.Linear(8, 50), nn.Linear(50, 1))
optimizer = torch.optim.Adam(layers.parameters())
def loop(run):
    model, adam = run.setup(layers, optimizer)
    for batch in run.dataloader(torch.utils.data.DataLoader(torch.zeros(64, 8), batch_size=4)):
        run.backward(model(batch).mean())
        run.optimizer_step(adam)
        adam.zero_grad()
if __name__ == "__main__":
    if sys.argv[1] == "Run":
        sg.Run(strategy="fsdp").launch(loop)
    else:
        trainer(sys.argv[1]).fit(Words(), loader)
"""
CALLS = """
import json, os, pathlib, torch, stratagem as sg
from train import Words, layers, loader, loop, optimizer, trainer
torch.ones(900, 900) @ torch.ones(900, 900)  # starts a pool of threads, as most programs have
module = Words()
def state():
    tensors = [*module.state_dict().values(), *layers.state_dict().values(), torch.get_rng_state()]
    return [each.clone() for each in tensors], sorted(os.listdir())
values, files = state()
plans = {name: trainer(name).plan(module, loader, devices=devices)
         for name, devices in (("single_device", 1), ("ddp", 2), ("fsdp", 2))}
plans["Run"] = sg.Run(strategy="fsdp").plan(loop, devices=2)
values_now, files_now = state()
assert all(map(torch.equal, values, values_now)) and files == files_now
assert all(type(each) is torch.nn.Parameter and each.grad is None for each in (*module.parameters(), *layers.parameters()))
assert not torch.distributed.is_initialized() and not optimizer.state and not hasattr(torch, "planned")
def error(*arguments, **options):
    try:
        trainer(arguments[0]).plan(module, loader, **options)
    except sg.errors.ConfigError as error:
        return str(error)
errors = {
    "world": error({"name": "parallel", "shard": 3}, devices=4), "device": error("ddp", device="h100-sxm-80"),
    "devices": error("ddp", devices=0), "assume": error("ddp", assume={"train.py:3": 1}),
}
module.norm(torch.zeros(2, 16, 8)).sum().backward()
errors["backward"] = error("ddp")
pathlib.Path("out.json").write_text(json.dumps([plans, errors]))
"""


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """Return the folder of a program that plans its objects, its plans and its errors; it has an interpreter of its own."""
    folder = tmp_path_factory.mktemp("call")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "calls.py").write_text(CALLS)
    subprocess.run([sys.executable, "-B", "calls.py"], cwd=folder, check=True)
    return folder, *json.loads((folder / "out.json").read_text())


#: The other strategies need a fraction of what fsdp does to a module that was built before.
MORE = pytest.mark.sweep(guard="tests/plan/test_call.py::test_a_call_returns_what_the_command_writes")


@pytest.mark.when_changed("plugins/plan/", cases=("fsdp",))
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fsdp", "Run", pytest.param("single_device", marks=MORE), pytest.param("ddp", marks=MORE)]
)
def test_a_call_returns_what_the_command_writes(called, name):
    folder, plans, _ = called
    path = folder / "plan.json"
    words = ["--devices", "1" if name == "single_device" else "2", "--json", str(path), "train.py", name]
    scripts.run([sys.executable, "-m", "stratagem", "plan", *words], cwd=folder, check=True, capture_output=True)
    written = json.loads(path.read_text())

    assert written.pop("script") == f"train.py {name}"
    assert plans[name].pop("script") == ("the function loop" if name == "Run" else "Words")
    assert plans[name] == written


@pytest.mark.parametrize("name", ["fsdp", "Run"])
def test_whole_parameters_that_were_converted_are_not_kept(called, name):
    """They are sent before the first step; then each rank has its part."""
    _, plans, _ = called

    assert plans[name]["classes"][0]["end"]["messages"] == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("world", ("strategy.parallel has shard 3, and the run has 4 processes", "expected a divisor of 4")),
        ("device", ("device 'h100-sxm-80' is unknown", "did you mean 'h100-sxm-80gb'")),
        ("devices", ("devices is 0; expected at least 1",)),
        ("assume", ("train.py:3 is assumed to be 1, and no step asks",)),
        ("backward", ("this process has computed gradients", "expected a plan before the first backward")),
    ],
)
def test_what_cannot_be_planned_is_an_error(called, name, words):
    _, _, errors = called

    assert all(word in errors[name] for word in words), errors[name]


def test_a_script_that_plans_cannot_be_planned(called):
    """The call would fork a process in which autograd has run."""
    folder, _, _ = called
    (folder / "nested.py").write_text(
        "from train import Words, loader, trainer\ntrainer('ddp').plan(Words(), loader, devices=2)\n"
    )
    words = ["--devices", "2", "nested.py"]
    done = scripts.run(
        [sys.executable, "-m", "stratagem", "plan", *words], cwd=folder, check=False, capture_output=True, text=True
    )

    assert done.returncode == 3
    assert "the script that is planned calls `plan` itself" in done.stderr


def test_without_the_package_the_error_names_it(monkeypatch):
    installed = [each for each in registry.distributions() if each.name != "stratagem-plan"]
    monkeypatch.setattr(registry, "distributions", lambda: installed)
    registry.refresh()
    try:
        for call in (sg.Trainer(max_steps=1).plan, sg.Run().plan):
            with pytest.raises(
                PluginError,
                match="command 'plan' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-plan`",
            ):
                call(None)
    finally:
        monkeypatch.undo()
        registry.refresh()
