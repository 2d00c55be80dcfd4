"""Training in a real Jupyter kernel: one kernel for all of these cells, as in a long session of a user."""

from __future__ import annotations

import os
import re
import textwrap
import threading
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from kernels import kernel
from ports import free_port

pytestmark = pytest.mark.xdist_group("notebook")

PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"
LIMIT_S = 180

SETUP = """
    import os, sys, time
    from pathlib import Path
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import stratagem
    from stratagem_testing.reference import Net, joined_batches, relative_difference, train_plainly

    batches = joined_batches(10, 16)
    tensors = [torch.cat(parts) for parts in zip(*batches)]

    class Model(Net):
        "Of the notebook: no other program can import it."

        def __init__(self, at_step=None):
            super().__init__()
            self.at_step = at_step

        def training_step(self, batch, batch_idx):
            if self.at_step is not None and batch_idx == 2:
                self.at_step(self.global_rank)
            return super().training_step(batch, batch_idx)

    def loader(batch_size=8):
        return DataLoader(TensorDataset(*tensors), batch_size)

    def trainer_of(**arguments):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        return stratagem.Trainer(**(quiet | {"accelerator": "cpu"} | arguments))

    def fit(epochs=1, at_step=None, **arguments):
        trainer, model = trainer_of(max_epochs=epochs, **arguments), Model(at_step)
        trainer.fit(model, loader(16 // arguments.get("devices", 1)))
        reference, norms = train_plainly(batches * epochs)
        print("TRAINED", trainer.world_size, relative_difference(model.state_dict(), reference) < 1e-6, max(norms) > 1)
        return trainer, model
"""


class Notebook:
    """A kernel, and the cells to execute in it."""

    def __init__(self, folder):
        self.manager = kernel(KernelManager, folder)
        self.manager.start_kernel(cwd=str(folder))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)
        self.run(SETUP)

    def execute(self, cell, interrupt_when=None):
        """Execute `cell`; return its output, and the error as Jupyter shows it ("" if there is none)."""
        texts = []

        def collect(message):
            if message["header"]["msg_type"] == "stream":
                texts.append(message["content"]["text"])

        if interrupt_when is not None:
            threading.Thread(target=self._interrupt, args=(interrupt_when,), daemon=True).start()
        reply = self.client.execute_interactive(textwrap.dedent(cell), timeout=LIMIT_S, output_hook=collect)
        content = reply["content"]
        error = f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""
        return "".join(texts), error

    def run(self, cell):
        """Execute `cell`, which must succeed; return its output."""
        output, error = self.execute(cell)
        assert not error, f"{error}\n{output}"
        return output

    def _interrupt(self, path):
        """Do what the button does, as soon as `path` exists."""
        deadline = time.monotonic() + LIMIT_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.manager.interrupt_kernel()

    def processes(self):
        """Return the ids of the processes that the kernel has started and that still run."""
        pid = self.manager.provisioner.pid
        text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        return text.split()

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    yield notebook
    notebook.close()


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_notebook", "fsdp"])
def test_it_trains_as_one_process(notebook, strategy):
    assert "TRAINED 2 True True" in notebook.run(f"_ = fit(strategy={strategy!r}, devices=2)")


def test_two_fits_and_then_a_test_with_one_trainer(notebook):
    output = notebook.run("""
        trainer, model = fit(strategy="auto", devices=2)
        trainer.max_epochs = 2
        trainer.fit(model, loader())
        print("AGAIN", relative_difference(model.state_dict(), train_plainly(batches * 2)[0]) < 1e-6, trainer.global_step)
        print("TESTED", trainer.test(model, loader())[0]["test_loss"] > 0)
    """)

    assert "TRAINED 2 True True" in output
    assert "AGAIN True 20" in output
    assert "TESTED True" in output


def test_the_snippet_of_the_page_runs(notebook):
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    notebook.run("model, batches, kept = Model(), loader(), batches")

    assert "2 processes on cpu" in notebook.run(snippet)
    notebook.run("batches = kept")


def test_the_script_of_the_readme_runs_as_a_cell(notebook):
    script = re.search(r"```python\n(.*?)```", (PAGE.parents[1] / "README.md").read_text(), re.DOTALL)[1]
    output = notebook.run(script)
    lines, losses = output.splitlines(), re.findall(r"train_loss ([\d.]+)", output)
    notebook.run("del Regression, x, loader, trainer\n" + textwrap.dedent(SETUP))

    assert lines[1] == "the processes are forks of this notebook's kernel: a notebook has no script to run again"
    assert lines[2] == "2 processes on cpu, effective batch size 64"
    assert lines[-2] == "training ended at step 12: max_epochs=3 is reached"
    assert float(losses[-1]) < float(losses[0]) / 2  # a first curve that falls


def test_devices_may_be_left_out(notebook):
    assert "TRAINED 1 True True" in notebook.run("_ = fit()")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_ends_all_ranks_and_the_next_cell_trains(notebook, rank):
    _, error = notebook.execute(f"""
        def fail(rank):
            if rank == {rank}:
                raise ValueError("out of order")
        fit(at_step=fail, strategy="auto", devices=2)
    """)

    assert re.match(f"LaunchError: rank {rank} failed with ValueError: out of order", error)
    assert notebook.processes() == []
    assert "TRAINED 2 True True" in notebook.run('_ = fit(strategy="auto", devices=2)')


def test_an_interrupt_ends_all_ranks_and_the_next_cell_trains(notebook, tmp_path):
    _, error = notebook.execute(
        f"""
        def wait(rank):
            if rank == 0:
                Path({str(tmp_path / "here")!r}).touch()
            time.sleep(600)
        fit(at_step=wait, strategy="auto", devices=2)
        """,
        interrupt_when=tmp_path / "here",
    )

    assert error.startswith("KeyboardInterrupt")
    assert notebook.processes() == []
    assert "TRAINED 2 True True" in notebook.run('_ = fit(strategy="auto", devices=2)')


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('strategy="ddp_spawn"', r"ConfigError: .*Model.* is defined in a notebook"),
        ('launcher="subprocess"', 'ConfigError: .*no file to run again.* pass launcher="fork"'),
        (
            'launcher="subprocess", strategy="ddp_notebook"',
            "ConfigError: launcher 'subprocess' was chosen and .* 'fork'",
        ),
    ],
)
def test_a_launcher_that_cannot_work_names_what_works(notebook, arguments, found):
    _, error = notebook.execute(f"fit(devices=2, {arguments})")

    assert re.match(found, error, re.DOTALL), error
    assert notebook.processes() == []


def test_an_address_that_an_earlier_fit_left_in_the_kernel_is_used_again(notebook):
    port = free_port()
    output = notebook.run(f"""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
        _ = fit(strategy="auto", devices=2)
        _ = fit(strategy="auto", devices=2)
        del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    """)

    assert output.count("TRAINED 2 True True") == 2


def test_the_kernel_keeps_its_environment(notebook):
    """A fit leaves no variables with which the next one would take itself for a launched process."""
    output = notebook.run("""
        before = dict(os.environ)
        _ = fit(strategy="auto", devices=2)
        print("CHANGED", sorted(name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)))
    """)

    assert "CHANGED []" in output
    assert os.environ.get("LOCAL_RANK") is None
