"""``async_save``: training waits for a copy, learns of failures at a step, and never loses the last good checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

import stratagem as sg
from programs import scripts
from stratagem.checkpoints import DCPCheckpoint, FullCheckpoint, SafetensorsCheckpoint, ShardedCheckpoint
from stratagem.errors import CheckpointError
from stratagem.runtime.state_io import read_checkpoint
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Scheduled, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of
from stratagem_trainer.checkpoint_files import read_any

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
FORMATS = {
    "sharded": ShardedCheckpoint, "full": FullCheckpoint, "dcp": DCPCheckpoint, "safetensors": SafetensorsCheckpoint,
}  # fmt: skip


def held_back(format_name):
    """Make every write of this process wait for an event; return the event."""
    go_on = threading.Event()
    if format_name == "sharded":
        import stratagem_checkpoints.shards as module

        name = "_write_parts"
    elif format_name == "dcp":
        import stratagem_checkpoints.dcp as module

        name = "_save"
    else:
        import stratagem_checkpoints.engine as module

        name = "publish_file"
    plain = getattr(module, name)

    def waiting(*arguments):
        assert go_on.wait(60)
        return plain(*arguments)

    setattr(module, name, waiting)
    return go_on


def _train_on_while_it_saves(rank, world_size, checkpoint, strategy, path, batches):
    go_on = held_back(checkpoint)
    seen = {}

    class Saves(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(path)
                seen["weights"], seen["position"] = weights_of(trainer), trainer.global_step
                seen["whole at once"] = trainer.run.checkpoint_format.recognises(path)
            if batch_idx == 3:  # two steps on, and what is saved must not move along
                seen["moved"] = not torch.equal(weights_of(trainer)["net.0.weight"], seen["weights"]["net.0.weight"])
                go_on.set()

    trainer = sg.Trainer(
        max_epochs=1, strategy=strategy, devices=world_size, checkpoint={"name": checkpoint, "async_save": True},
        callbacks=[Saves()], **QUIET,
    )  # fmt: skip
    trainer.fit(Scheduled(), share(trainer, batches))
    return seen, weights_of(trainer)


@pytest.mark.slow
@pytest.mark.every_push("sharded-ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_what_is_saved_is_the_moment_of_the_call(checkpoint, strategy, tmp_path):
    batches = joined_batches(6, 24)
    path = tmp_path / "x.ckpt"
    for seen, weights in run_in_processes(_train_on_while_it_saves, 2, checkpoint, strategy, path, batches):
        assert not seen["whole at once"]
        assert seen["moved"]
        assert relative_difference(weights, train_module_plainly(Scheduled(), batches)[0]) < 1e-6
        saved = read_any(path)
        assert relative_difference(saved["state_dict"], seen["weights"]) == 0
        assert saved["loop"]["global_step"] == seen["position"] == 2


def _fails_in_the_background(rank, world_size, checkpoint, path, batches):
    """Rank 0's disk is full; return the step at which this rank was told, and how."""
    if rank == 0:
        if checkpoint == "sharded":
            import stratagem_checkpoints.shards as module

            module._write_parts = _disk_full
        elif checkpoint == "dcp":
            import stratagem_checkpoints.dcp as module

            module._checksums = _disk_full  # torch's save before it is collective
        else:
            import stratagem.checkpoint.files as module

            module.os.replace = _disk_full

    class Saves(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer, batch_idx):
            if batch_idx == 0:
                trainer.save_checkpoint(path)

    trainer = sg.Trainer(
        max_epochs=20, strategy="ddp", devices=world_size, checkpoint={"name": checkpoint, "async_save": True},
        callbacks=[Saves()], **QUIET,
    )  # fmt: skip
    said = outcome(lambda: trainer.fit(Scheduled(), share(trainer, batches)))
    return trainer.global_step, said


def _disk_full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.every_push("safetensors")
@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_a_failure_is_told_at_the_same_step_on_all_ranks(checkpoint, tmp_path):
    batches = joined_batches(40, 24)
    (first, said), (second, also) = run_in_processes(
        _fails_in_the_background, 2, checkpoint, tmp_path / "x.ckpt", batches
    )
    assert first == second < 800
    assert said.startswith("refused: ")
    assert "could not be written (No space left on device)" in said
    assert "could not be written (No space left on device)" in also


def test_the_next_save_waits_and_tells(tmp_path):
    with sg.Run(accelerator="cpu", checkpoint={"name": "sharded", "async_save": True}) as run:
        for value in range(5):
            run.ask(
                "save_checkpoint", state={"state_dict": {"w": torch.full((1000,), float(value))}}, path=tmp_path / "x"
            )
        run.saver.wait()
        assert float(read_any(tmp_path / "x")["state_dict"]["w"][0]) == 4
        (tmp_path / "file").write_text("")
        run.ask("save_checkpoint", state={"state_dict": {}}, path=tmp_path / "file" / "x")
        with pytest.raises(CheckpointError, match="could not be written"):
            run.ask("save_checkpoint", state={"state_dict": {}}, path=tmp_path / "x")
        run.ask("save_checkpoint", state={"state_dict": {}}, path=tmp_path / "y")  # told once
    assert ShardedCheckpoint().is_whole(tmp_path / "y")


def test_loading_waits_for_what_is_being_saved(tmp_path):
    with sg.Run(accelerator="cpu", checkpoint={"name": "full", "async_save": True}) as run:
        run.ask("save_checkpoint", state={"state_dict": {"w": torch.ones(10_000_000)}}, path=tmp_path / "x")
        assert read_checkpoint(run, tmp_path / "x")["state_dict"]["w"].sum() == 10_000_000


@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_values_other_than_tensors_are_refused_at_once(checkpoint, tmp_path):
    with sg.Run(accelerator="cpu", checkpoint={"name": checkpoint, "async_save": True}) as run:
        with pytest.raises(CheckpointError, match="values.deep"):
            run.ask("save_checkpoint", state={"values": {"deep": object()}}, path=tmp_path / "x")
        assert not run.saver.busy


@pytest.mark.parametrize("checkpoint", list(FORMATS))
def test_the_older_one_goes_only_when_the_new_one_is_whole(checkpoint, tmp_path, monkeypatch):
    arguments = QUIET | {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = sg.Trainer(max_epochs=2, checkpoint={"name": checkpoint, "async_save": True}, **arguments)
    trainer.fit(Scheduled(), joined_batches(2, 24))
    folder, suffix = tmp_path / "checkpoints", FORMATS[checkpoint].suffix
    kept = [path.name for path in folder.glob(f"epoch*{suffix}")]
    assert kept == [f"epoch=1-step=4{suffix}"]

    if checkpoint == "sharded":
        monkeypatch.setattr("stratagem_checkpoints.shards._write_parts", _disk_full)
    elif checkpoint == "dcp":
        monkeypatch.setattr("stratagem_checkpoints.dcp._save", _disk_full)
    else:
        monkeypatch.setattr("stratagem.checkpoint.files.os.replace", _disk_full)
    trainer.max_epochs = 3
    with pytest.raises(CheckpointError, match="could not be written"):
        trainer.fit(trainer.module, joined_batches(2, 24))
    assert [path.name for path in folder.glob(f"epoch*{suffix}")] == kept, "the only good one was deleted"
    assert FORMATS[checkpoint]().is_whole(folder / kept[0])


SCRIPT = """
import sys, torch, stratagem as sg
run = sg.Run(accelerator="cpu", checkpoint={"name": "sharded", "async_save": True})
run.connect()
run.ask("save_checkpoint", state={"state_dict": {"w": torch.ones(5_000_000)}}, path=__import__("pathlib").Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_script_may_end_right_after_its_last_save(tmp_path):
    done = scripts.run([sys.executable, "-c", SCRIPT, str(tmp_path / "x")], capture_output=True, text=True, timeout=360)
    assert (done.returncode, done.stderr) == (0, "")
    assert ShardedCheckpoint().is_whole(tmp_path / "x")


@pytest.mark.slow
def test_a_failure_that_nobody_is_left_to_catch_is_printed(tmp_path):
    (tmp_path / "file").write_text("")
    done = scripts.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "file" / "x")], capture_output=True, text=True, timeout=360
    )
    assert "stratagem: " in done.stderr
    assert "could not be written" in done.stderr


FAILING = """
import os, sys, time
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

path, strategy, who = sys.argv[1:]
sync = os.fsync
os.fsync = lambda file: (time.sleep(1), sync(file))  # a slow disk

class Fails(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if batch_idx == 1 and who != "all, after the fit":
            trainer.save_checkpoint(path)
            if who == str(trainer.global_rank):
                raise ValueError("on purpose")

if __name__ == "__main__":
    trainer = sg.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, callbacks=[Fails()], logger=False,
        enable_progress_bar=False, enable_checkpointing=False, checkpoint={"name": "sharded", "async_save": True},
    )
    trainer.fit(Net(), joined_batches(3, 8))
    trainer.save_checkpoint(path)
    raise ValueError("on purpose")
"""


@pytest.mark.every_push("ddp-0")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "who"),
    [("ddp", "0"), ("ddp", "1"), ("ddp", "all, after the fit"), ("ddp_fork", "0"), ("ddp_fork", "1")],
)
def test_a_run_that_fails_finishes_the_save_that_it_has_begun(tmp_path, strategy, who):
    (tmp_path / "train.py").write_text(FAILING)
    done = scripts.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "x"), strategy, who],
        capture_output=True, text=True, timeout=360,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: on purpose" in done.stderr
    assert "did not finish" not in done.stderr
    assert ShardedCheckpoint().is_whole(tmp_path / "x")
    waited = "stratagem: ValueError: on purpose; the processes end once the checkpoint in the background is written"
    assert done.stderr.count(waited) == (strategy == "ddp" and who != "1")


@pytest.mark.every_push("")
@pytest.mark.slow
@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"], ids=["", "own"])
def test_a_signal_ends_the_wait_for_a_save_that_hangs(tmp_path, handler):
    """The disk of rank 1 never answers, and rank 0 fails."""
    hangs = FAILING.replace("time.sleep(1)", 'time.sleep(600 * (os.environ.get("RANK") == "1"))')
    (tmp_path / "train.py").write_text(f"import signal, sys\n{handler}{hangs}")
    process = scripts.Popen(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "x"), "ddp", "0"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = iter(process.stderr.readline, "")
        assert any("ValueError: on purpose; the processes end once" in line for line in said)
        process.send_signal(signal.SIGTERM if handler else signal.SIGINT)
        rest = process.communicate(timeout=90)[1]
    finally:
        process.kill_all()
    assert process.returncode != 0
    assert "ValueError: on purpose" in rest
    assert not (tmp_path / "x").exists()
