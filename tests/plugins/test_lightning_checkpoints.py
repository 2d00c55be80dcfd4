"""Continue from checkpoints that Lightning 2.6 wrote, to the weights that Lightning reached without a stop.

`lightning_checkpoints/write.py` wrote them. Each of its runs has 16 optimizer steps and was saved after 8.
"""

from __future__ import annotations

import argparse
import collections
import zipfile
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import EMA, EarlyStopping, ModelCheckpoint, Timer
from stratagem.cli import main
from stratagem.errors import CheckpointError
from stratagem_testing import run_in_processes
from stratagem_testing.training import weights_of
from stratagem_trainer.checkpoint_files import read_any

from .lightning_checkpoints.net import batches, body, validation

WRITTEN = Path(__file__).parent / "lightning_checkpoints"
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
    "use_distributed_sampler": False,
}  # fmt: skip
Body = body(sg.Module)


@pytest.fixture(scope="module")
def reached():
    return torch.load(WRITTEN / "reached.pt", weights_only=True)


def distance(weights, expected):
    assert weights.keys() == expected.keys()
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


def continued(path, count, loaders=(), module=Body, make=torch.utils.data.DataLoader, **options):
    trainer = sg.Trainer(**QUIET | options)
    trainer.fit(module(seed=5), batches(count, make=make), *loaders, ckpt_path=path)
    return trainer


@pytest.mark.parametrize(
    ("name", "count", "options"),
    [
        ("border_epoch", 8, {"max_epochs": 2}),  # saved in on_train_epoch_end
        ("border_validation", 8, {"max_epochs": 2}),  # in on_validation_end
        ("border_after", 8, {"max_epochs": 2}),  # after fit
        ("middle_batch", 16, {"max_epochs": 1}),  # in on_train_batch_end
        ("middle_after", 16, {"max_epochs": 1}),  # after a fit that max_steps ended
        ("accumulated_16", 32, {"max_epochs": 1, "accumulate_grad_batches": 2}),
        ("accumulated_17", 32, {"max_epochs": 1, "accumulate_grad_batches": 2}),  # within a window
    ],
)
def test_a_run_of_lightning_continues_as_if_it_had_not_stopped(name, count, options, reached):
    trainer = continued(WRITTEN / f"{name}.ckpt", count, **options)

    assert trainer.global_step == 16
    assert distance(weights_of(trainer), reached[name.partition("_")[0]]) < 1e-6


def test_a_loader_with_state_goes_on_where_lightning_saved_it(reached):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    read = []

    class Recorded(torch.utils.data.Dataset):
        def __init__(self, data):
            self.data = data

        def __len__(self):
            return len(self.data)

        def __getitem__(self, number):
            read.append(number)
            return self.data[number]

    def loader(data, **options):
        return stateful(Recorded(data), **options)

    trainer = continued(WRITTEN / "middle_stateful.ckpt", 16, make=loader, max_epochs=1)

    assert len(read) == 8 * 4, "the batches before are not read again"
    assert distance(weights_of(trainer), reached["middle_stateful"]) < 1e-6


def test_an_average_of_weights_goes_on(reached):
    trainer = continued(WRITTEN / "average.ckpt", 8, max_epochs=2, callbacks=EMA(decay=0.9))

    assert distance(weights_of(trainer), reached["average"]) < 1e-6


def test_without_the_callback_training_goes_on_with_the_weights_and_not_the_average(capsys):
    state = torch.load(WRITTEN / "average.ckpt", weights_only=True)
    trainer = continued(WRITTEN / "average.ckpt", 8, max_epochs=1)

    assert distance(weights_of(trainer), state["current_model_state"]) == 0
    assert "Not taken: state of EMAWeightAveraging" in capsys.readouterr().out


# --- Several processes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The checkpoints that are folders."""
    target = tmp_path_factory.mktemp("lightning")
    for path in WRITTEN.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(target / path.stem)
    return target


def _continue(rank, world_size, path, strategy):
    middle = "middle" in path.name
    trainer = sg.Trainer(max_epochs=1 if middle else 2, strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(Body(seed=5), batches(16 if middle else 8, rank, world_size), ckpt_path=path)
    return trainer.global_step, weights_of(trainer)


@pytest.mark.every_push("fsdp_sharded_middle-fsdp", "fsdp2_border-ddp_sharded", "ddp_middle-ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp_sharded", "deepspeed_stage_2"])
@pytest.mark.parametrize(
    "name", [f"{kind}_{place}" for kind in ("ddp", "fsdp_sharded", "fsdp2") for place in ("border", "middle")]
)
def test_two_processes_continue_what_two_of_lightning_saved(name, strategy, folders, reached):
    path = folders / f"{name}.ckpt" if (folders / f"{name}.ckpt").exists() else WRITTEN / f"{name}.ckpt"

    for step, weights in run_in_processes(_continue, 2, path, strategy):
        assert step == 16
        assert distance(weights, reached[name]) < 1e-6


def test_a_folder_of_lightning_is_read_as_its_file(folders):
    state = read_any(folders / "fsdp_sharded_border.ckpt")
    alone = torch.load(WRITTEN / "border_after.ckpt", weights_only=True)

    assert state.keys() == alone.keys()
    (optimizer,) = state["optimizer_states"]
    assert [group["params"] for group in optimizer["param_groups"]] == [["net.0.weight", "net.2.weight"], ["net.0.bias", "net.2.bias"]]  # fmt: skip
    assert {name: entry["exp_avg"].shape for name, entry in optimizer["state"].items()} == {
        name: value.shape for name, value in alone["state_dict"].items()
    }


@pytest.mark.slow
def test_of_a_deepspeed_folder_the_weights_are_taken(folders, tmp_path):
    path, whole = folders / "deepspeed.ckpt", tmp_path / "whole.ckpt"
    with pytest.raises(CheckpointError, match="`stratagem checkpoint consolidate --trust"):
        continued(path, 8, max_epochs=1)
    assert main(["checkpoint", "consolidate", "--trust", str(path), str(whole)]) == 0
    saved = torch.load(path / "checkpoint" / "mp_rank_00_model_states.pt", weights_only=False)
    with pytest.warns(UserWarning, match="its weights are taken, and training begins at step 0"):
        trainer = continued(whole, 8, max_epochs=0)

    assert saved["global_step"] == 8
    assert distance(weights_of(trainer), saved["module"]) == 0


# --- What is taken -----------------------------------------------------------------------------------------------


def rewritten(tmp_path, name="border_after", **changes):
    state = torch.load(WRITTEN / f"{name}.ckpt", weights_only=True)
    torch.save(state | changes, tmp_path / "lightning.ckpt")
    return tmp_path / "lightning.ckpt"


def test_one_message_tells_what_is_taken(capsys):
    watchers = [ModelCheckpoint(monitor="val_loss", save_top_k=2), Timer()]
    continued(
        WRITTEN / "border_after.ckpt", 8, [validation()], max_epochs=1, enable_checkpointing=True, callbacks=watchers
    )

    assert (
        "border_after.ckpt was written by Lightning 2.6.6. Taken: weights, optimizer states (1), scheduler states (2), "
        "progress (epoch 0, batch 8, step 8), state of ModelCheckpoint, state of Timer. Not in it: random states. "
        "Not taken: state of EarlyStopping{'monitor': 'val_loss', 'mode': 'min'}\n"
    ) in capsys.readouterr().out


def test_callbacks_go_on_with_their_best_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = torch.load(WRITTEN / "border_after.ckpt", weights_only=True)["callbacks"]
    kept, stopping, timer = (next(v for k, v in saved.items() if k.startswith(n)) for n in ("Model", "Early", "Timer"))
    folder = Path(kept["dirpath"])
    callbacks = [
        ModelCheckpoint(folder, monitor="val_loss", save_top_k=2), EarlyStopping("other", strict=False),
        EarlyStopping("val_loss", patience=7), Timer(),
    ]  # fmt: skip
    trainer = continued(
        WRITTEN / "border_after.ckpt", 8, [validation()], max_epochs=1, callbacks=callbacks, enable_checkpointing=True
    )

    assert set(callbacks) <= set(trainer.callbacks)
    best, other, mine, timer_here = callbacks
    assert best.best_model_score == pytest.approx(float(kept["best_model_score"]))
    assert best.best_model_path == kept["best_model_path"] != ""
    assert mine.best_score == pytest.approx(float(stopping["best_score"]))
    assert (mine.wait_count, mine.patience, other.best_score) == (stopping["wait_count"], 7, None)
    assert timer_here.time_elapsed("train") >= timer["time_elapsed"]["train"] > 0


class Counter(sg.Callback):
    """A callback of the user's, as it was under Lightning."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def test_a_callback_of_ones_own_gets_its_state(tmp_path):
    path = rewritten(tmp_path, callbacks={"Counter": {"batches": 8}})
    counter = Counter()
    continued(path, 8, max_epochs=2, callbacks=counter)

    assert counter.batches == 16


class Numbered(sg.DataModule):
    """A data module of the user's, whose state Lightning saves under the name of its class."""

    seen = 0

    def train_dataloader(self):
        return batches(8)

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_a_data_module_of_ones_own_gets_its_state(tmp_path, capsys):
    datamodule = Numbered()
    path = rewritten(tmp_path, Numbered={"seen": 32}, mine=1)
    sg.Trainer(max_epochs=2, **QUIET).fit(Body(), datamodule=datamodule, ckpt_path=path)

    assert datamodule.seen == 32
    assert capsys.readouterr().out.split("Not taken: ")[1].splitlines()[0].endswith("mine")


def test_the_loss_scale_goes_on(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.zeros(()))
    path = rewritten(tmp_path, MixedPrecision=scaler.state_dict())
    trainer = continued(path, 8, max_epochs=1, precision="16-mixed")

    assert trainer.run.stack.precision.plugin.scaler.get_scale() == 512.0


def test_numbers_of_fsdp_are_those_of_the_models_parameters(tmp_path, reached):
    """Lightning's FSDP renumbers a full optimizer state with torch's `rekey_optim_state_dict`, in the order of the model."""
    (saved,) = torch.load(WRITTEN / "border_after.ckpt", weights_only=True)["optimizer_states"]
    order = [0, 2, 1, 3]  # weights come first in the groups
    groups = [{**group, "params": [order[n] for n in group["params"]]} for group in saved["param_groups"]]
    renumbered = {"state": {order[n]: entry for n, entry in saved["state"].items()}, "param_groups": groups}
    trainer = continued(rewritten(tmp_path, optimizer_states=[renumbered]), 8, max_epochs=2)

    assert distance(weights_of(trainer), reached["border"]) < 1e-6


def test_a_file_with_weights_only_begins_at_step_0():
    with pytest.warns(UserWarning, match="its weights are taken, and training begins at step 0"):
        trainer = continued(WRITTEN / "weights.ckpt", 8, max_epochs=1)

    assert trainer.global_step == 8


def test_another_optimizer_is_one_sentence(tmp_path):
    class Frozen(Body):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.net[0].parameters())

    with pytest.raises(CheckpointError, match=r"optimizer_states\[0\] has 4 parameters; expected 2, as in this run"):
        continued(WRITTEN / "border_after.ckpt", 8, module=Frozen, max_epochs=2)


@pytest.mark.parametrize(
    "damage",
    [
        {"loops": {}}, {"loops": {"fit_loop": {"epoch_progress": 3}}}, {"callbacks": {"Timer": {"a": 1}}},
        {"optimizer_states": [{"state": {}}]}, {"optimizer_states": [{"state": {7: {}}, "param_groups": []}]},
    ],
)  # fmt: skip
def test_a_damaged_one_is_one_sentence(damage, tmp_path):
    with pytest.raises(CheckpointError, match="(loops|callbacks|optimizer_states) cannot be applied"):
        continued(rewritten(tmp_path, **damage), 8, max_epochs=2, callbacks=Timer())


# --- Values that are not data ------------------------------------------------------------------------------------


class Criterion:
    def __init__(self):
        self.weight = 2


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('it was executed')",)


def test_objects_among_the_hyper_parameters_are_left_out(tmp_path, capsys):
    path = rewritten(tmp_path, hyper_parameters={
        "width": 8, "criterion": Criterion(), "path": [Path("/data")], "args": argparse.Namespace(lr=1.0), "bomb": Bomb(),
        "layers": {"sizes": [1, 2], "made_by": [Criterion, 3]}, "names": collections.defaultdict(list, x=[1]),
    })  # fmt: skip

    state = read_any(path)
    kept = {"width": 8, "path": ["/data"], "args": {"lr": 1.0}, "names": {"x": [1]}}
    assert state["hyper_parameters"] == kept
    assert state["hparams_left_out"] == ["criterion", "bomb", "layers"]
    continued(path, 8, max_epochs=1)
    assert (
        "Not taken: hyper_parameters.criterion, hyper_parameters.bomb, hyper_parameters.layers.made_by[0]"
        in capsys.readouterr().out
    )
    with pytest.raises(CheckpointError, match="Asked needs 'criterion', which is not a hyper-parameter"):
        Asked.load_from_checkpoint(path)


class Asked(Body):
    def __init__(self, criterion, width=8, seed=0):
        super().__init__(width, seed)


def test_a_class_elsewhere_is_refused_as_before(tmp_path):
    torch.save({"state_dict": {}, "x": Criterion()}, tmp_path / "other.ckpt")

    with pytest.raises(CheckpointError, match="no code of this one was executed"):
        read_any(tmp_path / "other.ckpt")


def test_load_from_checkpoint_takes_the_hyper_parameters():
    module = Body.load_from_checkpoint(WRITTEN / "border_after.ckpt")

    assert module.hparams == {"width": 8, "seed": 0}
    assert distance(module.state_dict(), torch.load(WRITTEN / "border_after.ckpt")["state_dict"]) == 0
