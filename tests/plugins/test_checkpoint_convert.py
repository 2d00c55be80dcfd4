"""From any format to any other and back, by the command; and to and from what other programs write."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import stratagem as sg
from stratagem.cli import main
from stratagem.errors import CheckpointError, PluginError
from stratagem_testing import run_in_processes
from stratagem_testing.checkpoint import assert_same, example
from stratagem_testing.reference import Scheduled, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of
from stratagem_trainer.checkpoint_files import read_any

pytestmark = pytest.mark.xdist_group("checkpoints to convert")

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = {"full": ".ckpt", "sharded": ".ckpt", "safetensors": ".safetensors", "dcp": ".dcp"}


def test_without_its_library_the_format_cannot_be_chosen_and_others_are_found(tmp_path, monkeypatch):
    sg.Run(accelerator="cpu").save(tmp_path / "a.ckpt", model=torch.nn.Linear(1, 1))
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "stratagem_checkpoints.safetensors", raising=False)

    with pytest.raises(PluginError, match=r'`pip install "stratagem-checkpoints\[safetensors\]"`'):
        sg.Run(accelerator="cpu", checkpoint="safetensors")
    assert read_any(tmp_path / "a.ckpt")["state_dict"].keys() == {"weight", "bias"}
    with pytest.raises(CheckpointError, match="not in an installed checkpoint format"):
        read_any(__file__)


def _save_half(rank, world_size, checkpoint, path, batches):
    trainer = sg.Trainer(max_epochs=1, strategy="fsdp", devices=world_size, checkpoint=checkpoint, **QUIET)
    trainer.fit(Scheduled(), share(trainer, batches[:4]))
    trainer.save_checkpoint(path)


def _continue(rank, world_size, path, batches):
    trainer = sg.Trainer(max_epochs=2, strategy="fsdp", devices=world_size, **QUIET)
    trainer.fit(Scheduled(seed=3), share(trainer, batches[4:]), ckpt_path=path)
    return weights_of(trainer)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint in each format, of the same moment of the same training."""
    folder, batches = tmp_path_factory.mktemp("written"), joined_batches(8, 24)
    for name, suffix in FORMATS.items():
        run_in_processes(_save_half, 2, name, folder / f"{name}{suffix}", batches)
    return folder


@pytest.mark.every_push("safetensors-sharded", "sharded-safetensors")
@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), list(itertools.product(FORMATS, FORMATS)))
def test_any_format_becomes_any_other_and_trains_on(source, target, written, tmp_path, capsys):
    path, batches = tmp_path / f"x{FORMATS[target]}", joined_batches(8, 24)
    original = read_any(written / f"{source}{FORMATS[source]}")
    assert main(["checkpoint", "convert", str(written / f"{source}{FORMATS[source]}"), str(path), "--to", target]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: ")
    assert_same(read_any(path), original)
    assert main(["checkpoint", "diff", str(path), str(written / f"{source}{FORMATS[source]}")]) == 0
    assert main(["checkpoint", "verify", str(path)]) == 0
    whole, _ = train_module_plainly(Scheduled(), batches)
    for weights in run_in_processes(_continue, 2, path, batches):
        assert relative_difference(weights, whole) < 1e-6


def test_everything_that_a_state_may_hold_survives_the_round(tmp_path):
    with sg.Run(accelerator="cpu") as run:
        run.ask("save_checkpoint", state=example(), path=tmp_path / "0.ckpt")
    steps = ["0.ckpt", "1.safetensors", "2.dcp", "3.ckpt", "4.safetensors", "5.ckpt"]
    for (before, after), name in zip(
        itertools.pairwise(steps), ["safetensors", "dcp", "sharded", "safetensors", "full"], strict=True
    ):
        assert main(["checkpoint", "convert", str(tmp_path / before), str(tmp_path / after), "--to", name]) == 0
    assert_same(torch.load(tmp_path / "5.ckpt", weights_only=True), example())


@pytest.mark.slow
def test_consolidate_makes_one_file_for_torch_load(written, tmp_path):
    path = tmp_path / "one.ckpt"
    assert main(["checkpoint", "consolidate", str(written / "sharded.ckpt"), str(path)]) == 0
    state = torch.load(path, weights_only=True)
    assert_same(state, read_any(written / "sharded.ckpt"))
    Scheduled().load_state_dict(state["state_dict"])


# --- Other programs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_alone_are_what_other_libraries_expect(written, tmp_path):
    path = tmp_path / "model.safetensors"
    assert main(["checkpoint", "convert", str(written / "sharded.ckpt"), str(path), "--weights-only"]) == 0
    model = Scheduled()
    model.load_state_dict(load_file(path))
    assert set(load_file(path)) == set(model.state_dict())


def test_weights_from_elsewhere_start_a_run(tmp_path):
    torch.manual_seed(5)
    other = Scheduled(seed=9)
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Scheduled(), joined_batches(4, 24), ckpt_path=tmp_path / "model.safetensors")
    expected, _ = train_module_plainly(Scheduled(seed=9), joined_batches(4, 24))
    assert relative_difference(weights_of(trainer), expected) < 1e-6


@pytest.mark.slow
def test_plain_pytorch_reads_our_dcp_folder(written):
    model = Scheduled(seed=9)
    state = {"state_dict": model.state_dict()}
    dcp.load(state, checkpoint_id=written / "dcp.dcp", no_dist=True)
    assert_same(state["state_dict"], read_any(written / "dcp.dcp")["state_dict"])


@pytest.mark.parametrize("key", ["model", "state_dict", ""])
def test_we_read_a_dcp_folder_of_plain_pytorch(key, tmp_path):
    model = Scheduled(seed=9)
    state = {key: model.state_dict(), "step": 7} if key else model.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    if key:
        with pytest.warns(UserWarning, match="was written by another program: only its model is read, not step"):
            read = read_any(tmp_path / "x")
    else:
        read = read_any(tmp_path / "x")
    assert_same(read, {"state_dict": dict(model.state_dict())})
    assert main(["checkpoint", "verify", str(tmp_path / "x")]) == 0


def test_a_dcp_folder_without_metadata_of_its_storage_is_read(tmp_path):
    model = Scheduled(seed=9)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "x", no_dist=True)
    index = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    index.storage_meta = None
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(index))
    assert_same(read_any(tmp_path / "x"), {"state_dict": dict(model.state_dict())})


@pytest.mark.slow
def test_an_index_that_python_3_13_wrote_is_read(written, tmp_path):
    """It names the classes of pathlib by the module in which that version has them."""
    shutil.copytree(written / "dcp.dcp", tmp_path / "x")
    (tmp_path / "x" / "stratagem.json").unlink()
    index = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    ours = pickle.dumps(index, protocol=3).replace(b"cpathlib._local\n", b"cpathlib\n")  # without lengths of frames
    theirs = ours.replace(b"cpathlib\n", b"cpathlib._local\n")
    (tmp_path / "x" / ".metadata").write_bytes(theirs)

    assert theirs != ours
    whole = read_any(written / "dcp.dcp")
    assert_same(read_any(tmp_path / "x"), {"state_dict": whole["state_dict"]})


# --- Bad input ---------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return (open, (str(self.proof), "w"))


def test_an_index_with_a_bomb_does_not_go_off(written, tmp_path):
    """Also where our own file, which would notice, is missing."""
    shutil.copytree(written / "dcp.dcp", tmp_path / "x")
    (tmp_path / "x" / "stratagem.json").unlink()
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "proof")))
    with pytest.raises(CheckpointError, match="it uses (io|_io).open, which no index needs"):
        read_any(tmp_path / "x")
    assert not (tmp_path / "proof").exists()


class ByName:
    """Asks for an attribute, as enumerations do under later Pythons, but of a module."""

    def __reduce__(self):
        return (getattr, (torch.distributed.checkpoint.metadata.MetadataIndex, "__init__"))


def test_an_index_may_ask_for_members_of_enumerations_alone(written, tmp_path):
    shutil.copytree(written / "dcp.dcp", tmp_path / "x")
    (tmp_path / "x" / "stratagem.json").unlink()
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(ByName()))
    with pytest.raises(CheckpointError, match="it uses '__init__' of .*, which no index needs"):
        read_any(tmp_path / "x")


def test_an_index_that_leaves_the_folder_is_refused(written, tmp_path):
    shutil.copytree(written / "dcp.dcp", tmp_path / "x")
    (tmp_path / "x" / "stratagem.json").unlink()
    index = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../outside.distcp"
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"it names '\.\./outside\.distcp', which is not a file in this folder"):
        read_any(tmp_path / "x")


def test_what_is_there_is_not_overwritten(written, tmp_path, capsys):
    (tmp_path / "x.safetensors").write_text("mine")
    assert main(["checkpoint", "convert", str(written / "full.ckpt"), str(tmp_path / "x.safetensors")]) == 1
    assert "exists; expected a new path; choose another path; nothing was changed" in capsys.readouterr().err
    assert (tmp_path / "x.safetensors").read_text() == "mine"


def test_a_name_that_does_not_tell_the_format_is_asked_about(written, tmp_path, capsys):
    assert main(["checkpoint", "convert", str(written / "dcp.dcp"), str(tmp_path / "x.ckpt")]) == 1
    said = capsys.readouterr().err
    assert "x.ckpt could be full or sharded; expected a format; add --to with one of dcp, full, safetensors" in said


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 8 + b"{", b'\x10\0\0\0\0\0\0\0{"a": [broken]}'])
def test_a_broken_safetensors_file_is_one_sentence(content, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"x\.safetensors (cannot be read|is not in an installed checkpoint format)"
    ):
        read_any(tmp_path / "x.safetensors")


# --- Hugging Face's folders, plain files, names ------------------------------------------------------------------


def convert(*arguments):
    return main(["checkpoint", "convert", *map(str, arguments)])


@pytest.fixture
def fitted(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Scheduled(), joined_batches(4, 24))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    return tmp_path / "one.ckpt"


@pytest.mark.parametrize(("size", "files"), [((), 1), (("--max-shard-size", "4KB"), 3)])
def test_a_folder_of_hugging_face_is_written_and_read(size, files, fitted, tmp_path):
    target, weights = tmp_path / "hf", torch.load(fitted, weights_only=True)["state_dict"]
    assert convert(fitted, target, "--to", "huggingface", *size) == 0

    written = sorted(path.name for path in target.glob("*.safetensors"))
    together = {name: value for path in written for name, value in load_file(target / path).items()}
    assert_same(together, {name: weights[name] for name in together})
    assert together.keys() == weights.keys()
    if files == 1:
        assert written == ["model.safetensors"]
    else:
        assert written == [f"model-{number:05}-of-{files:05}.safetensors" for number in range(1, files + 1)]
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in weights.values())
        assert all(name in load_file(target / file) for name, file in index["weight_map"].items())
        assert all(sum(v.numel() * 4 for v in load_file(target / path).values()) <= 4096 for path in written)
    read = read_any(target)["state_dict"]
    assert read.keys() == weights.keys()
    assert_same(read, weights)
    assert main(["checkpoint", "verify", str(target)]) == 0
    assert main(["checkpoint", "diff", str(target), str(fitted)]) == 1  # the rest of the state


@pytest.mark.when_changed(
    "plugins/tools/",
    "plugins/checkpoints/",
    guard="tests/plugins/test_checkpoint_convert.py::test_any_format_becomes_any_other_and_trains_on",
)
@pytest.mark.slow
def test_transformers_reads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    torch.save({f"net.{name}": value for name, value in model.state_dict().items()}, tmp_path / "mine.pt")  # tied ones
    target = tmp_path / "hf"
    assert (
        convert(tmp_path / "mine.pt", target, "--to", "huggingface", "--max-shard-size", "2KB", "--rename", "net.=")
        == 0
    )

    config.save_pretrained(target)
    read = transformers.GPT2LMHeadModel.from_pretrained(target)
    assert_same(dict(read.state_dict()), dict(model.state_dict()))
    read.save_pretrained(tmp_path / "theirs", max_shard_size="2KB")
    theirs = read_any(tmp_path / "theirs")["state_dict"]
    assert_same(theirs, {name: model.state_dict()[name] for name in theirs})


def test_weights_of_hugging_face_start_a_run(fitted, tmp_path):
    assert convert(fitted, tmp_path / "hf", "--to", "huggingface", "--max-shard-size", "4KB") == 0
    model = Scheduled(seed=9)
    with pytest.warns(UserWarning, match="its weights are taken, and training begins at step 0"):
        sg.Trainer(max_epochs=0, **QUIET).fit(model, joined_batches(4, 24), ckpt_path=tmp_path / "hf")

    assert_same(dict(model.state_dict()), torch.load(fitted, weights_only=True)["state_dict"])


def test_an_exported_folder_is_not_taken_for_the_newest_checkpoint(fitted, tmp_path):
    assert convert(fitted, tmp_path / "hf", "--to", "huggingface") == 0
    trainer = sg.Trainer(max_epochs=1, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Scheduled(), joined_batches(4, 24), ckpt_path="last")

    assert_same(weights_of(trainer), torch.load(fitted, weights_only=True)["state_dict"])  # nothing was left to train


@pytest.mark.parametrize(("damage", "message"), [
    (lambda folder: next(folder.glob("*-00002-*")).unlink(), "No such file"),
    (lambda folder: next(folder.glob("*-00002-*")).write_bytes(b"x"), "SafetensorError"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "names '../x'"),
    (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "TypeError"),
])  # fmt: skip
def test_a_damaged_folder_is_one_sentence(damage, message, fitted, tmp_path):
    assert convert(fitted, tmp_path / "hf", "--to", "huggingface", "--max-shard-size", "4KB") == 0
    damage(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=f"cannot be read as a folder of safetensors files .*{message}"):
        read_any(tmp_path / "hf")
    assert main(["checkpoint", "verify", str(tmp_path / "hf")]) == 1


def test_a_plain_file_is_the_state_dict_alone(fitted, tmp_path):
    assert convert(fitted, tmp_path / "model.pt", "--to", "state_dict") == 0
    written = torch.load(tmp_path / "model.pt", weights_only=True)

    Scheduled().load_state_dict(written)
    assert_same(read_any(tmp_path / "model.pt"), {"state_dict": written})


def test_names_change_in_weights_and_optimizers(fitted, tmp_path):
    rules = ("--rename", "net.=body.layers.", "--rename", r"layers\.(\d+)=\1")
    assert convert(fitted, tmp_path / "new.ckpt", "--to", "full", *rules) == 0
    before, after = torch.load(fitted, weights_only=True), torch.load(tmp_path / "new.ckpt", weights_only=True)

    assert list(after["state_dict"]) == [name.replace("net.", "body.") for name in before["state_dict"]]
    (old,), (new,) = before["optimizers"], after["optimizers"]
    assert list(new["state"]) == [name.replace("net.", "body.") for name in old["state"]]
    assert new["param_groups"][0]["params"] == [
        name.replace("net.", "body.") for name in old["param_groups"][0]["params"]
    ]
    assert_same(after["loop"], before["loop"])


@pytest.mark.parametrize(("arguments", "message"), [
    (("--to", "full", "--rename", "net."), "--rename net.; expected OLD=NEW"),
    (("--to", "full", "--rename", "net.(=x"), r"--rename net.(=x: missing ), unterminated subpattern"),
    (("--to", "full", "--rename", r".*=x"), "gives two parameters one name"),
    (("--to", "full", "--max-shard-size", "1GB"), "--max-shard-size is set with --to full; expected --to huggingface"),
    (("--to", "state_dict", "--max-shard-size", "1GB"), "--max-shard-size is set with --to state_dict"),
    (("--to", "huggingface", "--max-shard-size", "0GB"), "--max-shard-size is '0GB'; expected a size such as \"5GB\""),
    (("--to", "huggingface", "--max-shard-size", "big"), "--max-shard-size is 'big'"),
])  # fmt: skip
def test_a_wrong_option_is_one_sentence(arguments, message, fitted, tmp_path, capsys):
    assert convert(fitted, tmp_path / "x", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_of_torchtitans_folder_the_model_is_read(tmp_path):
    """Its model's tensors are not within a mapping; those of its optimizer are."""
    model = Scheduled(seed=9)
    optimizer = {"state.net.0.weight.exp_avg": torch.ones(32, 16), "param_groups.net.0.weight.lr": 0.1}
    others = {"optimizer": optimizer, "lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    dcp.save(dict(model.state_dict()) | others, checkpoint_id=tmp_path / "flat", no_dist=True)
    dcp.save({"model": dict(model.state_dict())} | others, checkpoint_id=tmp_path / "nested", no_dist=True)
    for name in ("flat", "nested"):
        with pytest.warns(
            UserWarning, match="written by another program: only its model is read, not lr_scheduler.last_ep"
        ):
            read = read_any(tmp_path / name)["state_dict"]
        assert read.keys() == model.state_dict().keys()
        assert_same(read, dict(model.state_dict()))


def test_a_checkpoint_of_lightning_is_converted(tmp_path, capsys):
    source = Path(__file__).parent / "lightning_checkpoints" / "border_after.ckpt"
    weights = torch.load(source, weights_only=True)["state_dict"]
    for form in ("huggingface", "state_dict", "safetensors", "sharded", "dcp"):
        assert convert(source, tmp_path / form, "--to", form) == 0
        assert_same(read_any(tmp_path / form)["state_dict"], weights)
    assert_same(read_any(tmp_path / "sharded"), torch.load(source, weights_only=True))
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(source)]) == 0
    assert "optimizers: with the state of 4 parameters\nloop: epoch 1, global_step 8\n" in capsys.readouterr().out
