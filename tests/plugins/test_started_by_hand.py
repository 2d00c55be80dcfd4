"""Processes that the user started, with RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from attrs import define

import stratagem as sg
from ports import free_port
from programs import scripts
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy
from stratagem_testing import run_in_processes


@pytest.fixture
def port():
    return free_port()


TRAINERS = """
    import stratagem as sg
    from stratagem_testing.reference import Net, joined_batches

    QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    model = Net()
    for stage in ("fit", "test", "fit"):
        trainer = sg.Trainer(max_epochs=1, strategy={"name": "ddp", "timeout": 60}, devices=2, **QUIET)
        getattr(trainer, stage)(model, joined_batches(3, 8))
        print(trainer.global_rank, stage)
        trainer.close()
        del trainer
"""


@pytest.mark.slow
def test_trainers_may_follow_one_another(tmp_path, port):
    """Rank 0 hosts the store; another rank asks for the next one before rank 0 is there."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(TRAINERS))
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        scripts.Popen(
            [sys.executable, str(path)], env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=360)
        assert output.splitlines() == [f"{rank} fit", f"{rank} test", f"{rank} fit"], errors


@pytest.mark.every_push("fork")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "spawn"])
def test_a_port_that_was_given_serves_one_launch_after_another(tmp_path, port, launcher):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(f"""
        import stratagem as sg

        def rank(run):
            return run.world.main_port

        if __name__ == "__main__":
            for _ in range(2):
                run = sg.Run(strategy="ddp", launcher={launcher!r}, devices=2, accelerator="cpu")
                print("PORT", run.launch(rank))
        """)
    )
    done = scripts.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=360, check=False,
        env=os.environ | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert done.stdout.splitlines() == [f"PORT {port}"] * 2, done.stderr


# --- An address that nobody knows --------------------------------------------------------------------------------

NOWHERE = "no-such-host.invalid"


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "num_nodes"), [("fork", 1), ("subprocess", 1), ("fork", 2)])
def test_an_address_that_cannot_be_resolved_is_refused_before_anything_starts(monkeypatch, launcher, num_nodes):
    monkeypatch.setenv("MASTER_ADDR", NOWHERE)
    if num_nodes == 2:
        monkeypatch.setenv("MASTER_PORT", "1234")
        monkeypatch.setenv("NODE_RANK", "0")
    strategy = {"name": "ddp", "start_timeout": 2}
    run = sg.Run(strategy=strategy, launcher=launcher, devices=2, num_nodes=num_nodes, accelerator="cpu")
    with pytest.raises(ConfigError, match=f"MASTER_ADDR is '{NOWHERE}', which this machine cannot resolve"):
        run.launch(lambda run: None)


def _meet_nowhere(rank, world_size):
    os.environ |= {"MASTER_ADDR": NOWHERE, "STRATAGEM_STORE_HOSTED": "0"}
    begun = time.monotonic()
    try:
        sg.Run(strategy={"name": "ddp", "start_timeout": 2}, devices=world_size, accelerator="cpu").connect()
    except ConfigError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0


def test_an_address_that_cannot_be_resolved_is_refused_in_processes_that_exist():
    for said, took_s in run_in_processes(_meet_nowhere, 2):
        assert said.startswith(f"MASTER_ADDR is '{NOWHERE}', which this machine cannot resolve (")
        assert took_s < 2 + 60


# --- A strategy that connects in its own way ---------------------------------------------------------------------


@define(eq=False, kw_only=True)
class _Env(DDPStrategy):
    """Joins as torch's own scripts do, at the port where the ranks have met."""

    @sg.hookimpl
    def connect(self, world, run):
        torch.distributed.init_process_group("gloo")
        return super().connect(world, run)


def _connect_by_env(rank, world_size, port):
    os.environ |= {"MASTER_PORT": str(port), "STRATAGEM_STORE_HOSTED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with sg.Run(strategy=_Env(timeout=30), devices=world_size, accelerator="cpu") as run:
        total = float(run.collectives.all_reduce(torch.tensor(rank + 1.0), "sum"))
    torch.distributed.destroy_process_group()
    return total


def test_a_strategy_may_join_at_the_port_where_the_ranks_have_met(port):
    assert run_in_processes(_connect_by_env, 2, port) == [3.0, 3.0]
