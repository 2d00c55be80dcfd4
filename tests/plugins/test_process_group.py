"""Options for NCCL and gloo reach them in time, are checked before anything starts, and leave no variable behind."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from attrs import define

import stratagem as sg
from programs import scripts
from stratagem.api.options import options
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy
from stratagem_process_group import ProcessGroupStrategy, group_options_after, nccl, variables
from stratagem_process_group.remarks import remarks
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_plainly
from stratagem_testing.training import weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
STRATEGIES = ["ddp", "fsdp", "ddp_sharded"]


@pytest.fixture(autouse=True)
def nothing_was_read_yet(monkeypatch):
    """Each test begins as a process whose NCCL and gloo have read no variable, and that has none of theirs."""
    monkeypatch.setattr(variables, "_first", {})
    for name in tuning_variables():
        monkeypatch.delenv(name)


def tuning_variables():
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "GLOO_", "TORCH_GLOO"))}


def a_run(**options):
    return sg.Run(strategy={"name": "ddp", **options}, devices=2, accelerator="cpu")


def connect(run, backend="nccl"):
    """Let `run` set its variables as if it met others over `backend`; return those in force then."""
    with variables.variables_set(run.stack.strategy, run, backend):
        return tuning_variables()


# --- Before any process starts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("library", "options", "said"),
    [
        ("nccl", {"nsocks_per_thread": 4}, "nccl.nsocks_per_thread is unknown; expected a variable of NCCL, in lower "
         "case and without NCCL_; did you mean 'nsocks_perthread'"),
        ("nccl", {"NCCL_DEBUG": "INFO"}, "nccl.NCCL_DEBUG is unknown; .* did you mean 'debug'"),
        ("nccl", {"timeout": 60}, "nccl.timeout is unknown; .* the strategy's option `timeout`"),
        ("nccl", {"blocking_wait": True}, "nccl.blocking_wait is unknown; .* set TORCH_NCCL_BLOCKING_WAIT in the environment"),
        ("nccl", {"min_nchannels": "8"}, "nccl.min_nchannels is '8'; expected a whole number"),
        ("nccl", {"min_nchannels": True}, "nccl.min_nchannels is True; expected a whole number"),
        ("nccl", {"ib_disable": 2}, "nccl.ib_disable is 2; expected true or false"),
        ("nccl", {"debug": "LOUD"}, "nccl.debug is 'LOUD'; expected 'VERSION' or 'WARN' or 'INFO' or 'TRACE'"),
        ("nccl", {"socket_nthreads": 17}, "nccl.socket_nthreads is 17; expected a whole number from 1 to 16"),
        ("nccl", {"socket_nthreads": 16, "nsocks_perthread": 8}, "nccl asks for 16 socket_nthreads of 8 nsocks_perthread; expected a product of at most 64"),
        ("nccl", {"min_nchannels": 8, "max_nchannels": 4}, "nccl.min_nchannels is 8; expected at most max_nchannels"),
        ("nccl", {"socket_ifname": " "}, "nccl.socket_ifname is ' '; expected text"),
        ("nccl", "debug", "nccl is 'debug'; expected a mapping"),
        ("gloo", {"socket_iface": "lo"}, "gloo.socket_iface is unknown; .* did you mean 'socket_ifname'"),
        ("gloo", {"timeout": 60}, "gloo.timeout is unknown; .* the strategy's option `timeout`"),
        ("gloo", {"lazy_init": "yes"}, "gloo.lazy_init is 'yes'; expected true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_when_the_strategy_is_built(strategy, library, options, said):
    with pytest.raises(ConfigError, match=rf"^strategy\.{strategy}\.{said}"):
        sg.Trainer(strategy={"name": strategy, library: options}, devices=2, **QUIET)


def test_options_may_come_as_text(monkeypatch):
    monkeypatch.setenv("STRATAGEM_STRATEGY_NCCL", '{"min_nchannels": 8, "debug": "WARN", "p2p_disable": true}')
    strategy = sg.Trainer(strategy="ddp", devices=2, **QUIET).strategy

    assert strategy.nccl == {"min_nchannels": 8, "debug": "WARN", "p2p_disable": True}


@define(eq=False, kw_only=True, field_transformer=group_options_after("depth"))
class _Pipeline(ProcessGroupStrategy):
    #: Micro-batches in flight.
    depth: int = 2
    #: In which order they are computed.
    schedule: str = "1f1b"


def test_a_strategy_of_ones_own_has_the_options_where_it_wants_them():
    assert [*options(_Pipeline)] == [
        "depth",
        "timeout",
        "start_timeout",
        "process_group_backend",
        "nccl",
        "gloo",
        "schedule",
    ]
    assert _Pipeline(timeout=5).timeouts() == (None, timedelta(seconds=5))
    assert _Pipeline(start_timeout=5).timeouts() == (timedelta(seconds=5), None)
    with pytest.raises(ConfigError, match=r"^_Pipeline\.nccl\.debug is 'LOUD'"):
        _Pipeline(nccl={"debug": "LOUD"})


@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [
        ({}, "0", False), ({"process_group_backend": "nccl"}, "0", False), ({"process_group_backend": "gloo"}, "0", True),
        ({"nccl": {"multi_rank_gpu_enable": 1}}, "0", True), ({}, "1", True),
        ({"nccl": {"multi_rank_gpu_enable": 0}}, "1", False),
    ],
)  # fmt: skip
def test_ranks_share_a_gpu_only_if_the_user_has_asked_for_it(monkeypatch, options, variable, expected):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)

    assert DDPStrategy(**options).may_share_device() == expected


# --- The installed release ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "options", "said"),
    [
        ((2, 28, 9), {"multi_rank_gpu_enable": 1}, "is 1 and NCCL is of release 2.28.9, which does not read it; expected 2.30 or"),
        ((2, 27, 5), {"debug": "INFO", "env_plugin": "x"}, "nccl.env_plugin is 'x' and NCCL is of release 2.27.5, .* 2.28.7 or later"),
        ((2, 30, 3), {"multi_rank_gpu_enable": 1, "env_plugin": "x"}, None),
        ((2, 27, 5), {"debug": "INFO"}, None), (None, {"multi_rank_gpu_enable": 1}, None),
    ],
)  # fmt: skip
def test_options_that_the_installed_release_does_not_read_are_refused(monkeypatch, installed, options, said):
    monkeypatch.setattr(nccl, "_installed_nccl", lambda: installed)
    run = a_run(nccl=options)
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        assert len(connect(run)) == len(options)
    variables.unset_variables(run)
    assert tuning_variables() == {}


def test_a_variable_that_the_installed_release_does_not_read_is_remarked(monkeypatch):
    monkeypatch.setattr(nccl, "_installed_nccl", lambda: (2, 28, 9))
    found = remarks(["NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_ENV_PLUGIN"])

    assert list(found) == ["NCCL_MULTI_RANK_GPU_ENABLE"]
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"].text == "NCCL 2.28.9 does not read it; 2.30 is the first that does"


def test_the_release_is_that_of_the_library_which_is_loaded(monkeypatch):
    assert torch.distributed.is_nccl_available() or nccl._installed_nccl() is None

    class Library:
        def ncclGetVersion(self, number):  # noqa: N802 - NCCL's
            number._obj.value = 22809

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert nccl._installed_nccl() == (2, 28, 9)

    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5, "suffix"))
    assert nccl._installed_nccl() == (2, 27, 5)


# --- In force ----------------------------------------------------------------------------------------------------


def test_options_become_variables_and_are_taken_back():
    run = a_run(
        nccl={"nsocks_perthread": 4, "socket_nthreads": 2, "debug": "INFO", "p2p_disable": True, "ib_disable": 0},
        gloo={"lazy_init": False, "log_level": "WARN"},
    )

    assert connect(run) == {
        "GLOO_LOG_LEVEL": "WARN",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_DISABLE": "0",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "2",
        "TORCH_GLOO_LAZY_INIT": "0",
    }
    variables.unset_variables(run)
    variables.unset_variables(run)
    assert tuning_variables() == {}


def test_nothing_stays_of_a_connection_that_failed():
    run = a_run(nccl={"debug": "INFO"})
    with (
        pytest.raises(OSError, match="no route"),
        variables.variables_set(run.stack.strategy, run, "nccl"),
    ):
        raise OSError("no route")

    assert tuning_variables() == {}


def test_the_same_value_in_the_environment_is_fine_and_stays(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    run = a_run(nccl={"debug": "INFO", "min_nchannels": 2})

    assert connect(run) == {"NCCL_DEBUG": "INFO", "NCCL_MIN_NCHANNELS": "2"}
    variables.unset_variables(run)
    assert tuning_variables() == {"NCCL_DEBUG": "INFO"}


def test_another_value_in_the_environment_is_refused_with_both_origins(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    run = a_run(nccl={"min_nchannels": 2, "debug": "INFO"})

    with pytest.raises(
        ConfigError, match=r"strategy.ddp.nccl.debug is 'INFO' and NCCL_DEBUG was set to 'WARN' in the environment"
    ):
        connect(run)
    assert tuning_variables() == {"NCCL_DEBUG": "WARN"}


def test_another_value_of_an_open_run_is_refused_with_its_option():
    first, second = a_run(nccl={"debug": "INFO"}), a_run(nccl={"debug": "WARN"})
    connect(first)

    with pytest.raises(ConfigError, match=r"set to 'INFO' by strategy.ddp.nccl.debug of a run that is still open"):
        connect(second)
    variables.unset_variables(first)
    assert tuning_variables() == {}


@pytest.mark.parametrize("earlier", [None, {"debug": "INFO"}])
def test_what_nccl_has_read_already_cannot_be_changed(earlier):
    first, same, other = a_run(nccl=earlier), a_run(nccl=earlier), a_run(nccl={"debug": "WARN"})
    for run in (first, same):
        connect(run)
        variables.unset_variables(run)

    with pytest.raises(ConfigError, match=r"when this process first connected, which NCCL goes by"):
        connect(other)
    assert tuning_variables() == {}


@pytest.mark.parametrize("value", ["lo", "l", "=lo", "lo,nosuch", "^docker", "^lo"])
def test_nccl_may_choose_interfaces_by_pattern(value):
    run = a_run(nccl={"socket_ifname": value})

    assert connect(run) == {"NCCL_SOCKET_IFNAME": value}
    variables.unset_variables(run)


@pytest.mark.parametrize(
    "options",
    [
        {"nccl": {"socket_ifname": "nosuch"}},
        {"nccl": {"socket_ifname": "=l"}},
        {"gloo": {"socket_ifname": "l"}},
        {"gloo": {"socket_ifname": "lo,nosuch"}},
    ],
)
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(options):
    with pytest.raises(ConfigError, match=r"socket_ifname is '.*' and .* has the network interfaces .*\blo\b"):
        connect(a_run(**options))


# --- In real processes -------------------------------------------------------------------------------------------


def _fit(rank, world_size, strategy, batches, options):
    trainer = sg.Trainer(max_epochs=1, strategy={"name": strategy, **options}, devices=world_size, **QUIET)
    try:
        trainer.fit(Net(), part(batches, rank, world_size))
    except ConfigError as error:
        return str(error), tuning_variables(), None
    weights, during = weights_of(trainer), tuning_variables()
    trainer.close()
    return during, tuning_variables(), weights


def _second_run(rank, world_size):
    first = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    first.connect()
    said = []
    for name in ("another", "lo"):
        second = sg.Run(strategy=DDPStrategy(gloo={"socket_ifname": name}), devices=world_size, accelerator="cpu")
        try:
            second.connect()
            said.append(tuning_variables())
        except ConfigError as error:
            said.append(str(error))
            first.close()
    second.close()
    return said, tuning_variables()


BATCHES = joined_batches(4, 16)
#: Keeps the tests that share two processes on one worker.
SHARED = pytest.mark.xdist_group("options of process groups")


@functools.cache
def in_real_processes():
    """Return what each of two ranks found: as a second run, and with options of gloo and of NCCL by strategy."""
    return run_in_processes(_all, 2)


def _all(rank, world_size):
    return {
        "second run": _second_run(rank, world_size),
        "gloo": {name: _fit(rank, world_size, name, BATCHES, {"gloo": {"socket_ifname": "lo"}}) for name in STRATEGIES},
        "nccl": {name: _fit(rank, world_size, name, BATCHES, {"nccl": {"debug": "INFO"}}) for name in STRATEGIES},
    }


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_trains_with_gloos_options_and_leaves_none(strategy):
    reference, _ = train_plainly(BATCHES)

    for found in in_real_processes():
        during, after, weights = found["gloo"][strategy]
        assert (during, after) == ({"GLOO_SOCKET_IFNAME": "lo"}, {})
        assert relative_difference(weights, reference) < 1e-6


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nccls_options_without_nccl_are_refused_on_all_ranks(strategy):
    for found in in_real_processes():
        said, after, _ = found["nccl"][strategy]
        assert said == (
            f"strategy.{strategy}.nccl is set and the process group's backend is 'gloo'; expected NCCL; drop it, or "
            "train on CUDA devices."
        )
        assert after == {}


@pytest.mark.slow
@SHARED
def test_a_run_beside_an_open_one_is_refused_and_may_come_after_it():
    for found in in_real_processes():
        (refused, accepted), after = found["second run"]
        assert "strategy.ddp.gloo.socket_ifname is 'another' and " in refused
        assert (accepted, after) == ({"GLOO_SOCKET_IFNAME": "lo"}, {})


SCRIPT = """
import os
import stratagem as sg

def attempt(**options):
    run = sg.Run(strategy={"name": "ddp", "gloo": options}, devices=1, accelerator="cpu")
    try:
        run.connect()
        run.close()
        print("connected", [name for name in os.environ if "GLOO" in name])
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

attempt(log_level="INFO", socket_ifname="lo")
attempt(log_level="WARN")
attempt(log_level="INFO")
"""


@pytest.mark.slow
def test_gloo_reads_what_was_set_and_later_values_are_refused():
    """In a process of its own, as gloo reads once in the life of a process."""
    done = scripts.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=180, check=True)

    first, second, third = done.stdout.splitlines()
    assert "INFO Rank 0 is connected" in done.stderr
    assert (first, third) == ("connected []", "connected []")
    assert "ConfigError: strategy.ddp.gloo.log_level is 'WARN' and it was 'INFO' when this process first" in second
