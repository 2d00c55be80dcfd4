"""The figures and the code of docs/choosing-a-strategy.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem_testing.reference import Net, joined_batches

PAGE = (Path(__file__).parents[2] / "docs" / "choosing-a-strategy.md").read_text()


@pytest.mark.slow
def test_the_snippets_about_choosing_a_strategy_run(tmp_path):
    samples = [(x, y) for x, y in zip(*joined_batches(1, 32)[0], strict=True)]
    names = {
        "sg": sg, "folder": tmp_path, "model": Net(), "samples": samples, "DataLoader": torch.utils.data.DataLoader,
    }  # fmt: skip
    computing, loading = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(computing, names)
    exec(loading.replace("sg.Trainer(", 'sg.Trainer(accelerator="cpu", '), names)

    assert names["trainer"].global_step == 4
    rows = re.findall(r"^\| ([\d.]+) ([MB]) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for number, unit, row in rows:
        size = float(number) * {"M": 1e6, "B": 1e9}[unit]
        computed = [names["gigabytes"](size, 8, f, g, s) for f, g, s in ((0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1))]
        assert [float(cell) for cell in row.split("|")] == pytest.approx(computed, abs=0.051)
