"""One file that loads without unpickling, refused with a sentence when it is anything else."""

from __future__ import annotations

import collections
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import stratagem as sg
from stratagem.checkpoint.background_save import SingleProcessRun
from stratagem.checkpoints import FullCheckpoint
from stratagem.errors import CheckpointError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
ALONE = SingleProcessRun()


def save(state, path):
    return FullCheckpoint().save_checkpoint(state, path, ALONE)


def load(path):
    return FullCheckpoint().load_checkpoint(path, ALONE)


def fitted(tmp_path, **arguments):
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, **(QUIET | arguments))
    trainer.fit(Net(), joined_batches(3, 8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return trainer, tmp_path / "a.ckpt"


def test_the_file_is_a_plain_dict_for_torch_load(tmp_path):
    trainer, path = fitted(tmp_path)
    state = torch.load(path, weights_only=True)

    assert set(state) == {
        "state_dict", "optimizers", "lr_schedulers", "loop", "ranks", "callbacks", "plugins", "hyper_parameters", "format",
    }  # fmt: skip
    assert list(state["state_dict"]) == list(Net().state_dict())
    assert state["optimizers"][0]["param_groups"][0]["params"][0] == "net.0.weight"
    assert state["loop"]["global_step"] == 3


def test_a_save_makes_few_calls(tmp_path):
    trainer, path = fitted(tmp_path)
    calls = []

    def count(frame, event, argument):
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("stratagem"):
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(count)
    try:
        trainer.save_checkpoint(path)
    finally:
        sys.setprofile(None)

    assert len(calls) <= 500, collections.Counter(calls).most_common(10)


def test_a_value_among_plain_ones_is_refused_by_its_path(tmp_path):
    with pytest.raises(CheckpointError, match=r"values\.a\[1\]\[2\] is a object; expected tensors, numbers"):
        save({"state_dict": {}, "values": {"a": [1, (2, 3, object())]}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a key of values\.a is a PosixPath"):
        save({"state_dict": {}, "values": {"a": {tmp_path: 1}}}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"values\.when is a datetime64"):
        save({"state_dict": {}, "values": {"when": np.datetime64("2026-01-01")}}, tmp_path / "a.ckpt")


@pytest.mark.slow
def test_a_run_imports_no_format_but_its_own(tmp_path):
    code = (
        "import sys, stratagem as sg, torch\n"
        "with sg.Run(accelerator='cpu') as run:\n"
        "    run.save(sys.argv[1], model=torch.nn.Linear(1, 1))\n"
        "    run.load(sys.argv[1], model=torch.nn.Linear(1, 1))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('stratagem_checkpoints.')))\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "a.ckpt"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    shared = ("cpu_copies", "engine", "mapped_file", "raw_bytes")
    assert said.split() == sorted(f"stratagem_checkpoints.{name}" for name in (*shared, "one_file"))


def test_weights_only_leaves_the_rest_out(tmp_path):
    trainer, path = fitted(tmp_path)
    trainer.save_checkpoint(path, weights_only=True)

    assert set(torch.load(path, weights_only=True)) == {"state_dict", "hyper_parameters", "format"}


def test_a_small_view_does_not_drag_its_storage_along(tmp_path):
    save({"state_dict": {"x": torch.zeros(1_000_000)[:2]}}, tmp_path / "a.ckpt")

    assert (tmp_path / "a.ckpt").stat().st_size < 10_000


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("protocol", ["pickle", "torch"])
def test_a_pickle_bomb_is_refused_and_does_not_go_off(tmp_path, protocol):
    path = tmp_path / "bomb.ckpt"
    if protocol == "pickle":
        path.write_bytes(pickle.dumps({"state_dict": Bomb()}))
    else:
        torch.save({"state_dict": {}, "x": Bomb()}, path)

    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint.*no code of this one was executed"):
        load(path)
    assert not os.path.exists("exploded")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is not what was written: it has"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "its checksum differs"),
        (lambda path: path.unlink(), "does not exist"),
        (lambda path: (path.write_bytes(b"text"), path.with_name("a.ckpt.sum").unlink()), "cannot be read as a checkp"),
        (lambda path: (torch.save([1], path), path.with_name("a.ckpt.sum").unlink()), "holds a list without a model"),
    ],
)
def test_damaged_files_are_refused_with_one_sentence(tmp_path, damage, message):
    _, path = fitted(tmp_path)
    damage(path)

    with pytest.raises(CheckpointError, match=message):
        sg.Trainer(max_epochs=2, **QUIET).fit(Net(), joined_batches(3, 8), ckpt_path=path)


def test_weights_of_another_program_are_accepted(tmp_path):
    torch.save({"state_dict": Net(seed=7).state_dict(), "epoch": 3}, tmp_path / "foreign.ckpt")
    model = Net()

    with pytest.warns(
        UserWarning, match="not written by stratagem: its weights are taken, and training begins at step 0"
    ):
        sg.Trainer(max_epochs=0, **QUIET).fit(model, joined_batches(1, 8), ckpt_path=tmp_path / "foreign.ckpt")

    assert torch.equal(model.net[0].weight, Net(seed=7).net[0].weight)


def test_what_cannot_be_loaded_safely_is_named_when_saving(tmp_path):
    with pytest.raises(CheckpointError, match=r"callbacks.mine\[1\] is a object; expected tensors, numbers"):
        save({"state_dict": {}, "callbacks": {"mine": [1, object()]}}, tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(2, 2)


class Reshaped(Net):
    def __init__(self):
        super().__init__()
        self.net[0] = torch.nn.Linear(16, 32, bias=True)
        self.net[4] = torch.nn.Linear(32, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wider, "model state lacks 'extra.bias', 'extra.weight'; expected the tensors of this model"),
        (Reshaped, r"model state 'net.4.(weight|bias)' has shape \(1(, 32)?,?\); expected \(2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, model, message):
    _, path = fitted(tmp_path)

    with pytest.raises(CheckpointError, match=message):
        sg.Trainer(max_epochs=2, **QUIET).fit(model(), joined_batches(3, 8), ckpt_path=path)


class PartlyTrained(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


def test_optimizer_state_of_other_parameters_is_refused(tmp_path):
    _, path = fitted(tmp_path)

    with pytest.raises(
        CheckpointError, match="optimizer state has 'net.2.bias', .*; expected the parameters of this model"
    ):
        sg.Trainer(max_epochs=2, **QUIET).fit(PartlyTrained(), joined_batches(3, 8), ckpt_path=path)


def test_load_from_checkpoint_builds_and_loads(tmp_path):
    class Sized(Net):
        def __init__(self, seed=0, width=1):
            super().__init__(seed)
            self.save_hyperparameters()

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Sized(seed=3, width=5), joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Sized.load_from_checkpoint(tmp_path / "a.ckpt", width=6)

    assert loaded.hparams == {"seed": 3, "width": 6}
    assert torch.equal(loaded.net[0].weight, trainer.module.net[0].weight)


def _two_ranks(rank, world_size, folder):
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=2, **QUIET)
    trainer.fit(Net(), joined_batches(3, 8))
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    try:
        trainer.save_checkpoint("/proc/nowhere/a.ckpt")
    except sg.StratagemError as error:
        return type(error).__name__, str(error)


def test_a_failing_save_fails_on_all_ranks(tmp_path):
    (first, message), (second, echo) = run_in_processes(_two_ranks, 2, str(tmp_path))

    assert first == "CheckpointError"
    assert "could not be written" in message
    assert second == "StratagemError"
    assert "rank 0 failed with CheckpointError" in echo
    assert sorted(path.name for path in tmp_path.glob("a*")) == ["a.ckpt", "a.ckpt.sum"]
