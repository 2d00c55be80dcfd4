"""Rows "guides write | today" of docs/engines.md: what they quote is what a user reads, without the packages of engines."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import StratagemError
from stratagem_migrate import examine
from stratagem_migrate.source import Source
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "engines.md"
QUIET = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)")
#: Conditions of rows that need an engine: the tests of its package try them.
NEEDS_AN_ENGINE = ("without a TPU", "with the package")


def rows() -> list[tuple[str, str]]:
    """Return the cells of every row, under whichever heading."""
    found, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
        if cells and cells[0].startswith("guides "):
            inside = True
        elif not cells:
            inside = False
        elif inside and len(cells) == 2 and not cells[0].startswith("---"):
            found.append((cells[0], cells[1]))
    return found


def code_of(cell: str) -> list[str]:
    return [code.strip() for _, code in SPAN.findall(cell)]


#: One for each argument: (code, condition, what the page says).
CASES = [
    (code, left, today)
    for left, today in rows()
    if not any(condition in left for condition in NEEDS_AN_ENGINE)
    for code in code_of(left)
    if code not in ("stratagem migrate", "train_dataloader")
]
REFUSED = [case for case in CASES if "migrate" not in case[1] and re.match(r"(refused: )?`", case[2])]
MIGRATED = [case for case in CASES if "migrate" in case[1]]
TRAINED = [case for case in CASES if case[2].startswith("trains")]
ENGINES = [case for case in CASES if case[2].startswith("runs")]


@pytest.fixture(autouse=True)
def without_engines():
    names = {distribution.name for distribution in distributions()}
    engines = {f"stratagem-{path.parent.name.replace('_', '-')}" for path in ROOT.glob("contrib/*/engine.lock")}
    if installed := names & engines:
        pytest.skip(f"installed here: {', '.join(sorted(installed))}")


def trainer_of(code: str) -> sg.Trainer:
    """Return the trainer of a cell: a call, arguments alone, or a command line. GPUs become CPUs."""
    code = code.replace('accelerator="gpu"', 'accelerator="cpu"')
    if code.startswith(("--", "python ")):
        return sg.Trainer.from_cli(code[code.index("--") :].split())
    call = code if code.startswith("Trainer(") else f"Trainer({code})"
    return eval(call, {"Trainer": sg.Trainer})


def answer(code: str, monkeypatch, capsys) -> tuple[str, str]:
    """Return the sentence that `code` ends with, and the part of it that tells what to do."""
    if code.startswith("horovodrun"):
        monkeypatch.setenv("HOROVOD_SIZE", "4")
        monkeypatch.setenv("HOROVOD_RANK", "0")
    try:
        if code.startswith("from "):
            exec(code)
        elif code == "self.on_tpu":
            _ = type("MyModel", (sg.Module,), {})().on_tpu
        elif code.startswith("horovodrun"):
            sg.Trainer(**QUIET).fit(Net(), joined_batches(1, 8))
        else:
            trainer_of(code)
    except StratagemError as error:
        return str(error), error.do
    except AttributeError as error:
        return str(error), ""
    except SystemExit:
        return capsys.readouterr().err.strip().partition(": ")[2], ""
    return f"{code} is accepted", ""


def test_the_tables_are_read():
    assert len(REFUSED) >= 20
    assert MIGRATED
    assert TRAINED
    assert len(REFUSED) + len(MIGRATED) + len(TRAINED) + len(ENGINES) == len(CASES), (
        "begin with refused, trains or runs"
    )


@pytest.mark.every_push('Trainer(plugins="fairscale_pipe")', "from stratagem.precisions import BitsandbytesPrecision")
@pytest.mark.parametrize(("code", "condition", "today"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_is_refused_is_refused_in_the_words_of_the_page(code, condition, today, monkeypatch, capsys):
    quoted = code_of(today)[0]
    pattern = re.escape(quoted).replace(re.escape("..."), ".+")

    assert any(re.fullmatch(pattern, said, re.DOTALL) for said in answer(code, monkeypatch, capsys)), answer(
        code, monkeypatch, capsys
    )


@pytest.mark.parametrize(("code", "condition", "today"), MIGRATED, ids=[case[0] for case in MIGRATED])
def test_what_migrate_writes_is_what_the_page_says(code, condition, today):
    script = f"from pytorch_lightning import Trainer\nTrainer({code}, logger=False)"
    new = [
        finding.new for finding in examine(Source(Path("a.py"), script.encode())) if finding.old.startswith(code[:8])
    ]

    assert set(new) & set(code_of(today))


def _trains(rank, world_size, code):
    arguments = ", ".join(f"{name}={value!r}" for name, value in QUIET.items() if f"{name}=" not in code)
    if code.startswith("--"):
        words = [word for name, value in QUIET.items() for word in (f"--{name}", str(value).lower())]
        trainer = sg.Trainer.from_cli([*code.split(), *words, "--devices", str(world_size)])
    else:
        trainer = eval(f"{code.removesuffix(')')}, {arguments})", {"Trainer": sg.Trainer})
    model = Net()
    model.sequential_module = model.net
    trainer.fit(model, part(joined_batches(2, 8), rank, world_size))
    return trainer.global_step, type(trainer.strategy).__name__


@pytest.mark.slow
@pytest.mark.every_push("--plugins ddp_sharded")
@pytest.mark.parametrize(("code", "condition", "today"), TRAINED, ids=[case[0] for case in TRAINED])
def test_what_trains_trains(code, condition, today):
    for steps, strategy in run_in_processes(_trains, 2, code):
        assert steps == 2
        assert strategy in code_of(today)


@pytest.mark.parametrize(("code", "condition", "today"), ENGINES, ids=[case[0] for case in ENGINES])
def test_what_runs_with_an_engine_names_its_package_without_it(code, condition, today, monkeypatch, capsys):
    sentence, _ = answer(code, monkeypatch, capsys)

    assert "`pip install stratagem-" in sentence
    for quoted in code_of(today):
        if quoted[0].isupper() and ";" in quoted:
            assert re.fullmatch(re.escape(quoted).replace(re.escape("..."), ".+"), sentence)
