"""Progress shows where a run is: lines in a file, a bar in a terminal, on rank 0 alone."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager

import stratagem as sg
import stratagem_callbacks.progress
from kernels import kernel
from programs.terminal import Terminal
from stratagem.api.readback import Readback
from stratagem.callbacks import ProgressBar
from stratagem_callbacks.pace import Pace, Progress
from stratagem_callbacks.terminal_bar import TerminalBar
from stratagem_testing.reference import Net, joined_batches

TESTS = Path(__file__).parents[1]
QUIET = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}


def test_lines_in_a_file(capsys):
    trainer = sg.Trainer(max_epochs=2, accumulate_grad_batches=2, **QUIET)
    trainer.fit(Net(), joined_batches(3, 8))
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == "1 process on cpu"
    assert re.fullmatch(r"epoch 1/2  batch 3/3  [\d.]+ it/s  loss [\d.e+]+", lines[1])
    assert lines[3:] == ["training ended at step 4: max_epochs=2 is reached", "it wrote no files"]


def test_lines_come_now_and_then(capsys):
    trainer = sg.Trainer(max_epochs=1, callbacks=ProgressBar(line_every_s=1e-6), **QUIET)
    trainer.fit(Net(), joined_batches(5, 8))

    assert len(re.findall("batch [1-5]/5", capsys.readouterr().out)) >= 5


def test_on_a_gpu_a_line_comes_when_its_numbers_have_arrived(capsys, monkeypatch):
    """Reading them at once would wait for all that is queued. Here they take two batches."""

    class Slow(Readback):
        asked = 0

        @property
        def ready(self):
            self.asked += 1
            return self.asked > 2

    monkeypatch.setattr(stratagem_callbacks.progress, "Readback", Slow)
    trainer = sg.Trainer(max_epochs=1, callbacks=ProgressBar(line_every_s=1e-6), **QUIET)
    trainer.fit(Net(), joined_batches(7, 8))

    assert re.findall("batch (.)/7", capsys.readouterr().out) == ["3", "6", "7"]


def test_it_closes_after_an_exception(capsys):
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError

    progress = ProgressBar()
    try:
        sg.Trainer(max_epochs=1, callbacks=progress, **QUIET).fit(Broken(), joined_batches(1, 8))
    except RuntimeError:
        assert progress._view is None


@pytest.mark.slow
def test_a_bar_in_a_terminal(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys; sys.path.insert(0, {str(TESTS)!r})
            import stratagem as sg
            from stratagem_testing.reference import Net, joined_batches
            class Shown(Net):
                def validation_step(self, batch, batch_idx):
                    self.log("val_loss", 1.5, prog_bar=True)
            trainer = sg.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, accelerator="cpu")
            trainer.fit(Shown(), joined_batches(4, 8), joined_batches(2, 8))
            trainer.test(Net(), joined_batches(2, 8))
            """
        )
    )
    with Terminal([sys.executable, str(script)], cwd=tmp_path, columns=100) as terminal:
        code = terminal.finish()
    text = terminal.text

    assert code == 0, text
    assert "epoch 2/2" in text
    assert "4/4" in text
    assert "it/s" in text
    assert "val_loss 1.5" in text
    assert re.search(r"validation  [0-2]/2 [━─]+ ", text)
    assert re.search(r"test  2/2 ━+ ", text)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "run 100 %" in text


def test_every_epoch_has_a_remaining_time_of_its_own():
    now = 0.0
    pace = Pace(clock=lambda: now)
    seen = []
    for epoch in range(3):
        pace.start_epoch(0)
        for done in range(5):
            seen.append(pace.progress("", done, 4 - done, 4 * (3 - epoch) - done))
            now += (epoch + 1.0) * (done < 4)
        pace.pause()
        now += 8.0  # validation
        pace.go_on()

    assert [each.seconds_left for each in seen] == [None, 3, 2, 1, 0, 4, 6, 4, 2, 0, 8, 9, 6, 3, 0]
    assert [each.share_of_run for each in seen[4::5]] == [4 / 12, 8 / 12, 1]
    # Of the run, validations count: after the first epoch 12 s for 4 batches, after the second 28 s for 8.
    assert [seen[number].run_seconds_left for number in (5, 10)] == [24.0, 14.0]


def test_a_resumed_epoch_counts_its_own_batches_alone():
    now = 0.0
    pace = Pace(clock=lambda: now)
    pace.start_epoch(30)
    now += 5.0

    assert pace.progress("", 35, 5, 5).rate == 1.0
    assert pace.progress("", 35, 5, 5).share_of_run == 0.5


def displayed(numbers, width, run=0.4, total=400.0):
    bar = TerminalBar(training=True)
    bar.close()
    progress = Progress("epoch 12/200", 25, total, 18.3, 83.0, run, None if run is None else 4000.0)
    return bar._line(progress, numbers, width).plain.rstrip("\n")


def test_at_80_columns_epoch_batch_bar_and_time_stay_and_metrics_give_way():
    many = [f"metric_{number} 0.1234" for number in range(9)]
    line = displayed(["loss 0.8178", *many], 80)

    assert re.match(r"epoch 12/200   25/400 [━─]{8,} 1:23  run 40 % 1:06:40 left  18.3 it/s$", line)
    assert len(line) <= 80
    assert "loss 0.8178" in displayed(["loss 0.8178", *many], 90)
    assert "metric_8 0.1234" in displayed(many, 300)


@pytest.mark.parametrize("width", [10, 20, 30, 38, 40, 50, 60, 70, 80, 120])
def test_a_line_fits_its_terminal(width):
    line = displayed(["loss 0.8178"] * 5, width)

    assert len(line) <= width
    assert ("1:23" in line) == (width > 20)
    assert ("run 40 %" in line) == (width >= 60)


def test_a_loader_without_a_length_has_no_time():
    progress = Progress("epoch 1", 25, float("inf"), 18.3, None)
    bar = TerminalBar(training=True)
    bar.close()

    assert re.match(r"epoch 1  25 ─+ -:--  18.3 it/s  loss 1", bar._line(progress, ["loss 1"], 80).plain)


class Twice(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("own_loss", loss, prog_bar=True)
        return loss


def test_a_run_that_ends_with_its_epoch_has_one_remaining_time():
    clock = iter([0.0, 0.0, 1.0, 1.0])
    pace, bar = Pace(clock=lambda: next(clock)), TerminalBar(training=True)
    pace.start_epoch(0)
    last, earlier = (bar._line(pace.progress("epoch 1", 25, 75, in_run), [], 80).plain for in_run in (75, 175))
    bar.close()

    assert re.fullmatch(r"epoch 1   25/100 [━─]+ 0:03  run 25 %  25.0 it/s\n", last)
    assert "run 12 % 0:07 left" in earlier


def test_no_number_is_shown_twice(capsys):
    sg.Trainer(max_epochs=1, **QUIET).fit(Twice(), joined_batches(3, 8))
    line = capsys.readouterr().out.splitlines()[1]

    assert "own_loss" in line
    assert "  loss" not in line


def test_a_launch_says_what_takes_so_long(tmp_path, monkeypatch, capfd):
    sg.Trainer(max_epochs=1, strategy="ddp_fork", devices=2, **QUIET).fit(Net(), joined_batches(4, 8))
    lines = capfd.readouterr().out.splitlines()

    assert lines[0] == "starting 2 processes, which takes some seconds"
    assert [line for line in lines if line.startswith("2 processes on cpu")]


def test_tqdm_times_every_epoch_on_its_own():
    from tqdm import tqdm

    from stratagem_callbacks.tqdm_progress import _TQDM

    bar, clock = _TQDM(tqdm, training=True), iter(range(1000))
    bar.training._time = lambda: float(next(clock))
    starts = []
    for _ in range(3):
        for done in range(5):
            bar.show(Progress("epoch", done, 4, 1.0, None), [], False)
        starts.append(bar.training.start_t)
    bar.close()

    assert starts[2] > starts[1]


@pytest.mark.slow
def test_no_rich_before_a_bar_is_needed():
    code = "import sys, stratagem.callbacks as c; c.ProgressBar(); print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"


# --- Notebooks ---------------------------------------------------------------------------------------------------

CELL = """
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

trainer = sg.Trainer(
    max_epochs=2, accelerator="cpu", devices={devices}, logger=False, enable_checkpointing=False, callbacks={callbacks}
)
trainer.fit(Net(), joined_batches(20, 8))
"""


@pytest.mark.every_push("1-[]")
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "callbacks"), [(1, []), (2, []), (1, ["tqdm"])], ids=str)
def test_a_real_notebook_shows_it(tmp_path, devices, callbacks):
    """One line that is written over, for tqdm its own; also where training happens in copies of the kernel."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(CELL.format(devices=devices, callbacks=callbacks))]
    nbclient.NotebookClient(notebook, km=kernel(AsyncKernelManager, tmp_path), timeout=360).execute()
    outputs = notebook.cells[0].outputs
    text = "".join(output.get("text", "") for output in outputs)
    last = [line.rpartition("\r")[2] for line in text.splitlines() if "epoch 2/2" in line][-1]

    assert "loss" in last
    assert "20/20" in last or "tqdm" in callbacks
    assert f"{devices} process" in text
    assert all("Traceback" not in str(output) for output in outputs)
