"""`stratagem demo` trains in two processes, writes, and goes on when it is run again."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from programs import scripts
from stratagem_demo import gpt

ROOT = Path(__file__).parents[2]

#: The program with a smaller model and shorter windows, so that its validation and its text take no seconds.
SMALL = """
import sys
from stratagem.cli import main
from stratagem_demo import gpt

gpt.CONTEXT = 16
gpt.GPT.__init__.__defaults__ = (16, 1, 2, 500)
sys.exit(main(sys.argv[1:]))
"""


def demo(folder):
    (folder / "small.py").write_text(SMALL)
    command = [sys.executable, "small.py", "demo", "--steps", "4", "--batch-size", "4", "--precision", "32-true"]
    return scripts.run(
        [*command, "--devices", "2"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_demo_runs_and_resumes(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stderr
    assert "2 processes on cpu, effective batch size 8" in first.stdout
    assert "after 4 steps; generated text" in first.stdout
    assert re.search(
        r"^validation perplexity: \d+ at step 1, \d+ at step 2, \d+ at step 4$", first.stdout, re.MULTILINE
    )
    assert "demo_run: saved at the end and on Ctrl-C\n" in first.stdout
    assert "The Python language" in first.stdout
    assert re.search(r"^4 steps, about \d+ s; then it generates text$", first.stdout, re.MULTILINE)
    assert first.stdout.count("training a GPT") == 1
    after = first.stdout.partition("next:\n")[2].splitlines()
    assert [line.split()[:2] for line in after] == [["stratagem", "demo"]] * 2 + [["stratagem", "plugins"]]
    assert (tmp_path / "demo_run/stratagem_logs/version_0/metrics.csv").read_text().count("\n") >= 5
    assert "twice" not in first.stderr
    drawn = (ROOT / "docs" / "pictures" / "demo.svg").read_text()
    shown = re.sub(r"\d+", "0", " ".join(re.findall(r"<text[^>]*>(.*)</text>", drawn)))
    printed = [re.sub(r"\d+", "0", line)[:14] for line in first.stdout.partition("generated text")[0].splitlines()]
    assert [line for line in printed if line not in shown] == [], (
        "draw docs/pictures/demo.svg again: scripts/terminal.py"
    )

    second = demo(tmp_path)
    assert second.returncode == 0, second.stderr
    assert "continuing from the checkpoints" in second.stdout
    assert "after 8 steps; generated text" in second.stdout


def test_tokens_are_frequent_words_and_characters():
    vocabulary = gpt.words_and_characters("a list of a list, a map", num_words=3)
    tokens = gpt.encode("a list, a mast", vocabulary)

    assert {" a", " list"} <= set(vocabulary)
    assert [vocabulary[token] for token in tokens] == ["a", " list", ",", " a", " ", "m", "a", "s", "t"]


def test_the_manual_is_sentences():
    lines = gpt.manual().splitlines()

    assert len(lines) > 1000
    assert all(line[0].isupper() and line[-1] in ".:" and not set(line) & set("_=|*[]") for line in lines)


def test_the_perplexity_is_shown_at_three_steps():
    validations = [(33, 216.4), (66, 90.0), (99, 55.0), (100, 54.6), (100, 54.6)]

    assert gpt.progress(validations) == "validation perplexity: 216 at step 33, 90 at step 66, 55 at step 100"
    page = Path(__file__).parents[2] / "plugins/tools/README.md"
    assert f"\n    {gpt.progress([(33, 138.2), (66, 57.4), (100, 47.1)])}\n" in page.read_text()
    assert gpt.progress(validations[:1]) == "validation perplexity: 216 at step 33"


def test_the_model_of_the_demo_learns_the_next_token():
    text = gpt.manual()
    vocabulary = gpt.words_and_characters(text)
    model = gpt.GPT(vocabulary)
    train, _ = gpt.loaders(text, vocabulary, batch_size=4)
    batch = next(iter(train))
    (optimizer, _) = model.configure_optimizers().values()
    losses = []
    for _ in range(4):
        loss = model.loss(batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert batch[0].shape == (4, gpt.CONTEXT)
    assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])
    assert losses[0] == pytest.approx(math.log(len(vocabulary)), rel=0.05)  # that of a guess
    assert losses[-1] < losses[0]
    assert len(gpt.encode(model.generate("The", length=3), vocabulary)) >= 3


@pytest.mark.sweep(guard="tests/plugins/test_demo.py::test_the_demo_runs_and_resumes")
@pytest.mark.slow
def test_ctrl_c_before_the_first_save_loses_nothing(tmp_path):
    command = [sys.executable, "-u", "-m", "stratagem", "demo", "--steps", "100000", "--batch-size", "2"]
    process = scripts.Popen(
        [*command, "--precision", "32-true", "--devices", "2"], cwd=tmp_path, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 360
        while not list(tmp_path.glob("demo_run/stratagem_logs/*/")) and time.monotonic() < deadline:  # after 10 steps
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    assert "saved every 250 steps, at the end and on Ctrl-C" in said
    assert process.returncode != 0
    saved = re.search(r"continue with `stratagem demo` from (\S+) \(step \d+\)", said)
    assert saved is not None, said
    assert (tmp_path / saved[1]).exists()


def test_the_number_of_steps_follows_from_the_speed(monkeypatch):
    vocabulary = "abc"
    for seconds, steps in ((0.01, 250), (0.5, 150), (60.0, 20)):
        monkeypatch.delenv("STRATAGEM_DEMO_MEASURED", raising=False)
        monkeypatch.setattr(gpt, "_seconds", lambda model, mixed, batch_size, seconds=seconds: seconds * (2 - mixed))
        assert gpt.measured(gpt.GPT(vocabulary), None, None, 32) == ("bf16-mixed", steps, seconds)
        # The processes that this one starts read what it has measured.
        assert gpt.measured(gpt.GPT(vocabulary), None, None, 32)[1] == steps
    monkeypatch.delenv("STRATAGEM_DEMO_MEASURED")
    assert gpt.measured(gpt.GPT(vocabulary), "32-true", 7, 32)[:2] == ("32-true", 7)
    monkeypatch.delenv("STRATAGEM_DEMO_MEASURED")


def test_durations_are_in_words():
    assert [gpt.minutes(seconds) for seconds in (0.2, 20, 55, 80, 200)] == [
        "1 s", "20 s", "1 minute", "1 minute", "3 minutes",
    ]  # fmt: skip


def test_the_demo_announces_no_more_than_it_does(tmp_path):
    arguments = (gpt.GPT("ab"), 1000, 500, 0.1, tmp_path)

    limited = gpt.plan(*arguments, continues=False, limited=True)
    assert "up to 500 steps, about 1 minute and 2 minutes at most; then it generates text" in limited
    assert "\n500 steps, about 1 minute; then" in gpt.plan(*arguments, continues=False, limited=False)
    assert f"{tmp_path}: saved every 250 steps, at the end and on Ctrl-C" in limited
    short = gpt.plan(arguments[0], 1000, 100, 0.1, tmp_path, continues=False, limited=False)
    assert f"{tmp_path}: saved at the end and on Ctrl-C" in short
