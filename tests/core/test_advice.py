"""What messages advise exists: options, plugins and commands that they name are real, and work when followed."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import stratagem as sg
from programs import scripts
from stratagem.api.options import options
from stratagem.cli import parser
from stratagem.discovery import catalog, registry
from stratagem.discovery.catalog import moved_names
from stratagem.errors import ConfigError
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]
ARGUMENTS = set(options(TrainerSettings))
NAMES = {entry.name for entry in registry.entries()}


def advised(text: str) -> list[tuple[str, object]]:
    """Return the arguments with values that `text` tells the user to write."""
    found = re.findall(r"""\b(\w+)=("[^"]*"|\{[^}]*\}|\d+|True|False)""", text)
    return [(name, ast.literal_eval(value)) for name, value in found]


def not_installed(advice: str) -> set[object]:
    """Return the plugins of packages that `advice` tells the user to install, and that are not."""
    packages = re.findall(r"`pip install ([\w-]+)`", advice)
    names = {
        name
        for package in packages
        for plugins in (catalog._catalog()["packages"] | catalog._catalog()["elsewhere"])[package].values()
        for name in plugins
    }
    return names - NAMES


@pytest.mark.parametrize(
    ("name", "advice"), [*catalog._catalog()["spellings"].items(), *moved_names("plugins").items()]
)
def test_the_advice_for_a_name_of_another_trainer_works(name, advice):
    sentence = ""
    for kind in ("strategy", "precision"):
        with pytest.raises(sg.StratagemError) as caught:
            sg.Trainer(accelerator="cpu", logger=False, **{kind: name})
        sentence = str(caught.value)
        assert advice in sentence or f"{name!r} is not installed; run `pip install" in sentence
        assert "did you mean" not in sentence

    pairs = advised(advice)
    assert pairs or "there is no" in advice
    together = [dict(pairs)] if len({argument for argument, _ in pairs}) == len(pairs) else [dict([p]) for p in pairs]
    together = [arguments for arguments in together if not_installed(advice).isdisjoint(arguments.values())]
    for arguments in together:
        sg.Trainer(**({"accelerator": "cpu", "logger": False} | arguments))


@pytest.mark.parametrize("spelling", ["fp16", "FP16", "float16", "half", torch.float16, "16_mixed", "16mixed"])
def test_spellings_of_fp16_lead_to_fp16(spelling):
    with pytest.raises(sg.StratagemError) as caught:
        sg.Trainer(accelerator="cpu", precision=spelling)

    advice = str(caught.value).rpartition(";")[2]
    assert "16-mixed" in advice
    assert "bf16" not in advice


@pytest.mark.parametrize("spelling", ["16", 16, "bf16", "BF16", 32, "32", 64, "64", "16-mixed", "bf16-true"])
def test_short_spellings_work(spelling):
    assert (
        sg.Trainer(accelerator="cpu", precision=spelling, logger=False).run.stack.precision.name
        == str(spelling).lower()
    )


@pytest.mark.parametrize(("name", "advice"), moved_names("arguments").items())
def test_the_advice_for_an_argument_of_another_trainer_names_what_exists(name, advice):
    with pytest.raises(sg.StratagemError, match=re.escape(advice)):
        sg.Trainer(**{name: 1})

    for plugin in re.findall(r"\ban? (\w+_\w+)\b", advice):
        assert plugin in NAMES, advice
    for argument in re.findall(r"\b(\w+)=", advice):
        assert argument in ARGUMENTS | {"dirpath"}, advice
    for argument in re.findall(r"\buse (\w+)(?: instead| alone|, or|$)", advice):
        assert argument in ARGUMENTS, advice


def test_without_names_of_other_trainers_messages_tell_what_there_is(monkeypatch):
    monkeypatch.setattr(catalog, "_moved_names", dict)

    with pytest.raises(
        sg.StratagemError, match=r"Trainer has no argument 'auto_lr_find'.*see help\(stratagem.Trainer\)"
    ):
        sg.Trainer(auto_lr_find=True)
    with pytest.raises(
        sg.StratagemError, match="strategy 'ddp_cpu' is unknown; expected one of those installed: .*ddp"
    ):
        sg.Trainer(strategy="ddp_cpu")
    with pytest.raises(sg.StratagemError, match='use precision="16-mixed"'):
        sg.Trainer(precision=torch.float16)


def test_a_file_of_names_that_cannot_be_read_hides_no_error(monkeypatch):
    points = [SimpleNamespace(module=module, attr="moved.toml") for module in ("stratagem_nowhere", "json")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)

    assert catalog._moved_names.__wrapped__() == {}


def sources() -> list[Path]:
    return sorted(path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def texts(path: Path) -> list[str]:
    """Return the literal text of every string in a file, with a hole where a value is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.mark.slow
def test_commands_that_messages_name_exist():
    every = [text for path in sources() for text in texts(path)]
    named = {command for text in every for command in re.findall(r"`stratagem ([a-z]+(?: [a-z]+)?)", text)}
    assert len(named) >= 3

    for command in sorted(named):
        words = command.split()
        in_words = [words] if words[0] == "plugins" else [words[:1]]
        for each in in_words:
            with pytest.raises(SystemExit) as stopped:
                parser(each).parse_args([*each, "--help"])
            assert stopped.value.code == 0, command


@pytest.mark.slow
def test_plugins_that_messages_tell_to_choose_exist():
    every = {(path.name, text) for path in sources() for text in texts(path)}
    checked = 0
    for file, text in sorted(every):
        for argument, name in re.findall(
            r"""\b(strategy|precision|launcher|checkpoint|comm_hook|logger|accelerator)="([a-z][\w-]*)\"""", text
        ):
            checked += 1
            known = (
                {entry.name for entry in registry.entries(argument)}
                | {"auto"}
                | {*catalog._catalog()["spellings"], *moved_names("plugins"), *catalog.providers(argument)}
            )
            assert name in known or file in ("lightning.py", "arguments.py", "trainer_calls.py"), f"{file}: {text}"
    assert checked > 10


@pytest.mark.parametrize("name", sorted(name for kind in registry.kinds() for name in catalog.providers(kind)))
def test_texts_of_a_plugin_are_written_for_people(capsys, name):
    from stratagem.cli import main

    if name not in NAMES:
        pytest.skip("not installed here")
    kind = next(entry.kind for entry in registry.entries() if entry.name == name and entry.kind in registry.kinds())
    assert main(["plugins", "show", name, "--kind", kind]) in (0, 1)
    captured = capsys.readouterr()

    assert not re.search(PYTHON_ONLY, captured.out + captured.err)


#: What only Python writes.
PYTHON_ONLY = r"PosixPath\(|timedelta\(|<object|<function|<class| at 0x|Factory\("


def test_explain_and_help_are_written_for_people(capsys, tmp_path):
    trainer = sg.Trainer(
        accelerator="cpu", max_time=60, default_root_dir=tmp_path,
        strategy={"name": "ddp", "timeout": 90}, devices=2, logger={"name": "csv", "save_dir": tmp_path},
        callbacks=[{"name": "lambda", "on": {"on_fit_start": print}}, {"name": "throughput", "batch_size_fn": len},
                   {"name": "early_stopping", "monitor": "loss"}],
    )  # fmt: skip
    with pytest.raises(SystemExit):
        sg.Trainer.from_cli(["--strategy", "ddp", "--accelerator", "cpu", "--help"])
    text = trainer.explain()

    assert not re.search(PYTHON_ONLY, text)
    assert not re.search(PYTHON_ONLY, capsys.readouterr().out)
    assert "timeout = 90 s  (code)" in text
    assert f"default_root_dir = '{tmp_path}'  (code)" in text


def test_explain_tells_where_options_of_instances_are_from():
    from stratagem.callbacks import EarlyStopping, Preemption

    text = sg.Trainer(
        accelerator="cpu", logger=False, callbacks=[EarlyStopping(monitor="loss", patience=7), Preemption()]
    ).explain()

    assert "|   monitor = 'loss'  (code)\n" in text
    assert "|   patience = 7  (code)\n" in text
    assert "|   mode = 'min'  (default)\n" in text
    assert "|   signals = ['SIGTERM', 'SIGUSR1']  (default)\n" in text


# --- A reader that leaves ----------------------------------------------------------------------------------------


@pytest.mark.every_push("plugins list")
@pytest.mark.slow
@pytest.mark.parametrize("command", [["plugins", "list"], ["schema"], ["completion", "bash"]], ids=" ".join)
def test_a_reader_that_leaves_early_ends_the_program_quietly(command):
    script = f"import os, sys\nfrom stratagem.cli import main\nsys.exit(main({command!r}))"
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        result = scripts.run(
            [sys.executable, "-c", script], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=360, check=False
        )

    assert result.stderr == ""
    assert result.returncode == 141  # 128 + SIGPIPE, as of other programs


@pytest.mark.parametrize("command", [["plugins", "list"], ["plugins", "nothing"]])
def test_a_closed_standard_output_gives_no_traceback(command):
    script = f"import sys\nfrom stratagem.cli import main\nsys.exit(main({command!r}))"
    line = f"exec {sys.executable} -c '{script}' >&-".replace("['", '["').replace("']", '"]').replace("', '", '", "')
    result = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, timeout=360, check=False)

    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1, 2)


# --- The environment ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("PL_TRAINER_MAX_EPOCHS", "set STRATAGEM_TRAINER_MAX_EPOCHS"),
        ("PL_TRAINER_GPUS", 'use accelerator="gpu" and devices'),
        ("PL_TRAINER_NO_SUCH", "unset it"),
        ("PL_GLOBAL_SEED", "seed_everything"),
        ("LT_STRATEGY", "set STRATAGEM_TRAINER_STRATEGY"),
    ],
)
def test_a_variable_of_lightning_is_named(monkeypatch, variable, advice):
    monkeypatch.setenv(variable, "3")
    with pytest.warns(
        UserWarning, match=f"{variable} is set, which Lightning reads and stratagem does not; .*{advice}"
    ):
        trainer = sg.Trainer(accelerator="cpu", logger=False)

    assert trainer.max_epochs == 1000


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("STRATAGEM_MAX_EPOCHS", "nothing reads; use STRATAGEM_TRAINER_MAX_EPOCHS"),
        ("STRATAGEM_STRATEGY", "nothing reads; use STRATAGEM_TRAINER_STRATEGY"),
        ("STRATAGEM_TRAINR_MAX_EPOCHS", "did you mean STRATAGEM_TRAINER_MAX_EPOCHS"),
        ("STRATAGEM_STRATGY_TIMEOUT", "did you mean STRATAGEM_STRATEGY_TIMEOUT"),
        ("STRATAGEM_CALLBACK_MONITOR", "use STRATAGEM_TRAINER_CALLBACKS with JSON"),
    ],
)
def test_a_misspelt_variable_is_refused(monkeypatch, variable, message):
    monkeypatch.setenv(variable, "3")
    with pytest.raises(sg.StratagemError, match=f"the variable {variable} is set.*{message}"):
        sg.Trainer(accelerator="cpu", logger=False)


@pytest.mark.slow
def test_the_programs_own_variables_are_none_of_these(monkeypatch):
    for variable in {
        name for path in sources() for text in texts(path) for name in re.findall("STRATAGEM_[A-Z_]+[A-Z]", text)
    }:
        if not variable.startswith(
            ("STRATAGEM_TRAINER", "STRATAGEM_STRATEGY", "STRATAGEM_EXPLAIN", "STRATAGEM_PLUGINS")
        ):
            monkeypatch.setenv(variable, "")

    sg.Trainer(accelerator="cpu", logger=False)


# --- stratagem explain -------------------------------------------------------------------------------------------

SCRIPT = """
import argparse, sys, torch
import stratagem as sg

class Model(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

TRAINER.fit(Model(), [torch.ones(2, 1)])
"""
OWN_PARSER = "sg.Trainer(accelerator='cpu', devices=2, strategy=[*map(str.lower, sys.argv)][2])"


@pytest.mark.parametrize(
    ("trainer", "words", "unread"),
    [
        ("sg.Trainer(accelerator='cpu')", [], []),
        ("sg.Trainer(accelerator='cpu')", ["--strategy", "fsdp"], ["--strategy fsdp"]),
        ("sg.Trainer(accelerator='cpu')", ["--strategy.timeout=3", "--lr", "3"], ["--strategy.timeout=3"]),
        ("sg.Trainer(accelerator='cpu')", ["--max-epochs", "3", "--devices", "2"], ["--max-epochs 3", "--devices 2"]),
        ("sg.Trainer.from_cli()", ["--strategy", "ddp", "--accelerator", "cpu", "--devices", "2"], []),
        (OWN_PARSER, ["--strategy", "ddp"], []),
    ],
)
def test_explain_names_arguments_that_the_script_does_not_read(tmp_path, monkeypatch, capsys, trainer, words, unread):
    from stratagem.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("train.py").write_text(SCRIPT.replace("TRAINER", trainer))
    assert main(["explain", "train.py", *words]) == 0
    lines = capsys.readouterr().err.splitlines()

    assert [re.search(r"the command line has (\S+(?: \S+)?) and the run uses", line)[1] for line in lines] == unread
    assert all("Trainer.from_cli()" in line for line in lines)


# --- Modules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            lambda self, batch, batch_idx, optimizer_idx: None,
            "optimizer_idx, which is not passed; .*set automatic_optimization = False and step",
        ),
        (lambda self, batch, batch_idx, other: None, "give the other parameters default values"),
        (lambda self: None, r"expected \(batch, batch_idx\)"),
    ],
)
def test_a_training_step_with_too_many_arguments_is_refused(step, message):
    model = type("Model", (sg.Module,), {"training_step": step, "configure_optimizers": lambda self: None})()
    with pytest.raises(sg.StratagemError, match=rf"Model.training_step takes .*{message}"):
        sg.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(model, [1])


def test_what_an_error_advises_and_is_missing_comes_with_its_installation(monkeypatch):
    class Fails(sg.Callback):
        def on_fit_start(self, trainer, module):
            raise ConfigError(
                "found", expected='strategy="fsdp"', do='set precision="32-true" or strategy="auto", or ' + advice
            )

    entries, advice = registry.entries, 'choose strategy "fsdp", callbacks="ema" or comm_hook="one_bit"'
    missing = {"fsdp", "one_bit"}
    trainer = sg.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=Fails())
    monkeypatch.setattr(
        registry, "entries", lambda *args, **more: [each for each in entries(*args, **more) if each.name not in missing]
    )
    with pytest.raises(ConfigError) as caught:
        trainer.fit(Net(), joined_batches(2, 8))

    text = str(caught.value)
    assert text.endswith(
        "; to install strategy 'fsdp', run `pip install stratagem`; for this alone, run `pip install stratagem-fsdp`"
        "; to install comm_hook 'one_bit', run `pip install stratagem`; for this alone, run `pip install stratagem-comm-hooks`."
    )
    assert "to install strategy 'fsdp'" in caught.value.do
    assert "auto'" not in text
    assert text.count("to install") == 2
