"""The code of the guides in docs/ runs, and has the effects that they describe."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem_testing import scripts

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def run_script(folder: Path, source: str) -> str:
    """Run `source` as a script in `folder`; return what it printed."""
    (folder / "script.py").write_text(source)
    done = scripts.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- A loop of your own ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loop_of_your_own_trains_in_two_processes_and_is_resumed_in_one(tmp_path):
    output = run_script(tmp_path, snippets("own-loop.md")[0])
    errors = [float(error) for error in re.findall(r"epoch \d: validation error (\S+)", output)]
    names = {"__name__": "own_loop"}
    exec(snippets("own-loop.md")[0], names)
    path = tmp_path / "own" / "last.ckpt"
    resumed = sg.Run(accelerator="cpu", devices=1, default_root_dir=tmp_path).launch(
        lambda run: names["train"](run, epochs=3, resume_from=path)
    )

    assert len(errors) == 2  # rank 0 alone prints
    assert resumed < errors[1] < errors[0]


def test_the_step_of_the_loop_of_your_own_skips_the_scheduler_where_fp16_overflows():
    names = {}
    exec(snippets("own-loop.md")[1], names)
    with sg.Run(precision={"name": "16-mixed", "init_scale": 64.0}, accelerator="cpu", devices=1) as run:
        model = nn.Linear(2, 1)
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        rates = []
        for factor in (float("inf"), 1.0):
            run.backward(model(torch.ones(1, 2)).sum() * factor)
            names["step"](run, optimizer, scheduler)
            rates.append(scheduler.get_last_lr()[0])

    assert rates == [1.0, 0.5]
