"""`stratagem deepspeed` builds ops and measures disks, and says what it cannot do."""

from __future__ import annotations

import json

import pytest

from stratagem.cli import main
from stratagem_deepspeed import command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build-ops", "cpu_adm"], "did you mean 'cpu_adam'"),
        (["tune-nvme", "/nowhere"], "the path to tune is '/nowhere', which is not a folder"),
        (["tune-nvme", "/proc"], "the path to tune is '/proc', which cannot hold what is offloaded"),
        (["tune-nvme", ".", "--size", "much"], "--size is 'much'"),
    ],
)
def test_what_cannot_be_done_is_an_error(arguments, said, capsys):
    assert main(["deepspeed", *arguments]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_compiler_it_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("CXX", "/no/compiler")

    assert main(["deepspeed", "build-ops", "cpu_adagrad"]) == 1
    assert "cpu_adagrad is built on the machine that uses it, and /no/compiler is missing" in capsys.readouterr().err


@pytest.mark.sweep(guard="tests/plugins/test_deepspeed_command.py::test_without_a_compiler_it_says_what_is_missing")
def test_ops_are_built_once(capsys):
    assert main(["deepspeed", "build-ops"]) == 0
    before, after = capsys.readouterr().out.splitlines()

    assert before.startswith("cpu_adam: building")
    assert after.startswith("cpu_adam: ready")
    assert after.endswith("cpu_adam.so")


@pytest.mark.sweep(reason="it compiles async_io and measures a disk")
def test_a_disk_is_measured_and_nothing_left_on_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(command, "_BRIEF_SWEEP", {name: values[:1] for name, values in command._BRIEF_SWEEP.items()})
    disk = tmp_path / "a disk"
    disk.mkdir()

    assert main(["deepspeed", "tune-nvme", str(disk), "--size", "4M", "--json"]) == 0

    found = json.loads(capfd.readouterr().out)
    assert found["read_gb_per_s"] > 0
    assert found["write_gb_per_s"] > 0
    assert found["options"]["thread_count"] == found["aio"]["intra_op_parallelism"]
    from stratagem.strategies import DeepSpeedStrategy

    DeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_optimizer_device="nvme", nvme_path=disk, **found["options"]
    )
    assert list(disk.iterdir()) == []
