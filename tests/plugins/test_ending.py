"""Every fit ends with two lines, and Ctrl-C saves before it ends one."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import stratagem as sg
from programs import scripts
from programs.terminal import CTRL_C, Terminal
from stratagem.callbacks import EarlyStopping, ModelCheckpoint, SpikeDetection, Timer
from stratagem_testing.reference import Net, joined_batches

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}


def last_lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()[-2:]


# --- Why -----------------------------------------------------------------------------------------------------------


class Logging(Net):
    def training_step(self, batch, batch_idx):
        self.log("constant", 1.0)
        return super().training_step(batch, batch_idx)


class Stopping(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        trainer.should_stop = batch_idx == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_epochs": 2}, r"step 8: max_epochs=2 is reached"),
        ({"max_steps": 3}, r"step 3 in epoch 1: max_steps=3 is reached"),
        ({"max_time": 1e-6}, r"step 0: max_time=1e-06 s is over"),
        ({"max_epochs": 9, "callbacks": Stopping()}, r"step 2 in epoch 1 of 9: Stopping.* set trainer.should_stop"),
        (
            {"max_epochs": 9, "callbacks": EarlyStopping(monitor="constant", patience=1)},
            r"step 8: early_stopping: constant has not improved on 1 in 1 checks",
        ),
        (
            {"max_epochs": 9, "callbacks": Timer(duration=1e-6, verbose=False)},
            r"step 1 in epoch 1 of 9: timer: 0 s have passed, and timer.duration is 1e-06 s",
        ),
    ],
    ids=["epochs", "steps", "time", "should_stop", "early stopping", "timer"],
)  # fmt: skip
def test_the_first_line_says_why_a_fit_ended(tmp_path, capsys, options, reason):
    trainer = sg.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **QUIET, **options)
    trainer.fit(Logging(), joined_batches(4, 8))
    why, where = last_lines(capsys)

    assert re.fullmatch(f"training ended at {reason}", why)
    assert where == "it wrote no files"


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 2, "max_epochs": -1}], ids=str)
def test_a_finished_run_that_is_resumed_says_that_nothing_was_left(tmp_path, capsys, limit):
    """Also with a validation, after which the checkpoint is saved before the epoch has ended."""
    for path in (None, "last"):
        trainer = sg.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu", **limit)
        trainer.fit(Validated(), joined_batches(2, 8), joined_batches(1, 8), ckpt_path=path)
        lines = capsys.readouterr().out.splitlines()

    option, number = next(iter(limit.items()))
    assert lines[-2] == f"nothing was left to train: {option}={number} is reached at step 2; raise {option}"
    assert not [line for line in lines if "it/s" in line]


def test_the_reason_of_one_fit_is_not_that_of_the_next(tmp_path, capsys):
    trainer = sg.Trainer(max_epochs=9, callbacks=Stopping(), enable_checkpointing=False, **QUIET)
    trainer.fit(Net(), joined_batches(4, 8))
    trainer.settings.max_steps = 3
    trainer.fit(trainer.module, joined_batches(4, 8))

    assert last_lines(capsys)[0].endswith(": max_steps=3 is reached")


@pytest.mark.parametrize(
    ("error", "why"), [(KeyError("x"), "KeyError"), (SystemExit(3), "exit code 3"), (KeyboardInterrupt(), "Ctrl-C")]
)
def test_an_error_ends_it_with_two_lines_too(tmp_path, monkeypatch, capsys, error, why):
    monkeypatch.chdir(tmp_path)

    class Failing(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.current_epoch == 1:
                raise error

    def trainer(epochs):
        return sg.Trainer(max_epochs=epochs, **QUIET)

    with pytest.raises(type(error)):
        trainer(2).fit(Failing(), joined_batches(2, 8))
    first = last_lines(capsys)
    with pytest.raises(type(error)):
        trainer(3).fit(Failing(), joined_batches(2, 8), ckpt_path="last")
    second = last_lines(capsys)

    saved = "checkpoints/epoch=0-step=2.ckpt"
    assert first == [
        f"training ended at step 3 in epoch 2 of 2: {why}",
        f'continue with fit(ckpt_path="last") from {saved} (step 2); checkpoint: {saved}',
    ]
    assert second[1].startswith("no checkpoint was saved since step 2, at which this fit started")


def test_weights_only_are_not_offered_to_continue_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    class Failing(Net):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError

    keep = ModelCheckpoint(every_n_train_steps=1, save_weights_only=True)
    with pytest.raises(ValueError):
        sg.Trainer(max_epochs=1, callbacks=keep, **QUIET).fit(Failing(), joined_batches(2, 8))

    assert "with weights only: a fit from it starts at step 0" in last_lines(capsys)[1]


# --- Where ---------------------------------------------------------------------------------------------------------


class Validated(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 0.25, sync_dist=True)


def test_the_second_line_says_where_the_files_are(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    callbacks = [ModelCheckpoint(monitor="val_loss", save_last=True), "report"]
    trainer = sg.Trainer(
        max_epochs=1, callbacks=callbacks, accelerator="cpu", enable_progress_bar=False, log_every_n_steps=1
    )
    trainer.fit(Validated(), joined_batches(2, 8), joined_batches(1, 8))
    line = last_lines(capsys)[1]
    paths = [part.rpartition(": ")[2] for part in line.split("; ")]

    assert line == (
        "best checkpoint (val_loss 0.25): checkpoints/epoch=0-step=2.ckpt; last checkpoint: checkpoints/last.ckpt; "
        "report: report.html; metrics: stratagem_logs/version_0/metrics.csv"
    )
    assert all(Path(path).exists() for path in paths)


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_the_second_line_has_what_profilers_and_tensorboard_wrote(tmp_path, monkeypatch, capsys, profiler):
    monkeypatch.chdir(tmp_path)
    trainer = sg.Trainer(
        max_epochs=1, profiler=profiler, logger="tensorboard", enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Validated(), joined_batches(6, 8))
    titles = {"simple": "time of actions: profile-simple-rank0.txt",
              "advanced": "time of functions: profile-advanced-rank0.prof",
              "pytorch": "trace: trace-rank0.json"}  # fmt: skip

    assert (
        last_lines(capsys)[1]
        == f"{titles[profiler]}; tensorboard: {Path(trainer.logger.log_dir).relative_to(tmp_path)}"
    )


SPAWNS = """
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

if __name__ == "__main__":
    trainer = sg.Trainer(strategy="ddp_spawn", devices=2, accelerator="cpu", max_epochs=1, logger=False,
                         enable_progress_bar=False)
    trainer.fit(Net(), joined_batches(2, 8))
    print("outcome:", trainer.outcome.reason, trainer.outcome.newest_checkpoint.step)
"""


@pytest.mark.slow
def test_the_outcome_comes_back_from_spawned_processes(tmp_path):
    (tmp_path / "train.py").write_text(SPAWNS)
    result = scripts.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )

    assert "outcome: max_epochs=1 is reached 2" in result.stdout, result.stderr


def test_files_that_do_not_exist_are_not_listed(tmp_path, capsys):
    class Deleting(sg.Callback):
        @sg.hookimpl
        def on_fit_end(self, trainer):
            os.unlink(trainer.checkpoint_callback.best_model_path)

    sg.Trainer(max_epochs=1, callbacks=Deleting(), default_root_dir=tmp_path, **QUIET).fit(Net(), joined_batches(2, 8))

    assert last_lines(capsys)[1] == "it wrote no files"


def test_barebones_prints_nothing(tmp_path, capsys):
    sg.Trainer(max_epochs=1, barebones=True, accelerator="cpu").fit(Net(), joined_batches(2, 8))

    assert "training ended" not in "".join(capsys.readouterr())


def test_the_report_names_the_reason(tmp_path):
    stop = SpikeDetection(warmup=1, rtol=1.0001, atol=0, on_spike="stop")
    trainer = sg.Trainer(max_epochs=9, callbacks=[stop, "report"], default_root_dir=tmp_path, **QUIET)
    with pytest.warns(UserWarning, match="the loss is"):
        trainer.fit(Net(lr=50.0), joined_batches(8, 8))

    assert "spike_detection: the loss is" in (tmp_path / "report.html").read_text()


# --- Ctrl-C --------------------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    def rest(seconds, told=""):
        if told:
            print(told, flush=True)
        # A signal just before one long sleep would be handled after that sleep.
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(seconds, 0.05))

    class Slow(Net):
        def on_train_start(self):
            with open(f"pid{self.global_rank}", "w") as file:
                file.write(str(os.getpid()))
        def training_step(self, batch, batch_idx):
            if float(step_s) > 1:
                os.write(1, b"in a step\\n")
            rest(float(step_s))
            return super().training_step(batch, batch_idx)
        def validation_step(self, batch, batch_idx):
            rest(float(validation_s), f"validating on rank {self.global_rank}")

    if __name__ == "__main__":
        devices, strategy, step_s, validation_s, *more = sys.argv[1:]
        trainer = sg.Trainer(
            accelerator="cpu", devices=int(devices), strategy=strategy, max_epochs=1000, logger=False,
            num_sanity_val_steps=0, use_distributed_sampler=False, callbacks=[*more, {"name": "progress", "refresh_every_s": 0.01}],
        )
        validation = joined_batches(2, 8) if float(validation_s) else None
        trainer.fit(Slow(), joined_batches(10, 8), validation, ckpt_path="last" if "--resume" in more else None)
        print("NOT INTERRUPTED")
    else:
        step_s, validation_s = sys.argv[3:5]
"""


def started(tmp_path, devices=1, strategy="auto", step_s=0.05, validation_s=0.0, more=()):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    words = [str(word) for word in (devices, strategy, step_s, validation_s, *more)]
    return Terminal([sys.executable, "train.py", *words], cwd=tmp_path, columns=200)


def step_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["loop"]["global_step"]


@pytest.mark.every_push("1-auto")
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp"), (2, "ddp_fork"), (2, "ddp_spawn")], ids=str)
def test_ctrl_c_saves_once_and_says_how_to_continue(tmp_path, devices, strategy):
    with started(tmp_path, devices, strategy) as terminal:
        terminal.wait_for(r" [1-9]/10 ")
        terminal.press(CTRL_C)
        code = terminal.finish()
        text = terminal.text

    saved = tmp_path / "checkpoints" / "interrupted.ckpt"
    step = step_of(saved)
    assert code == -signal.SIGINT
    assert "Traceback" not in text
    assert text.count("Ctrl-C: the fit ends after this step and saves a checkpoint (none yet)") == 1
    assert text.count("training ended at step") == 1
    assert f"training ended at step {step}" in text
    assert f'continue with fit(ckpt_path="last") from checkpoints/interrupted.ckpt (step {step})' in text
    assert "NOT INTERRUPTED" not in text


@pytest.mark.every_push("1")
@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_one_process_saves_on_all(tmp_path, number):
    with started(tmp_path, 2, "ddp") as terminal:
        terminal.wait_for(r" [1-9]/10 ")
        os.kill(int((tmp_path / f"pid{number}").read_text()), signal.SIGINT)
        code = terminal.finish()

    assert code == -signal.SIGINT
    assert (tmp_path / "checkpoints" / "interrupted.ckpt").exists(), terminal.text


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp"), (2, "ddp_spawn")], ids=str)
def test_a_second_ctrl_c_ends_at_once(tmp_path, devices, strategy):
    with started(tmp_path, devices, strategy, step_s=3600.0) as terminal:
        terminal.wait_for("(?s)" + ".*".join(["in a step"] * devices))
        terminal.press(CTRL_C)
        terminal.wait_for("press Ctrl-C again")
        time.sleep(1.5)  # two that come within a second count as one
        terminal.press(CTRL_C)
        code = terminal.finish()
        text = terminal.text

    assert code == -signal.SIGINT
    assert not list(tmp_path.glob("checkpoints/*.ckpt"))
    assert "no checkpoint was saved" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_ctrl_c_during_validation_does_not_wait_for_its_end(tmp_path):
    with started(tmp_path, step_s=0.0, validation_s=3600.0) as terminal:
        terminal.wait_for("validating")
        terminal.press(CTRL_C)
        terminal.finish()

    assert step_of(tmp_path / "checkpoints" / "interrupted.ckpt") == 10


@pytest.mark.slow
def test_ctrl_c_while_a_validation_saves_its_checkpoint_lets_it_finish(tmp_path):
    script = """
        import os, signal
        import stratagem as sg
        from stratagem_testing.reference import Net, joined_batches

        class Interrupted(Net):
            def on_save_checkpoint(self, checkpoint): os.kill(os.getpid(), signal.SIGINT)
            def validation_step(self, batch, batch_idx): self.log("val_loss", 1.0 + self.current_epoch)

        callbacks = [{"name": "model_checkpoint", "monitor": "val_loss"}]
        trainer = sg.Trainer(max_epochs=1000, accelerator="cpu", callbacks=callbacks, logger=False)
        trainer.fit(Interrupted(), joined_batches(4, 8), joined_batches(2, 8))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    with Terminal([sys.executable, "train.py"], cwd=tmp_path) as terminal:
        assert terminal.finish() == -signal.SIGINT

    assert step_of(tmp_path / "checkpoints" / "epoch=0-step=4.ckpt") == 4, terminal.text


@pytest.mark.slow
@pytest.mark.parametrize(("validation_s", "told"), [(0.0, ""), (3600.0, "KeyboardInterrupt in rest")])
def test_ctrl_c_under_torchrun_saves_and_prints_no_traceback_of_the_ranks(tmp_path, validation_s, told):
    program = textwrap.dedent(PROGRAM).replace("num_sanity_val_steps=0", "num_sanity_val_steps=1")
    (tmp_path / "train.py").write_text(program)
    words = ["train.py", "2", "ddp", "0.05", str(validation_s)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Terminal([*torchrun, *words], cwd=tmp_path, columns=200) as terminal:
        for seen in ["validating on rank 0", "validating on rank 1"] if validation_s else [r" [1-9]/10 "]:
            terminal.wait_for(seen)
        terminal.press(CTRL_C)
        terminal.finish()
        text = terminal.text

    assert told in text
    assert "[rank0]: Traceback" not in text
    assert "[rank1]: Traceback" not in text
    assert (tmp_path / "checkpoints" / "interrupted.ckpt").exists() == (not validation_s)


@pytest.mark.slow
def test_files_of_another_run_are_kept_and_a_recent_checkpoint_is_enough(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "interrupted.ckpt").write_bytes(b"precious")
    for _ in range(2):
        with started(tmp_path) as terminal:
            terminal.wait_for(r" [1-9]/10 ")
            terminal.press(CTRL_C)
            terminal.finish()
    assert (folder / "interrupted.ckpt").read_bytes() == b"precious"
    assert {path.name for path in folder.glob("*.ckpt")} == {
        "interrupted.ckpt", "interrupted-v1.ckpt", "interrupted-v2.ckpt",
    }  # fmt: skip

    keep = tmp_path / "again"
    keep.mkdir()
    with started(keep) as terminal:
        terminal.wait_for(r"epoch 2/")
        terminal.press(CTRL_C)
        terminal.finish()
    assert not (keep / "checkpoints" / "interrupted.ckpt").exists()
    assert "keeps its checkpoints (the newest one is of step 10)" in terminal.text
    assert 'continue with fit(ckpt_path="last") from checkpoints/epoch=0-step=10.ckpt (step 10)' in terminal.text


@pytest.mark.slow
def test_an_own_handler_of_sigint_is_left_alone(tmp_path):
    script = """
        import signal
        import stratagem as sg
        from stratagem_testing.reference import Net, joined_batches

        def own(number, frame): pass
        signal.signal(signal.SIGINT, own)

        class Watch(sg.Callback):
            @sg.hookimpl
            def on_train_batch_end(self): assert signal.getsignal(signal.SIGINT) is own

        sg.Trainer(max_epochs=1, accelerator="cpu", callbacks=Watch()).fit(Net(), joined_batches(2, 8))
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sg.Trainer(max_epochs=1, accelerator="cpu").fit(Net(), joined_batches(2, 8))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    with Terminal([sys.executable, "train.py"], cwd=tmp_path) as terminal:
        assert terminal.finish() == 0, terminal.text
