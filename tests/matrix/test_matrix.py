"""The matrix tells the truth: a "no" is refused before any process starts, a "yes" trains, saves and resumes."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

import stratagem as sg
from stratagem.discovery import registry
from stratagem.errors import StratagemError
from stratagem_devtools.matrix import AXES, cells, names, render_html, render_markdown
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, train, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

ROOT = Path(__file__).parents[2]
OURS = {path.parent for path in [*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "contrib" / "dp" / "pyproject.toml"]}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}

#: Other names of the same classes, with options set, are in tests/conformance/test_presets.py.
STRATEGIES = names("strategy", False, lambda _: True)
#: Each rank goes its own way with it, which is what it is for.
DRIFTS = "noop"
#: In eight steps these have sent little, or nothing: how far that may lead.
FAR = {"noop": 0.5, "topk": 0.3}


@functools.cache
def every():
    """Return all cells. Resolving them takes ten seconds, so only the worker that runs these tests does it."""
    with pytest.MonkeyPatch.context() as patch:
        no_process_starts(patch)
        return cells()


def yes(strategy=None):
    return [cell for cell in every() if cell.reason is None and strategy in (None, cell.strategy)]


def no(strategy=None):
    return [cell for cell in every() if cell.reason is not None and strategy in (None, cell.strategy)]


def no_process_starts(patch):
    def started(*_, **__):
        raise AssertionError("a process was started")

    patch.setattr("subprocess.Popen.__init__", started)
    patch.setattr("os.fork", started)


def choices(cell, count):
    """Return every `count` of the cell's choices."""
    return set(itertools.combinations([(axis, getattr(cell, axis)) for axis in AXES], count))


def covering(candidates, count):
    """Return few of `candidates` that together hold every `count` of choices that any of them holds."""
    left, chosen = set().union(*(choices(cell, count) for cell in candidates)), []
    while left:
        best = max(candidates, key=lambda cell: len(choices(cell, count) & left))
        chosen.append(best)
        left -= choices(best, count)
    return chosen


@functools.cache
def few():
    """Return few of the cells that work, which together hold every pair of choices."""
    return covering(yes(), 2)


def title(cell):
    return "-".join(str(getattr(cell, axis)) for axis in AXES)


# --- No ----------------------------------------------------------------------------------------------------------


@pytest.mark.every_push("async_averaging", "deepspeed", "parallel")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_is_refused_before_any_process_starts(strategy, monkeypatch):
    """The resolver has refused each cell in `every`; a Trainer refuses for the same reason, whatever is chosen."""
    by_reason = {}
    for cell in no(strategy):
        by_reason.setdefault(cell.reason, []).append(cell)
    no_process_starts(monkeypatch)
    for reason, refused in by_reason.items():
        for cell in covering(refused, 1):
            with pytest.raises(StratagemError, match=re.escape(reason)):
                sg.Trainer(**cell.arguments, **QUIET)


def test_every_reason_is_a_sentence_that_names_both_sides():
    for reason in {cell.reason for cell in no()}:
        both = r"\w+ '[\w-]+' (needs|cannot be used with) .*|hook '\w+' is answered by \w+ .* and by \w+ .*"
        assert re.match(rf"({both}|comm_hook\.\w+\.\w+ is not set; expected .*)\.$", reason), reason


# --- Yes ---------------------------------------------------------------------------------------------------------


@pytest.mark.when_changed("plugins/deepspeed/", cases=("deepspeed-first half",))
@pytest.mark.every_push("ddp2-first half", "decentralized-first half", "deepspeed-first half")
@pytest.mark.parametrize("half", [0, 1], ids=["first half", "second half"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_yes_of_every_pair_works(strategy, half, tmp_path):
    work([cell for cell in few() if cell.strategy == strategy][half::2], tmp_path)


@pytest.mark.sweep(guard="tests/matrix/test_matrix.py::test_yes_of_every_pair_works")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_yes_works(strategy, tmp_path):
    work(yes(strategy), tmp_path)


def work(chosen, folder):
    """Check that each of `chosen`, cells of one strategy, trains, saves, resumes in new processes, and trains on.

    All cells train in the same processes, one after the other, and resume in the same new ones.
    """
    batches, (size,) = joined_batches(8, 24), {cell.world_size for cell in chosen}
    first = run_in_processes(_each, size, _first_half, chosen, batches[:4], folder, limit_s=1800)
    second = run_in_processes(_each, size, _second_half, chosen, batches[4:], folder, limit_s=1800)
    for index, cell in enumerate(chosen):
        check(cell, batches, first[0][index]["used"], [results[index] for results in second])


def check(cell, batches, used, weights_of_ranks):
    """The weights are near those of fp32, and the same on all ranks."""
    weights, used = weights_of_ranks[0], [batches[index] for index in used] + batches[4:]
    if len(used) == 8:  # an overflow in the second half would not be told
        tolerance = tolerance_of(sg.Run(precision=cell.precision, accelerator="cpu").policy)
        assert relative_difference(weights, train_module_plainly(Net(), used)[0]) < FAR.get(
            cell.comm_hook, max(tolerance, 2e-2)
        ), title(cell)
    if cell.comm_hook != DRIFTS:
        assert all(torch.equal(other[name], weights[name]) for other in weights_of_ranks for name in weights), title(
            cell
        )
    assert all(torch.isfinite(tensor).all() for tensor in weights.values()), title(cell)


def _each(rank, size, half, chosen, batches, folder):
    """Return what `half` returns for each of the cells; an error has the cell's title."""
    found = []
    for number, cell in enumerate(chosen):
        try:
            found.append(half(rank, size, cell.arguments, batches, folder / f"{number}.ckpt"))
        except Exception as error:
            error.add_note(f"in {title(cell)}")
            raise
    return found


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
    def pairs(chosen):
        return set().union(*(choices(cell, 2) for cell in chosen))

    assert pairs(few()) == pairs(yes())
    assert len(few()) < len(yes())


# --- To look at --------------------------------------------------------------------------------------------------


def first_party(entry):
    return any(f'name = "{entry.distribution}"' in (path / "pyproject.toml").read_text() for path in OURS)


def with_plugins(only):
    """Return the cells whose plugins are all among those for which `only` returns True."""
    kept = {axis: {None, *names(axis, True, only)} for axis in AXES}
    return [cell for cell in every() if all(getattr(cell, axis) in kept[axis] for axis in AXES)]


@pytest.mark.slow
def test_the_docs_show_the_matrix_as_it_is():
    assert render_markdown(with_plugins(first_party)) in (ROOT / "docs" / "matrix.md").read_text()


def test_plugins_can_be_left_out():
    def only(entry):
        return first_party(entry) and entry.name in ("ddp", "deepspeed", "32-true", "16-mixed", "topk", "full")

    assert cells(only=only) == with_plugins(only)
    assert {cell.strategy for cell in with_plugins(only)} == {"ddp", "deepspeed"}


def test_the_page_has_every_combination_and_reason(tmp_path):
    page = render_html(every())

    assert page.count('<td class="yes"') == len(yes())
    assert page.count('<td class="no" title="') == len(no())
    assert page.count("<li id=") == len({cell.reason for cell in no()})
    assert len(re.findall('<a href="#reason-', page)) == len(no())
    assert set(re.findall(r'data-strategy="([^"]+)"', page)) == {cell.strategy for cell in every()}
    assert "@" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).replace("stratagem@", "")


def test_aliases_are_one_plugin_and_presets_are_left_out():
    known = {entry.name for entry in registry.entries("precision")}
    shown = {cell.precision for cell in every()}

    assert {"16", "16-mixed"} <= known
    assert "16" not in shown
    assert {cell.strategy for cell in every()} < set(names("strategy", True, lambda _: True))
