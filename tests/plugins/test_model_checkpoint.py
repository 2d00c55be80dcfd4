"""model_checkpoint keeps what it should, under the names it should, and decides once for all ranks."""

from __future__ import annotations

import fcntl
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.api.paths import claim
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem_callbacks import occupied
from stratagem_callbacks.kept_files import free_version
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, Scheduled, data, joined_batches

QUIET = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}


class Scored(Net):
    """Logs a given score each epoch."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def validation_step(self, batch, batch_idx):
        self.log("score", self.scores[self.current_epoch])


def fit(tmp_path, scores, model=None, **options):
    callback = ModelCheckpoint(**options)
    trainer = sg.Trainer(max_epochs=len(scores), callbacks=callback, default_root_dir=tmp_path, **QUIET)
    batches = joined_batches(2, 8)
    trainer.fit(model or Scored(scores), batches, batches)
    files = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt"))
    return callback, files


def test_without_a_monitor_the_newest_is_kept(tmp_path):
    callback, files = fit(tmp_path, [1.0, 2.0, 3.0])

    assert files == ["epoch=2-step=6.ckpt"]
    assert Path(callback.best_model_path).name == files[0]


@pytest.mark.parametrize(("mode", "best", "score"), [("min", 1, 1.0), ("max", 2, 5.0)])
def test_the_best_is_kept(tmp_path, mode, best, score):
    callback, files = fit(tmp_path, [3.0, 1.0, 5.0, 2.0], monitor="score", mode=mode)

    assert files == [f"epoch={best}-step={2 * best + 2}.ckpt"]
    assert callback.best_model_score == score


def test_the_k_best_are_kept_and_nan_is_worst(tmp_path):
    _, files = fit(tmp_path, [float("nan"), 3.0, 1.0, 2.0], monitor="score", save_top_k=2)

    assert files == ["epoch=2-step=6.ckpt", "epoch=3-step=8.ckpt"]


def test_all_or_none(tmp_path):
    assert len(fit(tmp_path / "all", [1.0, 2.0, 3.0], save_top_k=-1)[1]) == 3
    assert fit(tmp_path / "none", [1.0], save_top_k=0)[1] == []


def test_names_are_filled_in(tmp_path):
    _, files = fit(tmp_path, [0.125], monitor="score", filename="model-{epoch:02d}-{score:.2f}")
    assert files == ["model-epoch=00-score=0.12.ckpt"]

    _, files = fit(tmp_path / "plain", [0.125], monitor="score", filename="{epoch:02d}-{score:.2f}",
                   auto_insert_metric_name=False)  # fmt: skip
    assert files == ["00-0.12.ckpt"]


def test_a_taken_name_gets_a_version(tmp_path):
    fit(tmp_path, [1.0])
    _, files = fit(tmp_path, [1.0])

    assert files == ["epoch=0-step=2-v1.ckpt", "epoch=0-step=2.ckpt"]


def test_a_name_that_many_files_have_is_not_looked_up_for_each_of_them(tmp_path, monkeypatch):
    folder, looked_up, exists = tmp_path / "checkpoints", [], Path.exists
    folder.mkdir()
    for version in range(200):
        (folder / f"epoch=0-step=2{f'-v{version}' if version else ''}.ckpt").write_text("")
    monkeypatch.setattr(Path, "exists", lambda path: bool(looked_up.append(path)) or exists(path))
    fit(tmp_path, [1.0], save_last=True)

    assert (folder / "epoch=0-step=2-v200.ckpt").stat().st_size
    assert len(looked_up) < 50


@pytest.mark.parametrize("suffix", [".ckpt", ".of.two", ""])
@pytest.mark.parametrize("gap", [None, 0, 1, 15, 16, 17, 29])
def test_the_first_free_version_is_used(gap, suffix, tmp_path):
    """A link to nothing is free, and so is a name that may be overwritten."""
    names = [f"v1.5{f'-v{version}' if version else ''}{suffix}" for version in range(40)]
    for name in names:
        (tmp_path / name).symlink_to("nothing") if name == names[30] else (tmp_path / name).write_text("")
    usable = [] if gap is None else [str(tmp_path / names[gap]), "elsewhere/" + names[3]]
    wanted = tmp_path / names[30 if gap is None else gap]
    assert free_version(tmp_path / names[0], suffix, usable) == wanted

    if gap is not None:
        (tmp_path / names[gap]).unlink()
        assert free_version(tmp_path / names[0], suffix) == wanted
    (tmp_path / names[30]).unlink()
    (tmp_path / names[30]).symlink_to(names[0])
    if gap is None:
        assert free_version(tmp_path / names[0], suffix).name == f"v1.5-v40{suffix}"


def test_save_last_keeps_a_copy(tmp_path):
    callback, files = fit(tmp_path, [1.0, 2.0], monitor="score", save_last=True)

    assert files == ["epoch=0-step=2.ckpt", "last.ckpt"]
    assert torch.load(callback.last_model_path, weights_only=True)["loop"]["epoch"] == 1


@pytest.mark.parametrize(("options", "steps"), [({"every_n_epochs": 2}, [4, 8]), ({"every_n_train_steps": 3}, [3, 6])])
def test_how_often(tmp_path, options, steps):
    _, files = fit(tmp_path, [1.0] * 4, save_top_k=-1, **options)

    assert [int(name.split("step=")[1].removesuffix(".ckpt")) for name in files] == steps


def test_weights_only(tmp_path):
    callback, _ = fit(tmp_path, [1.0], save_weights_only=True)

    assert "optimizers" not in torch.load(callback.best_model_path, weights_only=True)


def test_a_resumed_run_goes_on_with_what_was_best(tmp_path):
    first, _ = fit(tmp_path, [3.0, 1.0], monitor="score")
    second = ModelCheckpoint(monitor="score")
    trainer = sg.Trainer(max_epochs=4, callbacks=second, default_root_dir=tmp_path, **QUIET)
    batches = joined_batches(2, 8)
    trainer.fit(Scored([0, 0, 2.0, 3.0]), batches, batches, ckpt_path=first.best_model_path)

    assert second.best_model_score == 1.0
    assert second.best_model_path == first.best_model_path


def test_a_default_one_is_there_unless_told_otherwise(tmp_path):
    assert any(isinstance(c, ModelCheckpoint) for c in sg.Trainer(**QUIET).callbacks)
    assert not sg.Trainer(enable_checkpointing=False, **QUIET).callbacks
    own = ModelCheckpoint(save_top_k=-1)
    assert sg.Trainer(callbacks=[own], **QUIET).callbacks == (own,)


def test_fast_dev_run_writes_nothing(tmp_path):
    trainer = sg.Trainer(fast_dev_run=True, default_root_dir=tmp_path, accelerator="cpu")
    trainer.fit(Net(), joined_batches(2, 8))

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": 3}, "save_top_k is 3 without a monitor; expected -1, 0 or 1"),
        ({"every_n_epochs": 1, "every_n_train_steps": 1}, "every_n_epochs=1 and every_n_train_steps=1"),
        ({"mode": "best"}, "mode is 'best'; expected 'min' or 'max'"),
        ({"every_n_epochs": 0}, "every_n_epochs is 0; expected at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(callbacks={"name": "model_checkpoint", **options}, **QUIET)


def test_a_monitor_that_nobody_logged_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="monitor is 'scor', which nobody logged; .*did you mean 'score'"):
        fit(tmp_path, [1.0], monitor="scor")


class Divergent(Scored):
    """Every rank logs a score of its own."""

    def validation_step(self, batch, batch_idx):
        order = self.scores if self.global_rank == 0 else self.scores[::-1]
        self.log("score", order[self.current_epoch])


def _two_ranks(rank, world_size, folder):
    callback = ModelCheckpoint(monitor="score", dirpath=Path(folder))
    trainer = sg.Trainer(max_epochs=3, strategy="ddp", devices=2, callbacks=callback, **QUIET)
    loader = DataLoader(TensorDataset(*data(16)), 4)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Divergent([3.0, 2.0, 1.0]), loader, loader)
    return str(caught.value)


def test_a_metric_that_differs_between_ranks_decides_nothing(tmp_path):
    for message in run_in_processes(_two_ranks, 2, str(tmp_path)):
        assert (
            "model_checkpoint.monitor 'score' is 3 on rank 0, 1 on rank 1; expected one value on all ranks" in message
        )
        assert "sync_dist=True" in message


# --- Two runs in one folder --------------------------------------------------------------------------------------


def _fit_for_long(folder, begun, go_on):
    torch.set_num_threads(1)

    class Waits(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self):
            begun.set()
            assert go_on.wait(60)

    _quiet_fit(folder, callbacks=[Waits()])


def _quiet_fit(folder, **options):
    trainer = sg.Trainer(
        max_epochs=1, default_root_dir=folder, logger=False, enable_progress_bar=False, accelerator="cpu", **options
    )
    trainer.fit(Scheduled(), joined_batches(2, 24))
    return trainer


def test_a_second_run_in_the_folder_is_told_before_it_trains(tmp_path):
    context = multiprocessing.get_context("fork")
    begun, go_on = context.Event(), context.Event()
    first = context.Process(target=_fit_for_long, args=(tmp_path, begun, go_on))
    first.start()
    assert begun.wait(60)
    with pytest.raises(
        ConfigError, match=rf"is in use by another run \(process {first.pid} on .*\); expected a separate"
    ):
        _quiet_fit(tmp_path)
    _quiet_fit(tmp_path, enable_checkpointing=False)  # reads and writes nothing there
    go_on.set()
    first.join(60)
    assert first.exitcode == 0
    _quiet_fit(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*.ckpt")) == [
        "epoch=0-step=2-v1.ckpt", "epoch=0-step=2.ckpt",
    ]  # fmt: skip
    assert not (tmp_path / "checkpoints" / ".in_use").exists()


def test_a_run_that_failed_or_was_killed_leaves_the_folder_free(tmp_path):
    class Fails(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        _quiet_fit(tmp_path, callbacks=[Fails()])
    _quiet_fit(tmp_path)
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    killed = context.Process(target=_fit_for_long, args=(tmp_path, begun, context.Event()))
    killed.start()
    assert begun.wait(60)
    killed.kill()
    killed.join(60)
    _quiet_fit(tmp_path)


def test_a_folder_that_another_run_leaves_at_that_moment_is_occupied_for_good(tmp_path, monkeypatch):
    file, lock, calls = tmp_path / ".in_use", fcntl.flock, []

    def flock(*given):
        calls.append(given)
        if len(calls) == 1:  # as the run does that has the folder, and ends
            file.unlink()
        lock(*given)

    monkeypatch.setattr(fcntl, "flock", flock)
    occupied.occupy(tmp_path)

    assert file.exists()
    assert claim(file) is None
    occupied.vacate(tmp_path)


def test_two_callbacks_of_one_run_may_share_a_folder(tmp_path):
    _quiet_fit(tmp_path, callbacks=[ModelCheckpoint(filename="a"), ModelCheckpoint(filename="b")])
    _quiet_fit(tmp_path, callbacks=[ModelCheckpoint(filename="a"), ModelCheckpoint(filename="b")])
    assert not (tmp_path / "checkpoints" / ".in_use").exists()


# --- Whose files a run may delete --------------------------------------------------------------------------------


def names_in(folder):
    return sorted(path.name for path in folder.glob("checkpoints/*.ckpt"))


def checkpointing(root, num_epochs, **options):
    callback = ModelCheckpoint(**options)
    return sg.Trainer(max_epochs=num_epochs, callbacks=callback, default_root_dir=root, **QUIET)


@pytest.mark.every_push("no versions-sharded")
@pytest.mark.parametrize("checkpoint", ["full", "safetensors", "sharded", "dcp"])
@pytest.mark.parametrize(
    "options",
    [{}, {"monitor": "score", "save_top_k": 2, "save_last": True}, {"enable_version_counter": False}],
    ids=["newest", "best and last", "no versions"],
)
def test_a_run_that_begins_with_another_runs_checkpoint_deletes_nothing_of_it(tmp_path, checkpoint, options):
    batches = joined_batches(2, 8)

    def fit_in(root, num_epochs, ckpt_path=None):
        callback = ModelCheckpoint(**options)
        trainer = sg.Trainer(
            max_epochs=num_epochs, callbacks=callback, checkpoint=checkpoint, default_root_dir=root, **QUIET
        )
        trainer.fit(Scored([5.0, 4.0, 3.0, 2.0, 1.0, 0.0]), batches, batches, ckpt_path=ckpt_path)
        return callback

    source = fit_in(tmp_path / "A", 3)
    before = sorted(path.name for path in (tmp_path / "A" / "checkpoints").iterdir())
    other = fit_in(tmp_path / "B", 6, ckpt_path=source.best_model_path)

    assert sorted(path.name for path in (tmp_path / "A" / "checkpoints").iterdir()) == before
    kept = {path.name for path in (tmp_path / "B" / "checkpoints").iterdir() if "epoch" in path.name}
    assert len({name.split(".")[0] for name in kept}) == max(options.get("save_top_k", 1), 1)  # its own are tidied up
    assert other.best_model_path.startswith(str(tmp_path / "B"))


def test_a_run_in_a_folder_around_anothers_deletes_nothing_of_it(tmp_path):
    batches = joined_batches(2, 8)
    checkpointing(tmp_path, 1, dirpath=tmp_path / "checkpoints" / "inner").fit(Net(), batches)
    [inner] = (tmp_path / "checkpoints" / "inner").glob("*.ckpt")

    checkpointing(tmp_path, 2).fit(Net(), batches, ckpt_path=inner)

    assert inner.exists()


def test_a_run_that_resumes_itself_tidies_up_under_another_spelling_of_its_folder(tmp_path, monkeypatch):
    batches = joined_batches(2, 8)
    monkeypatch.chdir(tmp_path)
    checkpointing("A", 1).fit(Net(), batches)
    (tmp_path / "link").symlink_to(tmp_path / "A")

    checkpointing(tmp_path / "A", 2).fit(Net(), batches, ckpt_path="last")
    assert names_in(tmp_path / "A") == ["epoch=1-step=4.ckpt"]

    checkpointing(tmp_path / "link", 3).fit(Net(), batches, ckpt_path="last")
    assert names_in(tmp_path / "A") == ["epoch=2-step=6.ckpt"]


def test_what_was_best_elsewhere_is_known_until_there_is_something_of_its_own(tmp_path):
    batches = joined_batches(2, 8)
    options = {"monitor": "score"}
    checkpointing(tmp_path / "A", 1, **options).fit(Scored([3.0]), batches, batches)
    [source] = (tmp_path / "A" / "checkpoints").glob("*.ckpt")
    trainer = checkpointing(tmp_path / "B", 1, **options)
    trainer.fit(Scored([3.0, 4.0]), batches, batches, ckpt_path=source)
    assert trainer.checkpoint_callback.best_model_path == str(source)

    trainer.max_epochs = 2
    trainer.fit(trainer.module, batches, batches)

    assert Path(trainer.checkpoint_callback.best_model_path).parent == tmp_path / "B" / "checkpoints"
    assert source.exists()


def test_last_of_another_run_in_the_folder_is_not_overwritten(tmp_path):
    batches = joined_batches(2, 8)
    checkpointing(tmp_path, 1, save_last=True).fit(Net(), batches)
    before = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()

    trainer = checkpointing(tmp_path, 2, save_last=True)
    trainer.fit(Net(), batches)
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() == before
    assert Path(trainer.checkpoint_callback.last_model_path).name == "last-v1.ckpt"

    again = checkpointing(tmp_path, 3, save_last=True)
    again.fit(Net(), batches, ckpt_path="last")  # the newest: it goes on with its own
    assert Path(again.checkpoint_callback.last_model_path).name == "last-v1.ckpt"
    assert torch.load(again.checkpoint_callback.last_model_path, weights_only=True)["loop"]["epoch"] == 2


@pytest.mark.parametrize("kept", [{"save_top_k": -1}, {"monitor": "score", "save_top_k": 3}])
def test_a_resumed_run_that_would_keep_fewer_leaves_the_others_alone(tmp_path, kept):
    batches = joined_batches(2, 8)
    checkpointing(tmp_path, 3, **kept).fit(Scored([3.0, 2.0, 1.0]), batches, batches)
    before = names_in(tmp_path)

    checkpointing(tmp_path, 4).fit(Scored([3.0, 2.0, 1.0, 4.0]), batches, batches, ckpt_path="last")

    assert len(before) == 3
    assert set(names_in(tmp_path)) == {*before, "epoch=3-step=8.ckpt"}


def test_no_checkpoint_makes_a_run_delete_a_file_elsewhere(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    batches = joined_batches(2, 8)
    checkpointing(tmp_path, 1).fit(Net(), batches)
    [path] = (tmp_path / "checkpoints").glob("*.ckpt")
    state = torch.load(path, weights_only=True)
    [callback] = [each for each in state["callbacks"].values() if "best_k_models" in each]
    callback["best_k_models"] = {str(precious): 1.0, str(tmp_path / "checkpoints" / "notes.txt"): 2.0}
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    torch.save(state, tmp_path / "edited.ckpt")

    checkpointing(tmp_path, 2).fit(Net(), batches, ckpt_path=tmp_path / "edited.ckpt")

    assert precious.read_text() == (tmp_path / "checkpoints" / "notes.txt").read_text() == "mine"


def test_last_is_saved_where_training_ends_before_there_is_a_value_to_compare(tmp_path):
    batches = joined_batches(4, 8)
    callback = ModelCheckpoint(monitor="score", save_last=True)
    trainer = sg.Trainer(max_steps=2, callbacks=callback, default_root_dir=tmp_path, **QUIET)
    trainer.fit(Scored([1.0]), batches, batches)

    assert names_in(tmp_path) == ["last.ckpt"]
    assert Path(callback.last_model_path).name == "last.ckpt"


def test_last_is_that_of_the_end_even_if_no_checkpoint_was_due(tmp_path):
    callback, files = fit(tmp_path, [1.0, 2.0], save_last=True, every_n_epochs=10)

    assert files == ["last.ckpt"]
    assert callback.last_model_path == str(tmp_path / "checkpoints" / "last.ckpt")
