"""`--assume`: values that a plan takes where a step asks for the value of a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import stratagem
from plan.test_plan import plan, write
from stratagem.errors import ConfigError
from stratagem_plan.assumptions import Assumptions, check, read

STEP = """
class M(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def training_step(self, batch):
        count = int((batch > 0).sum())
        rows = self.layer(batch.new_zeros(count, 4)); print(f"{rows.mean():.3f} of {rows}")
        return rows.mean() if batch.any() and float(rows.sum()) > 0.5 else self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
sg.Trainer(max_steps=5, enable_progress_bar=False).fit(M(), torch.utils.data.DataLoader(torch.zeros(20, 4)))
"""


def rows_of(tree):
    """Return the rows of the products of matrices in forward."""
    return sorted(
        each["m"] for each in tree["classes"][0]["work"] if each["kind"] == "matmul" and each["phase"] == "forward"
    )


def test_a_step_that_asks_for_values_is_planned_with_those_that_are_assumed(tmp_path):
    script = write(tmp_path, STEP)
    count, branch = ("--assume", "train.py:9=12"), ("--assume", f"{tmp_path.name}/train.py:11=0.25")
    count += ("--assume", "train.py:10=2")
    code, _, said = plan(tmp_path, *count, script=script)
    assert code == 3
    assert "train.py:11 (return rows.mean()" in said
    assert "`--assume train.py:11=VALUE`, or assume={'train.py:11': VALUE}" in said

    code, tree, said = plan(tmp_path, *count, *branch, script=script)
    assert code == 0, said
    assert rows_of(tree) == [1, 12]
    assert tree["assumptions"][-4:] == [
        f"{script}:9 is taken to be 12", f"{script}:10 is taken to be 2.0", f"{script}:11 is taken to be True", f"{script}:11 is taken to be 0.25",
    ]  # fmt: skip


def test_an_assumption_that_nothing_asks_for_is_an_error(tmp_path):
    lines = ("9=12", "10=2", "11=1", "8=5")
    words = (word for line in lines for word in ("--assume", f"train.py:{line}"))
    code, tree, said = plan(tmp_path, *words, script=write(tmp_path, STEP))

    assert (code, tree) == (1, None)
    assert "train.py:8 is assumed to be 5, and no step asks for the value of a tensor there" in said


@pytest.mark.parametrize(("path", "value"), [("folder/train.py", 1.0), (stratagem.__file__, None)])
def test_what_a_plugin_asks_is_not_answered(path, value):
    """Such as whether gradients have overflowed: the answer decides what is sent."""
    names = {}
    exec(compile("def ask(assumptions, tensor): return assumptions.value_of(tensor)", path, "exec"), names)
    assumptions = Assumptions({f"{Path(path).name}:1": 1})

    assert names["ask"](assumptions, torch.zeros(())) == value
    assert len(assumptions.used) == (value is not None)


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("train.py:30=12", "train.py:30", 12),
        ("a=b/t.py:3=-1.5e3", "a=b/t.py:3", -1500.0),
        ("t.py:3=True", "t.py:3", True),
    ],
)
def test_assumptions_are_read(text, place, value):
    assert read([text]) == {place: value}


@pytest.mark.parametrize(
    "text", ["train.py:30", "train.py=12", "train.py:x=12", "train.py:30=word", "train.py:30=[1]", "t.py:3="]
)
def test_assumptions_of_another_form_are_refused(text):
    with pytest.raises(ConfigError, match="--assume is .*expected a file, a line and a value"):
        read([text])
    with pytest.raises(ConfigError, match="assume has 'train.py:30': 'word'"):
        check({"train.py:30": "word"})
