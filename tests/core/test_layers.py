"""The same run from code, a file, the environment and a command line; every value remembers where it came from."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

import stratagem as sg
from programs import scripts
from stratagem.cli import main
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy
from stratagem_trainer.sources import from_arguments, parse_choice

TESTS = Path(__file__).parents[1]
CPU = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def ddp_options(trainer):
    return trainer.strategy.static_graph, trainer.strategy.bucket_cap_mb


def test_from_the_command_line():
    line = "--strategy ddp --strategy.static_graph true --strategy.bucket-cap-mb=2 --precision 16 --accelerator cpu --devices 2"
    trainer = sg.Trainer.from_cli([*line.split(), "--max-epochs", "3", "--logger", "false"])

    assert ddp_options(trainer) == (True, 2.0)
    assert trainer.run.stack.precision.name == "16"
    assert trainer.run.num_processes == 2
    assert trainer.max_epochs == 3
    assert trainer.loggers == []


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_from_a_file(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    path.write_text(
        {
            "yaml": "max_epochs: 3\naccelerator: cpu\ndevices: 2\nstrategy: {name: ddp, static_graph: true, bucket_cap_mb: 2}",
            "toml": 'max_epochs = 3\naccelerator = "cpu"\ndevices = 2\n[strategy]\nname = "ddp"\nstatic_graph = true\n'
            "bucket_cap_mb = 2",
        }[suffix]
    )
    trainer = sg.Trainer.from_config(path)

    assert ddp_options(trainer) == (True, 2.0)
    assert trainer.max_epochs == 3


def test_from_the_environment(monkeypatch):
    monkeypatch.setenv("STRATAGEM_TRAINER_STRATEGY", "ddp")
    monkeypatch.setenv("STRATAGEM_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("STRATAGEM_STRATEGY_STATIC_GRAPH", "true")
    trainer = sg.Trainer(**CPU)

    assert ddp_options(trainer) == (True, 25.0)
    assert trainer.max_epochs == 3


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text(
        'max_epochs = 1\nmax_steps = 1\nmin_epochs = 1\n[strategy]\nname = "ddp"\nstatic_graph = true\ntimeout = 5\n'
    )
    monkeypatch.setenv("STRATAGEM_TRAINER_MAX_STEPS", "2")
    monkeypatch.setenv("STRATAGEM_TRAINER_MAX_EPOCHS", "2")
    monkeypatch.setenv("STRATAGEM_STRATEGY_TIMEOUT", "6")
    trainer = sg.Trainer.from_cli(
        ["--config", str(path), "--max_epochs", "3", "--strategy.static_graph", "false", "--accelerator", "cpu"]
    )

    assert (trainer.settings.min_epochs, trainer.max_steps, trainer.max_epochs) == (1, 2, 3)
    assert trainer.settings.origins["min_epochs"] == "file run.toml"
    assert trainer.settings.origins["max_steps"] == "environment"
    assert trainer.settings.origins["max_epochs"] == "command line"
    assert trainer.run.stack.strategies[0].origins == {"static_graph": "command line", "timeout": "environment"}
    assert sg.Trainer(max_epochs=9, strategy="ddp", **CPU).max_epochs == 9, "code wins"


def test_another_strategy_drops_the_options_of_the_first(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[strategy]\nname = "ddp"\nstatic_graph = true\n')
    trainer = sg.Trainer.from_cli(["--config", str(path), "--strategy", "single_device", "--accelerator", "cpu"])

    assert trainer.run.stack.strategies[0].name == "single_device"


def test_options_reach_a_plugin_that_was_chosen_by_default():
    trainer = sg.Trainer.from_cli(["--accelerator", "cpu", "--devices", "2", "--strategy.bucket_cap_mb", "3"])

    assert ddp_options(trainer) == (False, 3.0)


def test_explain_shows_everything_and_starts_nothing():
    text = sg.Trainer.from_cli(["--strategy", "ddp", "--strategy.static_graph", "on", "--accelerator", "cpu"]).explain()

    assert "+ strategy ddp  (stratagem-ddp 0.1.0; asked for (command line))" in text
    assert "static_graph = True  (command line)" in text
    assert "bucket_cap_mb = 25.0  (default)" in text
    assert "provides: accumulation, clip-by-norm" in text
    assert "answers: backward, connect, wrap_model" in text


SCRIPT = f"""
    import sys; sys.path.insert(0, {str(TESTS)!r})
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    if __name__ == "__main__":
        trainer = sg.Trainer.from_cli()
        trainer.fit(Net(), joined_batches(4, 8))
        trainer.print("RESULT", trainer.world_size, trainer.global_step, trainer.strategy.static_graph)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(*command):
    return scripts.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_ten_line_script_trains_from_the_command_line(script):
    line = "--strategy ddp --strategy.static_graph true --precision bf16 --accelerator cpu --devices 2 --max_epochs 1"
    result = run(script, *line.split())

    assert result.stdout.splitlines()[-1] == "RESULT 2 4 True", result.stderr


@pytest.mark.slow
def test_explain_a_script(script):
    result = run(
        "-m", "stratagem", "explain", "--json", script, "--strategy", "ddp", "--devices", "2", "--accelerator", "cpu"
    )
    explained = json.loads(result.stdout)

    assert result.returncode == 0
    assert explained["processes"]["per_node"] == 2
    assert explained["plugins"][0]["name"] == "ddp"
    assert "RESULT" not in result.stdout


@pytest.mark.slow
def test_help_lists_the_options_of_the_chosen_plugins(script):
    result = run(script, "--help", "--strategy", "ddp")

    assert result.returncode == 0
    assert (
        "--strategy.bucket_cap_mb (a number; default 25.0)\n      Larger buckets mean fewer messages" in result.stdout
    )
    assert "--max_epochs" in result.stdout


@pytest.mark.slow
def test_a_mistake_on_the_command_line_is_one_sentence_and_exit_code_1(script):
    result = run(script, "--strategy", "dpd")

    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("train.py: strategy 'dpd' is unknown")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max_epoch 3", "command line sets 'max_epoch', which is not an argument; .*did you mean 'max_epochs'"),
        ("--max_epochs three", r"max_epochs is 'three' \(command line\); expected an integer"),
        (
            "--strategy.static_grap true --strategy ddp",
            r"strategy.ddp.static_grap is unknown \(command line\).*static_graph",
        ),
        (
            "--strategy ddp --strategy.static_graph maybe",
            r"static_graph is 'maybe' \(command line\); expected true or false",
        ),
        ("--strategi.timeout 3", "command line sets 'strategi.timeout'; .*did you mean 'strategy'"),
        ("train 3", "command line argument 'train'; expected --name value"),
        (
            "--comm_hook fp16_compress,bf16_compress --comm_hook.rank 3 --strategy ddp",
            "comm_hook.rank is set .command line.",
        ),
        ("--config nothing.yaml", "configuration file 'nothing.yaml' does not exist"),
        ("--callbacks {", "is not JSON"),
        ("--devices 0", "devices is"),
        ("--num_nodes 0", "num_nodes is 0"),
    ],
)
def test_bad_command_lines(capsys, line, message):
    with pytest.raises(SystemExit) as caught:
        sg.Trainer.from_cli([*line.split(), "--accelerator", "cpu"])
    error = capsys.readouterr().err

    assert caught.value.code == 1
    assert error.count("\n") == 1
    import re

    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "strategy: [", "a.yaml is not YAML"),
        ("a.toml", "strategy = [", "a.toml is not TOML"),
        ("a.yaml", "- 1", "a.yaml has a list at its top level"),
        ("a.yaml", "max_epoch: 3", "file a.yaml sets 'max_epoch', which is not an argument; .*'max_epochs'"),
        ("a.yaml", "max_epochs: '3'", r"max_epochs is '3' \(file a.yaml\); expected an integer"),
        ("a.yaml", "strategy: {name: ddp, static_graph: 'yes'}", r"static_graph is 'yes' \(file a.yaml\)"),
        ("a.yaml", "strategy: {static_graph: true}", 'expected a mapping with a "name"'),
        ("a.json", "{}", "expected a name that ends in .yaml, .yml or .toml"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)

    with pytest.raises(ConfigError, match=message):
        sg.Trainer.from_config(tmp_path / name, **CPU)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("STRATAGEM_TRAINER_MAX_EPOCHS", "three", r"max_epochs is 'three' \(environment\)"),
        ("STRATAGEM_TRAINER_MAX_EPOCH", "3", "environment sets 'max_epoch', which is not an argument"),
        ("STRATAGEM_STRATEGY_TIMEOUT", "3", "strategy.single_device.timeout is unknown"),
    ],
)
def test_bad_environments(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)

    with pytest.raises(ConfigError, match=message):
        sg.Trainer(**CPU)


def test_an_option_beside_an_instance_is_refused(monkeypatch):
    monkeypatch.setenv("STRATAGEM_STRATEGY_TIMEOUT", "3")

    with pytest.raises(ConfigError, match=r"strategy.timeout is set \(environment\) and the strategy is an instance"):
        sg.Trainer(strategy=DDPStrategy(), **CPU)


def test_flags_without_values_and_negative_numbers():
    layer, _, _ = from_arguments(["--fast_dev_run", "--max_steps", "-1", "--devices=-1"])

    assert layer.values == {"fast_dev_run": "true", "max_steps": "-1", "devices": "-1"}


@pytest.mark.parametrize(
    ("text", "choice"),
    [("ddp", "ddp"), ("a,b", ["a", "b"]), ('{"name": "x"}', {"name": "x"}), ("false", False), ("None", None)],
)
def test_choices_from_text(text, choice):
    assert parse_choice(text) == choice


def test_check_loads_every_plugin(capsys):
    assert main(["plugins", "check"]) == 0
    said = capsys.readouterr().out
    assert "strategy ddp: loads" in said
    assert "0 do not. Each was imported and its options and hooks were looked at" in said
