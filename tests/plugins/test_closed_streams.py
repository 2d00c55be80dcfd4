"""A program that was started without standard output, error or input trains as any other, and prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, sys
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    if __name__ == "__main__":
        trainer = sg.Trainer(
            strategy={strategy!r}, devices={devices}, accelerator="cpu", max_epochs=1, callbacks={callbacks!r},
            enable_model_summary=True,
        )
        print("before")
        trainer.fit(Net(), joined_batches(3, 8))
        trainer.print("after")
        assert not any(map(os.path.isfile, (f"/dev/fd/{{number}}" for number in range(3)))), "a file took its number"
        open("done", "w").close()
"""


def _run(tmp_path, shell_words, *words):
    quoted = " ".join(f"'{word}'" for word in (sys.executable, *words))
    return subprocess.run(
        ["sh", "-c", f"exec {quoted} {shell_words}"], cwd=tmp_path, capture_output=True, text=True, timeout=360,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.every_push("all of ddp_fork")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "strategy", "callbacks"),
    [
        (">&-", "auto", []), ("2>&-", "auto", ["tqdm"]), ("<&- >&- 2>&-", "auto", ["tqdm"]),
        ("<&- >&- 2>&-", "ddp_fork", []), ("<&- >&- 2>&-", "ddp", []),
    ],
    ids=["output", "errors", "all", "all of ddp_fork", "all of ddp"],
)  # fmt: skip
def test_training_needs_no_standard_streams(tmp_path, closed, strategy, callbacks):
    devices = 2 if strategy.startswith("ddp") else 1
    (tmp_path / "program.py").write_text(
        textwrap.dedent(PROGRAM.format(strategy=strategy, devices=devices, callbacks=callbacks))
    )
    done = _run(tmp_path, closed, "program.py")

    assert (done.returncode, (tmp_path / "done").exists()) == (0, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.every_push("plugins list")
@pytest.mark.parametrize(
    "words", [["plugins", "list"], ["plugins", "show", "no-such-plugin"], ["--version"]], ids=" ".join
)
def test_commands_need_no_standard_streams(tmp_path, words):
    done = _run(tmp_path, ">&- 2>&-", "-m", "stratagem", *words)

    assert done.returncode == (1 if "no-such-plugin" in words else 0)
