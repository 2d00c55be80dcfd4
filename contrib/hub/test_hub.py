"""Checkpoints and model cards reach a server that speaks the Hub's API, through the real client, and come back."""

import os
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
import yaml
from safetensors.torch import load_file

import stratagem
from stratagem.callbacks import ModelCheckpoint, PushToHub
from stratagem.errors import ConfigError
from stratagem_testing import CallbackConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"enable_progress_bar": False, "logger": False, "accelerator": "cpu", "max_epochs": 2}
REPO = "user/digits"


class TestPushToHub(CallbackConformance):
    """With a Hub of the test's own: `hub` sets it for the processes, too."""

    plugin: ClassVar[Any] = {"name": "push_to_hub", "hub_model_id": REPO, "hub_strategy": "every_save"}
    arguments: ClassVar[Any] = {"enable_checkpointing": True}

    @pytest.fixture(autouse=True)
    def _with_hub(self, hub):
        return hub


class Logs(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]))


def fit(tmp_path, *, module=None, **options):
    callback = PushToHub(hub_model_id=REPO, **options)
    checkpoints = ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_last=True)
    trainer = stratagem.Trainer(callbacks=[checkpoints, callback], default_root_dir=tmp_path / "run", **QUIET)
    batches = joined_batches(3, 8)
    trainer.fit(module or Logs(), batches, batches)
    trainer.close()
    return trainer


def program(*arguments, **variables):
    command = [sys.executable, "-m", "stratagem", "hub", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def card_of(files):
    _, metadata, text = files["README.md"].decode().split("---\n", 2)
    return yaml.safe_load(metadata), text


# --- The callback ------------------------------------------------------------------------------------------------


def test_the_best_checkpoint_and_a_card_are_pushed_when_training_ends(hub, tmp_path):
    trainer = fit(tmp_path, tags=["small"], private=True)

    best = trainer.checkpoint_callback.best_model_path
    name = os.path.basename(best)
    files = hub.repositories[REPO]["main"]
    assert hub.commits == [("main", f"Add {name}", sorted(files))]
    assert set(files) == {name, f"{name}.sum", "README.md"} or set(files) == {name, "README.md"}
    with open(best, "rb") as file:
        assert files[name] == file.read()
    assert hub.private[REPO] is True
    metadata, text = card_of(files)
    assert metadata["library_name"] == "stratagem"
    assert metadata["tags"] == ["stratagem", "small"]
    assert "val_loss" in metadata["metrics"]
    assert f"| val_loss | {float(trainer.callback_metrics['val_loss']):.5g} |" in text


def test_the_code_of_the_card_loads_the_model(hub, tmp_path):
    trainer = fit(tmp_path)
    code = card_of(hub.repositories[REPO]["main"])[1].split("```python\n")[1].split("```")[0]
    names = {"MyModule": Logs}
    exec(code, names)

    best = Logs.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert torch.equal(next(iter(names["module"].parameters())), next(iter(best.parameters())))


def test_every_save_is_pushed(hub, tmp_path):
    fit(tmp_path, hub_strategy="every_save", revision="training")

    commits = [(branch, message) for branch, message, _ in hub.commits]
    saved = ["epoch=0.ckpt", "last.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert commits == [("training", f"Add {name}") for name in saved]
    assert set(hub.repositories[REPO]["training"]) >= {"README.md", "epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"}
    assert hub.repositories[REPO]["main"] == {}


def test_a_card_that_was_written_by_hand_stays(hub, tmp_path):
    hub.repositories[REPO] = {"main": {"README.md": b"mine"}}
    hub.private[REPO] = False
    fit(tmp_path)

    assert hub.repositories[REPO]["main"]["README.md"] == b"mine"


def test_an_upload_that_fails_is_a_warning(hub, tmp_path):
    class Breaks(Logs):
        def on_train_start(self):
            hub.broken = "/preupload/"

    with pytest.warns(UserWarning, match=r"was not pushed .*: run `stratagem hub push .* user/digits`"):
        trainer = fit(tmp_path, module=Breaks())

    assert os.path.exists(trainer.checkpoint_callback.best_model_path)
    assert hub.commits == []


def test_a_wrong_login_is_an_error_before_training(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")

    with pytest.raises(ConfigError, match=r"the Hub refused 'user/digits' .*hf auth login"):
        fit(tmp_path)
    assert list(tmp_path.rglob("*.ckpt")) == []


def test_without_checkpoints_there_is_nothing_to_push(hub, tmp_path):
    callback = PushToHub(hub_model_id=REPO)
    trainer = stratagem.Trainer(callbacks=[callback], enable_checkpointing=False, default_root_dir=tmp_path, **QUIET)

    with pytest.raises(ConfigError, match="no callback saves them"):
        trainer.fit(Net(), joined_batches(2, 8))
    assert hub.repositories == {}


def test_two_ranks_push_once(hub, tmp_path):
    run_in_processes(_fit, 2, tmp_path)

    assert len(hub.commits) == 1


def _fit(rank, size, folder):
    callback = PushToHub(hub_model_id=REPO)
    trainer = stratagem.Trainer(callbacks=[callback], devices=size, default_root_dir=folder / "run", **QUIET)
    trainer.fit(Net(), share(trainer, joined_batches(2, 8)))
    trainer.close()


# --- The command -------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    trainer = stratagem.Trainer(default_root_dir=tmp_path / "run", enable_checkpointing=False, **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer.close()
    return tmp_path / "last.ckpt"


def test_push_and_pull(hub, checkpoint, tmp_path):
    pushed = program("push", checkpoint, REPO, "--private", "--tag", "small")
    pulled = program("pull", REPO, tmp_path / "back")

    assert (pushed.returncode, pulled.returncode) == (0, 0), pushed.stderr + pulled.stderr
    assert pushed.stdout.startswith(f"{hub.url}/{REPO}/commit/")
    assert hub.private[REPO] is True
    assert (tmp_path / "back" / "last.ckpt").read_bytes() == checkpoint.read_bytes()
    assert card_of(hub.repositories[REPO]["main"])[0]["tags"] == ["stratagem", "small"]
    verified = [sys.executable, "-m", "stratagem", "checkpoint", "verify", tmp_path / "back" / "last.ckpt"]
    assert subprocess.run(verified, capture_output=True, check=False).returncode == 0


def test_a_revision(hub, checkpoint, tmp_path):
    program("push", checkpoint, REPO, "--revision", "first")
    pulled = program("pull", REPO, tmp_path / "back", "--revision", "first")

    assert pulled.returncode == 0, pulled.stderr
    assert hub.repositories[REPO]["main"] == {}
    assert (tmp_path / "back" / "last.ckpt").exists()


def test_weights_as_safetensors(hub, checkpoint, tmp_path):
    pushed = program("push", checkpoint, REPO, "--to", "huggingface")
    program("pull", REPO, tmp_path / "back")

    assert pushed.returncode == 0, pushed.stderr
    assert set(hub.repositories[REPO]["main"]) == {"model.safetensors", "README.md"}
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], value) for name, value in weights.items())
    code = card_of(hub.repositories[REPO]["main"])[1].split("```python\n")[1].split("```")[0]
    names = {}
    exec(code, names)
    assert names["weights"].keys() == weights.keys()


def test_a_folder_comes_back_whole(hub, tmp_path):
    trainer = stratagem.Trainer(
        default_root_dir=tmp_path / "run", enable_checkpointing=False, checkpoint="sharded", **QUIET
    )
    trainer.fit(Net(), joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "last.sharded")
    trainer.close()
    program("push", tmp_path / "last.sharded", REPO)
    program("pull", REPO, tmp_path / "back")

    module = Net.load_from_checkpoint(tmp_path / "back" / "last.sharded")
    assert torch.equal(next(iter(module.parameters())), next(iter(trainer.model.parameters())))


def test_what_is_missing_is_one_sentence(hub, tmp_path):
    missing = program("push", tmp_path / "nothing.ckpt", REPO)
    unknown = program("pull", "user/nothing", tmp_path / "back")

    assert (missing.returncode, unknown.returncode) == (1, 1)
    assert missing.stderr.startswith("stratagem: ")
    assert "does not exist" in missing.stderr
    assert unknown.stderr.startswith("stratagem: the Hub refused 'user/nothing'")
