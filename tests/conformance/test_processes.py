"""`run_in_processes` brings every end of a process home, and never hangs."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from stratagem_testing import ProcessesFailed, run_in_processes


def test_results_come_in_rank_order_from_processes_of_their_own():
    ranks = run_in_processes(lambda rank, size, word: (rank, size, word, os.getpid()), 3, "a")

    assert [(rank, size, word) for rank, size, word, _ in ranks] == [(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]
    assert len({pid for *_, pid in ranks} | {os.getpid()}) == 4


def _die(rank, size, how):
    if rank == 1:
        how()
    return rank


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: os._exit(0), r"ranks \[1\] left without a result"),
        (lambda: os._exit(9), "rank 1 ended with 9"),
        (os.abort, "rank 1 ended with -6"),
    ],
    ids=["error", "exit", "quiet exit", "exit code", "abort"],
)
def test_every_way_to_die_is_reported(how, message):
    with pytest.raises(ProcessesFailed, match=message):
        run_in_processes(_die, 2, how)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(ProcessesFailed, match="pickle"):
        run_in_processes(lambda rank, size: lambda: rank, 2)


def _hang(rank, size):
    if rank:
        time.sleep(600)
    return os.getpid()


@pytest.mark.slow
def test_a_hang_ends_at_the_limit_and_says_where():
    with pytest.raises(ProcessesFailed, match=r"ranks \[1\] were still running(.|\n)*in _hang"):
        run_in_processes(_hang, 2, limit_s=1)


def _echo(rank, size):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_the_root_cause_comes_first_and_its_echo_is_short():
    with pytest.raises(ProcessesFailed) as caught:
        run_in_processes(_echo, 2)
    text = str(caught.value)

    assert text.splitlines()[1] == "--- rank 1"
    assert "ValueError: the cause" in text
    assert text.count("Traceback") == 1


def test_it_works_from_another_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(run_in_processes(lambda rank, size: rank, 2)))
    thread.start()
    thread.join()

    assert results == [[0, 1]]


def test_no_processes_are_refused():
    with pytest.raises(ValueError, match="world_size is 0"):
        run_in_processes(_hang, 0)


def test_an_unset_plugin_is_named():
    from stratagem.errors import ConfigError
    from stratagem_testing import StrategyConformance

    with pytest.raises(ConfigError, match="StrategyConformance.plugin is None"):
        StrategyConformance().test_it_is_a_plugin_of_its_kind()


def test_the_pytest_plugin_imports_no_torch():
    import subprocess

    code = "import sys, stratagem_testing.pytest_plugin; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
