"""The doctor lists what is installed and what is broken; broken parts do not stop it, and change its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from programs import scripts
from stratagem.cli import main
from stratagem_devtools import doctor

GOOD = """
    from attrs import define
    from stratagem import Strategy, hookimpl

    @define(eq=False, kw_only=True)
    class Mine(Strategy):
        @hookimpl
        def wrap_model(self, module):
            return module
"""


@pytest.fixture
def no_smoke(monkeypatch):
    monkeypatch.setattr(doctor, "_smoke_run", lambda: {"status": "ok", "reason": "", "seconds": 0.0})


def examined(capsys):
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


def row(report, distribution):
    (found,) = [each for each in report["packages"] if each["distribution"] == distribution]
    return found


#: One worker of pytest-xdist runs what one program reports.
ONE_PROGRAM = pytest.mark.xdist_group("doctor")


@pytest.fixture(scope="module")
def of_the_program(tmp_path_factory):
    """Return the exit code and the report of the program, with torch's description of the machine."""
    command = [sys.executable, "-m", "stratagem", "doctor", "--json", "--machine"]
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("STRATAGEM_", "NCCL_", "GLOO_", "TORCH_NCCL_"))
    }
    folder = tmp_path_factory.mktemp("doctor")
    done = scripts.run(command, cwd=folder, env=others, capture_output=True, text=True, timeout=360)
    return done.returncode, json.loads(done.stdout)


@ONE_PROGRAM
@pytest.mark.slow
def test_a_healthy_machine(of_the_program):
    code, report = of_the_program

    assert (code, report["problems"]) == (0, [])
    assert report["smoke run"]["status"] == "ok"
    assert report["devices"]["cpu"] >= 1
    assert report["backends"]["gloo"] is True
    assert report["torch"]["version"].startswith("2.")
    assert row(report, "stratagem-basics")["plugins"]["precision"] >= 6


@ONE_PROGRAM
@pytest.mark.slow
@pytest.mark.usefixtures("no_smoke")
def test_torch_describes_the_machine_on_request(of_the_program, capsys):
    _, report = of_the_program
    text = doctor.render(report)

    assert report["machine"]["torch_version"] == torch.__version__
    assert f"machine:\n  PyTorch version: {torch.__version__}" in text
    assert "machine" not in examined(capsys)[1]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("while True: pass", "did not finish within 0 s"),
        ("raise SystemExit('no such driver')", "ended with 1: no such driver"),
        ("print('?')", "cannot be run (JSONDecodeError: "),
    ],
)
def test_a_machine_that_cannot_be_described_is_a_remark(monkeypatch, source, reason):
    monkeypatch.setattr(doctor, "_MACHINE", source)
    if reason.startswith("did not finish"):
        monkeypatch.setattr(doctor, "_MACHINE_S", 0.1)

    assert doctor._machine_lines(doctor._machine())[0].removeprefix("torch.utils.collect_env ").startswith(reason)


@pytest.mark.usefixtures("no_smoke")
def test_people_get_the_same_as_text(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("STRATAGEM_API_TOKEN", "s3cret")

    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "  stratagem-ddp 0.1.0: ok (12 strategy)" in text
    assert "  NCCL_DEBUG=INFO" in text
    assert "  STRATAGEM_API_TOKEN=<redacted>" in text
    assert "s3cret" not in text
    assert text.rstrip().endswith("no problems found")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('no such driver')", "RuntimeError: no such driver"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import an_engine_that_is_not_there", "No module named 'an_engine_that_is_not_there'"),
        ("Mine = 5", "'int' object is not callable"),
        (GOOD.replace("wrap_model", "wrap_modell"), "'wrap_modell', which is not a hook; did you mean 'wrap_model'"),
    ],
)
@pytest.mark.usefixtures("no_smoke")
def test_a_broken_package_is_a_finding(install, capsys, source, reason):
    install("acme-broken", {"stratagem.strategy": {"acme": "Mine"}}, source)
    code, report = examined(capsys)

    assert code == 1
    assert row(report, "acme-broken")["status"] == "broken"
    assert reason in row(report, "acme-broken")["reasons"][0]
    assert len(report["problems"]) == 1


@pytest.mark.usefixtures("no_smoke")
def test_a_package_for_another_core_is_told_from_a_broken_one(install, capsys):
    install("acme-old", {"stratagem.strategy": {"acme": "Mine"}}, GOOD, requires=["stratagem<0.1"])
    code, report = examined(capsys)

    assert code == 1
    assert row(report, "acme-old")["status"] == "for another version of the core"
    assert "needs stratagem <0.1" in row(report, "acme-old")["reasons"][0]


@pytest.mark.usefixtures("no_smoke")
def test_the_same_name_from_two_packages(install, capsys):
    install("acme-one", {"stratagem.strategy": {"acme": "Mine"}}, GOOD)
    install("acme-two", {"stratagem.strategy": {"acme": "Mine"}}, GOOD)
    code, report = examined(capsys)

    assert code == 1
    assert row(report, "acme-one")["status"] == "duplicate"
    assert "also in acme-two; use 'acme-one:acme'" in row(report, "acme-one")["reasons"][0]


@pytest.mark.usefixtures("no_smoke")
def test_what_a_list_hides_is_noted_and_not_loaded(install, capsys, monkeypatch):
    install("acme-broken", {"stratagem.strategy": {"acme": "Mine"}}, "raise RuntimeError")
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "acme")
    code, report = examined(capsys)

    assert code == 0
    assert row(report, "acme-broken")["notes"] == ["strategy 'acme' is hidden by STRATAGEM_DISABLE_PLUGINS"]


@pytest.mark.usefixtures("no_smoke")
def test_a_list_that_names_what_is_not_installed_is_a_problem(capsys, monkeypatch):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "peer_diagnosys")
    code, report = examined(capsys)

    assert code == 1
    assert report["problems"] == [
        "STRATAGEM_DISABLE_PLUGINS names 'peer_diagnosys', which is not installed; did you mean 'peer_diagnosis'"
    ]


@pytest.mark.usefixtures("no_smoke")
def test_a_group_that_is_not_a_kind(install, capsys):
    install("acme-typo", {"stratagem.strategies": {"acme": "Mine"}}, GOOD)
    code, report = examined(capsys)

    assert code == 1
    assert "entry-point group stratagem.strategies, which is not a kind" in row(report, "acme-typo")["reasons"][0]


@pytest.mark.usefixtures("no_smoke")
def test_a_command_in_a_group_that_does_not_exist(install, capsys):
    install("acme-typo", {"stratagem.command": {"plugin.acme": "Mine"}}, GOOD)
    code, report = examined(capsys)

    assert code == 1
    assert "command 'plugin.acme' is in the group 'plugin'; the groups are plugins" in report["problems"][0]


@pytest.mark.usefixtures("no_smoke")
def test_an_accelerator_that_cannot_count_is_a_finding_among_the_devices(install, capsys):
    source = """
        from attrs import define
        from stratagem import Accelerator

        @define(eq=False, kw_only=True)
        class Mine(Accelerator):
            def count(self):
                raise OSError("driver mismatch")
    """
    install("acme-device", {"stratagem.accelerator": {"acme": "Mine"}}, source)

    assert examined(capsys)[1]["devices"]["acme"] == "cannot be counted (OSError: driver mismatch)"


def test_processes_that_cannot_talk_are_reported_and_gone(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_SMOKE", "raise SystemExit('no loopback')")
    code, report = examined(capsys)

    assert code == 1
    assert report["smoke run"]["status"] == "failed"
    assert "no loopback" in report["smoke run"]["reason"]


@pytest.mark.slow
def test_processes_that_hang_are_ended(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_SMOKE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "_SMOKE_S", 1.0)
    code, report = examined(capsys)

    assert code == 1
    assert "did not finish" in report["smoke run"]["reason"]


def test_asking_for_it_by_name_leaves_other_commands_quick():
    code = "import sys; from stratagem.cli import main; main(['plugins', 'list']); sys.exit('stratagem_devtools.doctor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "NCCL_TIMEOUT",
            "NCCL documents no such variable; how long ranks wait for each other is the strategy's option `timeout`",
        ),
        ("NCCL_CHECKS_DISABLE", "NCCL documents no such variable; it was dropped; there is check_pointers"),
        ("TORCH_NCCL_BLOCKINGWAIT", "torch documents no such variable; did you mean TORCH_NCCL_BLOCKING_WAIT"),
        ("GLOO_SOCKET_IFACE", "gloo documents no such variable; did you mean GLOO_SOCKET_IFNAME"),
    ],
)
@pytest.mark.usefixtures("no_smoke")
def test_a_variable_that_nobody_reads_is_a_problem(name, advice, capsys, monkeypatch):
    monkeypatch.setenv(name, "1")

    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert f"  {name}=1 ({advice})" in text
    assert f"  {name} is set and {advice}" in text


@pytest.mark.usefixtures("no_smoke")
def test_what_a_network_plugin_may_read_is_noted_and_what_is_known_is_not(capsys, monkeypatch):
    known = (
        "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_GLOO_LAZY_INIT",
    )  # fmt: skip
    for name in (*known, "NCCL_FASTRAK_CTRL_DEV", "NCCL_NSOCKS_PER_THREAD"):
        monkeypatch.setenv(name, "1")
    code, report = examined(capsys)

    assert (code, report["problems"]) == (0, [])
    assert report["remarks"] == {
        "NCCL_FASTRAK_CTRL_DEV": "NCCL documents no such variable; a network plugin may read it",
        "NCCL_NSOCKS_PER_THREAD": "NCCL documents no such variable; did you mean NCCL_NSOCKS_PERTHREAD",
    }
    assert set(known) <= set(report["environment"])


@pytest.mark.usefixtures("no_smoke")
def test_it_explains_which_environment_is_chosen(capsys, monkeypatch):
    """torchrun in the script of a batch job: it wins, and what lost is listed with the reason."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    code, report = examined(capsys)
    text = doctor.render(report)

    assert (code, report["environments"]["chosen"]) == (0, "torchelastic")
    assert "  torchelastic: chosen, certain (TORCHELASTIC_RUN_ID is 'x')" in text
    assert "  slurm: in job (SLURM_JOB_ID is '7' and " in text
    assert "; not chosen: torchelastic is certain, and this one is in job" in text
    assert "  mpi: not present (none of its variables is set)" in text


@pytest.mark.usefixtures("no_smoke")
def test_environments_that_contradict_each_other_are_a_problem(capsys, monkeypatch):
    variables = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    step = {"STEP_ID": "0", "PROCID": "3", "LOCALID": "3", "NODEID": "0", "STEP_NUM_TASKS": "4"}
    for name, value in (variables | {f"SLURM_{name}": value for name, value in step.items()}).items():
        monkeypatch.setenv(name, value)
    code, report = examined(capsys)

    assert (code, report["environments"]["chosen"]) == (1, None)
    assert any("they contradict each other: 2 and 4 processes" in problem for problem in report["problems"])


@pytest.mark.usefixtures("no_smoke")
def test_an_environment_whose_detection_fails_is_a_problem(install, capsys):
    install("acme-cluster", {"stratagem.environment": {"acme": "Acme"}}, """
    from attrs import define
    from stratagem import Environment, World, hookimpl

    @define(eq=False, kw_only=True)
    class Acme(Environment):
        def detect(self):
            return "always"

        @hookimpl
        def setup_environment(self, run):
            return World()
    """)  # fmt: skip
    code, report = examined(capsys)

    assert "environment 'acme': its detect() returned 'always' and not an Evidence" in report["problems"]
    assert (code, report["environments"]["chosen"]) == (1, "local")
