"""The end of a program is short, and still finalizes what a user could notice."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import atexit, contextlib, functools, gc, gzip, os, sys, weakref
import torch
import stratagem as sg

atexit.register(lambda: print("registered first: frozen", gc.get_freeze_count() > 0))

class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Cycle:
    def __init__(self, kept):
        self.kept, self.itself = kept, self

class Noticed:
    def __del__(self, write=os.write):  # sys.stdout is gone when cycles are collected
        write(1, b"deleted\\n")

def untracked():
    class Untracked:  # such a class is enough for nothing to be frozen: the collector does not list its objects
        __slots__ = ()
        def __del__(self, write=os.write):
            write(1, b"deleted\\n")

    return Untracked()

def generate(write=os.write):
    try:
        yield
    finally:
        write(1, b"deleted\\n")

def started():
    generator = generate()
    next(generator)
    return generator

class DeletedByAPartial:
    __del__ = functools.partial(os.write, 1, b"deleted\\n")

async def generate_async(write=os.write):
    try:
        yield
    finally:
        write(1, b"deleted\\n")

def started_async():
    generator = generate_async()
    with contextlib.suppress(StopIteration):
        generator.__anext__().send(None)
    return generator

class Lazy(type):
    def __getattribute__(cls, name):  # as classes whose library is not installed do
        raise ImportError(name)

class NotInstalled(metaclass=Lazy):
    pass

def unopened():
    try:
        return gzip.open("/does/not/exist.gz")
    except OSError as error:
        return error  # its traceback refers to a file without attributes

class Written:
    def __init__(self):
        self.file = open(sys.argv[1], "w")
        self.file.write("written")

if __name__ == "__main__":
    trainer = sg.Trainer(max_steps=1, accelerator="cpu", barebones=True, **{options})
    trainer.fit(Model(), [torch.randn(2, 4)])
    if trainer.is_global_zero:
        kept = {kept}
    atexit.register(lambda: print("registered last"))
    print("no newline at the end", end=" ")
"""


KEPT = ["Noticed()", "untracked()", "DeletedByAPartial()", "started()", "started_async()"]


def ended(tmp_path, kept: str, options: str = "{'devices': 1}") -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM).replace("{options}", options).replace("{kept}", kept))
    words = [sys.executable, str(script), str(tmp_path / "file")]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)


def output(tmp_path, kept: str, options: str = "{'devices': 1}") -> str:
    return ended(tmp_path, kept, options).stdout


@pytest.mark.slow
def test_a_program_ends_without_visiting_the_objects_of_torch(tmp_path):
    text = output(tmp_path, "[Cycle(1), generate(), weakref.finalize(trainer, print, 'finalized')]")

    lines = text.replace("no newline at the end ", "").splitlines()
    assert sorted(lines) == ["finalized", "registered first: frozen True", "registered last"]


@pytest.mark.every_push("started_async()")
@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_objects_with_finalizers_in_cycles_are_finalized(tmp_path, kept):
    text = output(tmp_path, f"Cycle({kept})")

    assert "registered first: frozen False\n" in text
    assert "deleted\n" in text


@pytest.mark.sweep(guard="tests/core/test_finalization.py::test_objects_with_finalizers_in_cycles_are_finalized")
@pytest.mark.slow
def test_an_object_with_del_that_a_global_name_holds_is_finalized_at_once(tmp_path):
    assert "deleted\n" in output(tmp_path, "Noticed()")


@pytest.mark.sweep(guard="tests/core/test_finalization.py::test_objects_with_finalizers_in_cycles_are_finalized")
@pytest.mark.slow
@pytest.mark.parametrize(("kept", "frozen"), [("NotInstalled()", True), ("NotInstalled", True), ("unopened()", False)])
def test_objects_that_cannot_be_asked_cause_no_error_at_the_end(tmp_path, kept, frozen):
    end = ended(tmp_path, kept)

    assert "Traceback" not in end.stderr
    assert f"registered first: frozen {frozen}\n" in end.stdout


@pytest.mark.sweep(guard="tests/core/test_finalization.py::test_objects_with_finalizers_in_cycles_are_finalized")
@pytest.mark.slow
def test_an_open_file_in_a_cycle_is_written(tmp_path):
    assert "registered first: frozen False\n" in output(tmp_path, "Cycle(Written())")
    assert (tmp_path / "file").read_text() == "written"


@pytest.mark.every_push("ddp_fork")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn"])
def test_every_process_that_has_trained_ends_so(tmp_path, strategy):
    text = output(tmp_path, "None", f"{{'devices': 2, 'strategy': {strategy!r}}}")

    ending = 2 if strategy == "ddp" else 1  # multiprocessing calls no handlers of atexit that the script registered
    assert text.count("registered first: frozen True") >= ending
    assert "frozen False" not in text
    assert text.count("registered last") == ending
