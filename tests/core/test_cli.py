"""The stratagem program lists and shows plugins, for people and for programs, and fails with one sentence."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

import pytest

import stratagem as sg
from programs import scripts
from programs.terminal import Terminal
from stratagem.cli import main, parser
from stratagem.discovery import registry
from stratagem.errors import ConfigError


def test_list_by_kind(capsys):
    assert main(["plugins", "list"]) == 0
    text = capsys.readouterr().out

    assert "strategy:" in text
    assert "stratagem-ddp 0.1.0" in text


def test_the_list_has_a_sentence_for_each_plugin_and_folds_presets(capsys):
    assert main(["plugins", "list", "--kind", "strategy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["plugins", "list", "--kind", "strategy", "--presets"]) == 0
    full = capsys.readouterr().out

    (ddp,) = [line for line in lines if line.startswith("  ddp ")]
    assert "Replicate the model in every process; average gradients while backward runs (stratagem-ddp 0.1.0)" in ddp
    (presets,) = [line for line in lines if "presets" in line]
    assert "ddp_spawn" in presets
    assert "fsdp_cpu_offload" in presets
    assert "\n  ddp_spawn " in full
    assert all("no description" not in line for line in lines)


def test_the_sentences_are_those_of_the_classes():
    from stratagem_devtools.descriptions import describe
    from stratagem_devtools.plugin_table import summary

    for entry in registry.entries():
        if entry.kind != "command" and not (found := summary(entry)).is_preset:
            assert describe(entry)["summary"].rstrip(".") == found.text, entry.qualified_name


@pytest.mark.every_push("40-['plugins', 'list']", "40-['plugins', 'show', 'ddp']")
@pytest.mark.slow
@pytest.mark.parametrize("words", [["plugins", "list"], ["plugins", "show", "ddp"], ["plugins", "--help"]], ids=str)
@pytest.mark.parametrize("columns", [40, 80])
def test_text_fits_the_terminal(tmp_path, words, columns):
    with Terminal([sys.executable, "-m", "stratagem", *words], cwd=tmp_path, columns=columns) as terminal:
        assert terminal.finish() == 0
    long = [line for line in terminal.text.splitlines() if len(line) > columns]

    assert all(len(line.split()) == 1 for line in long), long  # a word that is longer than a line
    assert ("\x1b[1m" in terminal.raw) == ("--help" not in words)


@pytest.mark.slow
def test_no_color_and_pipes_get_no_escapes(tmp_path):
    command = [sys.executable, "-m", "stratagem", "plugins", "list"]
    with Terminal(command, cwd=tmp_path, environment={"NO_COLOR": "1"}) as terminal:
        terminal.finish()
    piped = scripts.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "\x1b[1m" not in terminal.raw
    assert "\x1b" not in piped
    assert max(map(len, piped.splitlines())) > 80  # whole lines, to search in


def every_help():
    """Return the words of each command and subcommand, with --help."""
    found, waiting = [["--help"]], [([], parser())]
    for path, current in waiting:
        for action in current._actions:
            for word, below in (action.choices or {}).items() if action.nargs == argparse.PARSER else ():
                found.append([*path, word, "--help"])
                waiting.append(([*path, word], below))
    return found


#: One worker of pytest-xdist runs what one program shows.
ONE_PROGRAM = pytest.mark.xdist_group("imports of help")

#: Calls the program with each list of words in a fork, and prints what that has imported.
IMPORTS = """
import json, os, sys
from stratagem.cli import main
from stratagem.discovery import registry
registry.entries()  # read once what is installed
for words in json.loads(sys.argv[1]):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try: main(words)
    except SystemExit: pass
    print("IMPORTED", json.dumps([words, list(sys.modules)]), flush=True)
    os._exit(0)
"""
HELP = [*every_help(), ["plugins", "list"]]


@pytest.fixture(scope="module")
def imported():
    """Return the modules that an interpreter has imported after each list of words of `HELP`."""
    command = [sys.executable, "-c", IMPORTS, json.dumps(HELP)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line.removeprefix("IMPORTED ") for line in done.stdout.splitlines() if line.startswith("IMPORTED ")]
    return {" ".join(words): set(modules) for words, modules in map(json.loads, lines)}


@ONE_PROGRAM
@pytest.mark.slow
@pytest.mark.parametrize("words", HELP, ids=" ".join)
def test_help_imports_no_torch(imported, words):
    assert imported[" ".join(words)] & {"torch", "numpy", "rich", "deepspeed"} == set()


@pytest.mark.parametrize(
    ("words", "missing"), [(["fit"], "FILE"), (["explain"], "script"), (["validate"], "FILE"), (["predict"], "FILE")]
)
def test_a_missing_argument_names_only_what_is_required(capsys, words, missing):
    with pytest.raises(SystemExit) as caught:
        main(words)

    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"the following arguments are required: {missing}")


def test_list_as_json(capsys):
    assert main(["plugins", "list", "--kind", "comm_hook", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)

    names = [row["name"] for row in rows]
    assert names == sorted(names)
    assert {"bf16_compress", "fp16_compress", "powersgd"} <= set(names)
    assert set(rows[0]) == {"kind", "name", "distribution", "version", "value", "conformance"}


def test_show_tells_options_capabilities_and_hooks(capsys):
    assert main(["plugins", "show", "DDP"]) == 0
    text = capsys.readouterr().out

    assert "bucket_cap_mb = 25.0  (a number)" in text
    assert "Larger buckets mean fewer messages" in text
    assert "gradient-buckets" in text
    assert "answers: backward, connect, wrap_model\n" in text
    assert "acts: on_fit_end, " in text


def test_show_of_a_preset_has_its_defaults(capsys):
    assert main(["plugins", "show", "ddp_spawn", "--json"]) == 0
    options = {option["name"]: option for option in json.loads(capsys.readouterr().out)["options"]}

    assert options["start_method"]["default"] == "'spawn'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plugins", "show", "ddpp"], "no installed plugin is called 'ddpp'; did you mean 'ddp'"),
        (["plugins", "list", "--kind", "strategies"], "kind 'strategies' is unknown; .*did you mean 'strategy'"),
        (["plugins", "show", "ddp", "--kind", "precision"], "precision 'ddp' is unknown"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, message):
    assert main(arguments) == 1
    error = capsys.readouterr().err

    assert error.count("\n") == 1
    assert re.search(message, error)


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "plugins" in text
    assert "demo" in text


COMMAND = """
    from stratagem import Command

    class Mine(Command):
        help = "count beans, 100 % of them"

        def run(self, arguments):
            print("counted")
            return 0
"""


def test_a_package_adds_a_command_to_the_group_plugins(install, capsys):
    install("acme-beans", {"stratagem.command": {"plugins.beans": "Mine"}}, COMMAND.replace("100 %", "all"))

    assert main(["plugins", "beans"]) == 0
    assert capsys.readouterr().out == "counted\n"
    with pytest.raises(SystemExit):
        main(["plugins", "--help"])
    assert "count beans" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "count beans" not in capsys.readouterr().out


def test_help_reads_the_texts_of_commands_without_importing_them():
    script = """
import sys
from stratagem.cli import command_help, main, parser
try: main(["--help"])
except SystemExit: pass
from stratagem.discovery import registry
entries = registry.entries("command")
imported = {entry.value.partition(":")[0] for entry in entries} & set(sys.modules)
print("IMPORTED", imported, [e.name for e in entries if command_help(e) != e.load().help])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "IMPORTED set() []"


@pytest.mark.parametrize("value", ["' '.join(('count', 'beans'))", "('count ' 'beans')"])
def test_help_imports_a_command_whose_text_is_not_one_string(install, capsys, value):
    module = f"import stratagem\nclass Beans(stratagem.Command):\n    help = {value}\n"
    install("acme-beans", {"stratagem.command": {"beans": "Beans"}}, module)
    with pytest.raises(SystemExit):
        main(["--help"])

    assert "count beans" in capsys.readouterr().out


def test_help_shows_a_broken_command_and_the_others(install, capsys):
    install("acme-broken", {"stratagem.command": {"beans": "Mine"}}, "raise RuntimeError('only 3 % are left')")
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())

    assert caught.value.code == 0
    assert "command 'beans' of acme-broken 1.0 cannot be imported (RuntimeError: only 3 % are left)" in text
    assert "demo" in text
    assert main(["beans"]) == 1


def test_a_command_of_two_packages_is_named_with_both(install, capsys):
    for name in ("acme-one", "acme-two"):
        install(name, {"stratagem.command": {"beans": "Mine"}}, COMMAND)

    assert main(["beans"]) == 1
    assert "command 'beans' is provided by acme-one and acme-two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["doctor"],
            "command 'doctor' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-tools`",
        ),
        (
            ["plugins", "new", "strategy", "mine"],
            "command 'plugins new' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-tools`",
        ),
        (
            ["plugins", "list"],
            "command 'plugins list' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-tools`",
        ),
        (
            ["explain", "train.py"],
            "command 'explain' is not installed; run `pip install stratagem`; for this alone, run `pip install stratagem-tools`",
        ),
        (["docter"], "did you mean 'doctor'"),
        (["plugins", "lst"], "command 'plugins lst' is unknown; did you mean 'list'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_is_not_installed_names_its_package(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(registry, "entries", lambda kind=None, hidden=False: [])  # as with nothing but the core

    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_lists_of_plugins_for_a_run_leave_the_commands(capsys, monkeypatch):
    monkeypatch.setenv("STRATAGEM_PLUGINS", "single_device")
    assert main(["plugins", "check", "--json"]) == 0
    assert {row["kind"] for row in json.loads(capsys.readouterr().out)} == {"command", "strategy"}

    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "doctor")
    assert main(["doctor"]) == 1
    assert "command 'doctor' is hidden by STRATAGEM_DISABLE_PLUGINS; change that variable" in capsys.readouterr().err


@pytest.mark.slow
@ONE_PROGRAM
@pytest.mark.parametrize("arguments", ["--help", "plugins --help", "doctor --help", "fit --help"])
def test_help_imports_neither_torch_nor_what_trains(imported, arguments):
    assert imported[arguments] & {"torch", "numpy", "deepspeed", "yaml", "rich", "pytest"} == set()


def test_a_value_that_explain_would_not_set_is_refused(monkeypatch):
    monkeypatch.setenv("STRATAGEM_EXPLAIN", "0")

    with pytest.raises(ConfigError, match="STRATAGEM_EXPLAIN is '0'; expected 'text' or 'json'; unset it to train"):
        sg.Run(devices=1, accelerator="cpu").launch(print)


def test_explain_refuses_a_folder(capsys, tmp_path):
    assert main(["explain", str(tmp_path)]) == 1
    assert f"{str(tmp_path)!r} is a folder; expected a Python script; check the path" in capsys.readouterr().err
