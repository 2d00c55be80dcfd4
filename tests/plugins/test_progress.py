"""Progress shows where a run is: lines in a file, a bar in a terminal, on rank 0 alone."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import nbclient
import nbformat
import pytest

import stratagem as sg
import stratagem_callbacks.progress
from stratagem.api.readback import Readback
from stratagem.callbacks import ProgressBar
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
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, str(script)], stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

    assert process.wait() == 0, text
    assert "epoch 2/2" in text
    assert "4/4" in text
    assert "it/s" in text
    assert "val_loss 1.5" in text
    assert "test" in text


def test_every_epoch_has_a_remaining_time_of_its_own():
    from stratagem_callbacks.progress import _Bar

    bar = _Bar(training=True)
    (task,) = bar.progress.tasks
    clock = iter(range(1000))
    bar.progress.get_time = task._get_time = lambda: float(next(clock))
    remaining = []
    for epoch in range(3):
        for done in range(5):
            bar.show(f"epoch {epoch + 1}/3", done, 4, 1.0, "", done == 4)
            remaining.append(task.time_remaining)
    bar.close()

    for epoch in range(3):
        start, *within, end = remaining[5 * epoch : 5 * epoch + 5]
        assert end == 0
        assert not start
        assert all(each is None or each > 0 for each in within)
        assert within[-1] is not None


def test_tqdm_times_every_epoch_on_its_own():
    from tqdm import tqdm

    from stratagem_callbacks.tqdm_progress import _TQDM

    bar, clock = _TQDM(tqdm, training=True), iter(range(1000))
    bar.training._time = lambda: float(next(clock))
    starts = []
    for _ in range(3):
        for done in range(5):
            bar.show("epoch", done, 4, 1.0, "", False)
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
import nbclient
import nbformat
import pytest

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

trainer = sg.Trainer(
    max_epochs=2, accelerator="cpu", devices={devices}, logger=False, enable_checkpointing=False, callbacks={callbacks}
)
trainer.fit(Net(), joined_batches(20, 8))
"""


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("devices", "callbacks"), [(1, []), (2, []), (1, ["tqdm"])], ids=str)
def test_a_real_notebook_shows_it(devices, callbacks):
    """One line that is written over, for tqdm its own; also where training happens in copies of the kernel."""
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(CELL.format(devices=devices, callbacks=callbacks))]
    nbclient.NotebookClient(notebook, timeout=360, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    text = "".join(output.get("text", "") for output in outputs)
    last = [line.rpartition("\r")[2] for line in text.splitlines() if "epoch 2/2" in line][-1]

    assert "loss" in last
    assert "20/20" in last or "tqdm" in callbacks
    assert f"{devices} process" in text
    assert all("Traceback" not in str(output) for output in outputs)
