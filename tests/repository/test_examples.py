"""The examples do what they say: they learn, on one process and on several, from a script and from a file."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

import stratagem as sg
from programs import scripts

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, FILE = str(EXAMPLES / "digits.py"), str(EXAMPLES / "digits.yaml")
PAGE = (EXAMPLES / "README.md").read_text()
QUIET = ["--enable_progress_bar", "false", "--accelerator", "cpu"]
TWO = ["--strategy", "ddp", "--devices", "2"]


def run(*command, limit_s=180):
    """Run `command` in the current folder; return what it printed."""
    done = scripts.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}  # sums are added in one order, however many cores there are


def digits(*arguments):
    return run(sys.executable, SCRIPT, *QUIET, *arguments)


def stratagem(stage, *arguments):
    options = [f"--trainer.{part[2:]}" if part.startswith("--") else part for part in (*QUIET, *arguments)]
    return run(sys.executable, "-m", "stratagem", stage, FILE, *options)


def metrics(folder):
    """Return the rows that a run logged while training."""
    with (Path(folder) / "stratagem_logs" / "version_0" / "metrics.csv").open() as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in rows if "test_accuracy" not in row]


def the_checkpoint(folder):
    (path,) = (Path(folder) / "checkpoints").glob("*.ckpt")
    return path


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = loaded
    spec.loader.exec_module(loaded)
    yield loaded
    del sys.modules["digits"]


@pytest.mark.sweep(reason="All 20 epochs take 9 CPU seconds; test_the_file_is_the_script expects 80 after two of them.")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], TWO], ids=["one process", "two processes"])
def test_it_reads_97_of_100_digits_in_less_than_a_minute(arguments):
    said = digits(*arguments)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", said)

    assert float(accuracy) >= 97


@pytest.mark.sweep(guard="tests/repository/test_examples.py::test_what_the_page_says_to_type_works")
@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers():
    for folder in ("one", "other"):
        digits("--max_epochs", "2", "--default_root_dir", folder)

    assert sum("val_loss" in row for row in metrics("one")) == 2
    assert metrics("one") == metrics("other")


@pytest.mark.when_changed(
    "examples/", "plugins/tools/", guard="tests/repository/test_examples.py::test_what_the_page_says_to_type_works"
)
@pytest.mark.slow
def test_the_file_is_the_script():
    said = digits("--max_epochs", "2", "--default_root_dir", "script")
    stratagem("fit", "--max_epochs", "2", "--default_root_dir", "file")
    tested = run(
        sys.executable, "-m", "stratagem", "test", FILE, "--ckpt_path", str(the_checkpoint("file")),
        "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false",
    )  # fmt: skip

    (from_script,) = re.findall(r"test accuracy ([\d.]+)%", said)
    (from_file,) = re.findall(r"test_accuracy\s+([\d.]+)", tested)
    assert float(from_script) >= 80
    assert f"{float(from_file):.1%}" == f"{from_script}%"
    assert sum("val_loss" in row for row in metrics("script")) == 2
    assert metrics("script") == metrics("file")


@pytest.mark.sweep(
    reason="All 20 epochs on two processes take 11 CPU seconds; test_the_file_is_the_script trains and tests on one."
)
@pytest.mark.slow
def test_the_file_trains_on_two_processes_and_tests_what_was_kept():
    stratagem("fit", *TWO, "--launcher", "fork")
    said = run(sys.executable, "-m", "stratagem", "test", FILE, "--ckpt_path", "last", "--trainer.accelerator", "cpu")

    assert float(re.findall(r"test_accuracy\s+([\d.]+)", said)[0]) >= 0.97


@pytest.mark.slow
def test_the_file_says_what_the_script_says(module):
    told = yaml.safe_load(Path(FILE).read_text())
    from_script = sg.Trainer.from_cli([], max_epochs=20, default_root_dir="digits_run", callbacks=module.CALLBACKS)

    from_file = sg.Trainer(**told["trainer"])

    assert from_file.max_epochs == from_script.max_epochs
    assert from_file.default_root_dir == from_script.default_root_dir
    assert [repr(callback) for callback in from_file.callbacks] == [
        repr(callback) for callback in from_script.callbacks
    ]
    assert module.Digits(**told["model"]["init_args"]).hparams == module.Digits().hparams
    assert vars(module.DigitsData(**told["data"]["init_args"])) == vars(module.DigitsData())


@pytest.mark.slow
def test_no_image_is_in_two_parts_and_every_process_makes_the_same_ones(module):
    parts = []
    for _ in range(2):
        data = module.DigitsData()
        data.setup("fit")
        parts.append([set(part.indices) for part in (data.train, data.val, data.test)])

    first, second = parts
    assert first == second
    assert [len(part) for part in first] == [1077, 360, 360]
    assert len(set.union(*first)) == 1797


def commands():
    """Return what the page says to type, but for what other tests run."""
    lines = re.findall(r"^    ((?:python|torchrun) examples/digits.py .*|torchrun .*)$", PAGE, re.MULTILINE)
    return [line.partition("#")[0].split() for line in lines if "--strategy ddp --devices" not in line]


@pytest.mark.every_push("examples/digits.py --fast_dev_run true", "examples/digits.py --help")
@pytest.mark.slow
@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command[1:]))
def test_what_the_page_says_to_type_works(command):
    program, *arguments = [SCRIPT if word == "examples/digits.py" else word for word in command]
    python = [sys.executable, *(["-m", "torch.distributed.run"] if program == "torchrun" else [])]
    said = run(*python, *arguments, *([] if "--help" in arguments else [*QUIET, "--max_epochs", "2"]))

    assert "--strategy" in said if "--help" in arguments else "test accuracy" in said


def test_every_file_of_the_page_exists():
    named = set(re.findall(r"examples/([\w.]+)", PAGE)) | set(re.findall(r"\]\(([\w.]+)\)", PAGE))

    assert named == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
