"""The matrix tells the truth: a "no" is refused before any process starts, a "yes" trains, saves and resumes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem.stack import registry
from stratagem_devtools.matrix import AXES, cells, names, render_html, render_markdown
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, train, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

ROOT = Path(__file__).parents[2]
OURS = {path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml")}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}

#: Other names of the same classes, with options set, are in tests/conformance/test_presets.py.
EVERY = cells()
YES = [cell for cell in EVERY if cell.reason is None]
NO = [cell for cell in EVERY if cell.reason is not None]


def pairs(cell):
    """Every two of the cell's choices."""
    return set(itertools.combinations([(axis, getattr(cell, axis)) for axis in AXES], 2))


def all_pairs(candidates):
    """Return few of `candidates` that together hold every pair of choices that any of them holds."""
    left, chosen = set().union(*(pairs(cell) for cell in candidates)), []
    while left:
        best = max(candidates, key=lambda cell: len(pairs(cell) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen


FEW = all_pairs(YES)
REASONS = {cell.reason: [other for other in NO if other.reason == cell.reason] for cell in NO}
#: Each rank goes its own way with it, which is what it is for.
DRIFTS = "noop"
#: In eight steps these have sent little, or nothing: how far that may lead.
FAR = {"noop": 0.5, "topk": 0.3}


def title(cell):
    return "-".join(str(getattr(cell, axis)) for axis in AXES)


# --- No ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: title(REASONS[reason][0]))
def test_no_is_refused_before_any_process_starts(reason, monkeypatch):
    def started(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen.__init__", started)
    monkeypatch.setattr("os.fork", started)
    for cell in REASONS[reason]:
        with pytest.raises(StratagemError, match=re.escape(reason)):
            sg.Trainer(**cell.arguments, **QUIET)


def test_every_reason_is_a_sentence_that_names_both_sides():
    for reason in REASONS:
        both = r"\w+ '[\w-]+' (needs|cannot be used with) .*|hook '\w+' is answered by \w+ .* and by \w+ .*"
        assert re.match(rf"({both}|comm_hook\.\w+\.\w+ is not set; expected .*)\.$", reason), reason


# --- Yes ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cell", FEW, ids=title)
def test_yes_of_every_pair_works(cell, tmp_path):
    works(cell, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("cell", YES, ids=title)
def test_yes_works(cell, tmp_path):
    works(cell, tmp_path)


def works(cell, folder):
    """Train four batches, save, resume in new processes, four more; near fp32 and the same on all ranks."""
    batches = joined_batches(8, 24)
    first = run_in_processes(_first_half, cell.world_size, cell.arguments, batches[:4], folder / "half.ckpt")
    second = run_in_processes(_second_half, cell.world_size, cell.arguments, batches[4:], folder / "half.ckpt")

    used = [batches[index] for index in first[0]["used"]] + batches[4:]
    if len(used) == 8:  # an overflow in the second half would not be told
        tolerance = tolerance_of(sg.Run(precision=cell.precision, accelerator="cpu").context.policy)
        assert relative_difference(second[0], train_module_plainly(Net(), used)[0]) < FAR.get(
            cell.comm_hook, max(tolerance, 2e-2)
        )
    if cell.comm_hook != DRIFTS:
        assert all(torch.equal(weights[name], second[0][name]) for weights in second for name in weights)
    assert all(torch.isfinite(tensor).all() for tensor in second[0].values())


def _first_half(rank, size, arguments, batches, path):
    saving = {"callbacks": [_Saves(path)]}
    return train(rank, size, Net, batches, {**QUIET, **arguments, **saving})


def _second_half(rank, size, arguments, batches, path):
    trainer = sg.Trainer(max_epochs=2, **(QUIET | arguments))
    trainer.fit(Net(seed=3), share(trainer, batches), ckpt_path=path)
    return weights_of(trainer)


class _Saves(sg.Callback):
    def __init__(self, path):
        self.path = path

    @sg.hookimpl
    def on_train_end(self, trainer):
        trainer.save_checkpoint(self.path)


def test_the_selection_holds_every_pair():
    assert set().union(*map(pairs, FEW)) == set().union(*map(pairs, YES))
    assert len(FEW) < len(YES)


# --- To look at --------------------------------------------------------------------------------------------------


def first_party(entry):
    return any(f'name = "{entry.distribution}"' in (path / "pyproject.toml").read_text() for path in OURS)


@pytest.mark.slow
def test_the_docs_show_the_matrix_as_it_is():
    assert render_markdown(cells(only=first_party)) in (ROOT / "docs" / "matrix.md").read_text()


def test_the_page_has_every_combination_and_reason(tmp_path):
    page = render_html(EVERY)

    assert page.count('<td class="yes"') == len(YES)
    assert page.count('<td class="no" title="') == len(NO)
    assert page.count("<li id=") == len({cell.reason for cell in NO})
    assert len(re.findall('<a href="#reason-', page)) == len(NO)
    assert set(re.findall(r'data-strategy="([^"]+)"', page)) == {cell.strategy for cell in EVERY}
    assert "@" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("stratagem@", "")


def test_aliases_are_one_plugin_and_presets_are_left_out():
    known = {entry.name for entry in registry.entries("precision")}
    shown = {cell.precision for cell in EVERY}

    assert {"16", "16-mixed"} <= known
    assert "16" not in shown
    assert {cell.strategy for cell in EVERY} < set(names("strategy", True, lambda _: True))
