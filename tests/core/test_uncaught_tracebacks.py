"""An uncaught error in the user's program is printed below the frames of the user's code alone."""

from __future__ import annotations

import json
import os
import sys

import pytest

from programs import scripts
from stratagem.distributed import uncaught_errors

SCRIPT = """
import stratagem as sg
from stratagem_testing.reference import Net, joined_batches


class Logs(Net):
    def training_step(self, batch, batch_idx):
        {line}
        return super().training_step(batch, batch_idx)


def main():
    trainer = sg.Trainer({options} max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Logs(), joined_batches(2, 8))


main()
"""


def printed(tmp_path, line="self.log('x', 'text')", options="", **variables):
    (tmp_path / "train.py").write_text(SCRIPT.format(line=line, options=options))
    done = scripts.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "frames", "message"),
    [
        ({}, ["<module>", "main", "training_step"], "ConfigError: log('x') got 'text'"),
        ({"options": 'strategy="dpp",'}, ["<module>", "main"], "PluginError: strategy 'dpp' is unknown"),
    ],
)
def test_frames_are_the_users(tmp_path, arguments, frames, message):
    error = printed(tmp_path, **arguments)

    assert [line.rpartition(" in ")[2] for line in error.splitlines() if line.startswith("  File ")] == frames
    assert message in error.splitlines()[-1]


def test_a_variable_shows_all_frames(tmp_path):
    assert "stratagem_trainer" in printed(tmp_path, STRATAGEM_FULL_TRACEBACK="1")


def test_an_error_of_another_kind_keeps_all_frames(tmp_path):
    error = printed(tmp_path, line="1 / 0")

    assert "stratagem_trainer" in error
    assert error.splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_torchruns_file_has_the_sentence_or_the_whole_traceback(tmp_path):
    file = tmp_path / "error.json"
    variables = {"TORCHELASTIC_ERROR_FILE": str(file)}
    error = printed(tmp_path, options='strategy="dpp",', **variables)
    told = json.loads(file.read_text())["message"]

    assert error.startswith("PluginError in main (")
    assert error.count("\n") == 1
    assert told["message"] == error.rstrip("\n")
    assert told["extraInfo"].keys() == {"timestamp"}
    file.unlink()
    error = printed(tmp_path, line="1 / 0", **variables)
    told = json.loads(file.read_text())["message"]
    assert error.splitlines()[-1] == told["message"] == "ZeroDivisionError: division by zero"
    assert "in training_step" in told["extraInfo"]["py_callstack"]
    file.write_text("of record")
    assert "Traceback" in printed(tmp_path, line="1 / 0", **variables)
    assert file.read_text() == "of record"
    assert printed(tmp_path, options='strategy="dpp",', **variables | {"RANK": "1"}) == ""


def _end(error):
    sys.excepthook(type(error), error, error.__traceback__)


@pytest.fixture
def told(monkeypatch):
    """What is told of errors, in order; the program has no hook of its own."""
    told = []
    monkeypatch.setattr(sys, "__excepthook__", lambda kind, error, trace: told.append("printed"))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(uncaught_errors, "_hooks", {})
    return told


def test_listeners_are_asked_newest_first_and_each_once(told):
    def first(error, print_error):
        told.append("first")
        print_error()

    def second(error, print_error):
        print_error()
        told.append("second")

    for listener in (first, second, first):
        uncaught_errors.listen(listener)
    _end(ValueError())

    assert told == ["first", "printed", "second"]


def test_a_listener_may_keep_an_error_from_being_printed(told):
    uncaught_errors.listen(lambda error, print_error: print_error())
    uncaught_errors.listen(lambda error, print_error: told.append(str(error)))
    _end(ValueError("told elsewhere"))

    assert told == ["told elsewhere"]


@pytest.mark.parametrize("beside_programs", [True, False])
def test_what_listens_says_whether_it_acts_beside_a_hook_of_the_program(told, beside_programs):
    sys.excepthook = lambda kind, error, trace: told.append("the program's")
    uncaught_errors.listen(
        lambda error, print_error: (told.append("heard"), print_error()), beside_programs=beside_programs
    )
    _end(ValueError())

    assert told == ["heard", "the program's"][not beside_programs :]


def test_a_hook_that_wraps_ours_as_torchs_does_is_not_heard_twice(told):
    def listener(error, print_error):
        told.append("heard")
        print_error()

    uncaught_errors.listen(listener)
    wrapped = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (told.append("wrapper"), wrapped(kind, error, trace))
    uncaught_errors.listen(listener)
    _end(ValueError())

    assert told == ["wrapper", "heard", "printed"]
