"""Peer diagnosis is in every run where it is installed, once, and a run goes on without it."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest

import stratagem as sg
from stratagem.api.peer_errors import is_echo
from stratagem.errors import PeerError
from stratagem_peer_diagnosis import PeerDiagnosis
from stratagem_testing import run_in_processes

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _chosen(stack):
    return [choice.plugin for choice in stack.active() if isinstance(choice.plugin, PeerDiagnosis)]


def test_every_run_has_it_and_no_list_of_callbacks_shows_it():
    trainer, run = sg.Trainer(enable_model_summary=False, **QUIET), sg.Run(accelerator="cpu")

    assert len(_chosen(trainer.run.stack)) == len(_chosen(run.stack)) == 1
    assert trainer.callbacks == []
    assert "callback peer_diagnosis" in run.explain()


@pytest.mark.parametrize(
    "choose",
    [
        {"callbacks": "peer_diagnosis"},
        {"callbacks": {"name": "Stratagem-Callbacks:peer_diagnosis"}},
        {"plugins": [PeerDiagnosis()]},
    ],
)
def test_a_listed_one_takes_the_place_of_that_one(choose):
    assert len(_chosen(sg.Trainer(**choose, **QUIET).run.stack)) == 1


def test_a_broken_package_is_left_out_with_a_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "stratagem_peer_diagnosis", None)
    with pytest.warns(UserWarning, match="without it: callback 'peer_diagnosis' of stratagem-callbacks 0.1.0 cannot"):
        run = sg.Run(accelerator="cpu")

    assert run.stack.automatic == []


def _fail_on_rank_1(rank, world_size):
    run = sg.Run(strategy={"name": "ddp", "timeout": 30}, devices=world_size, accelerator="cpu")
    with pytest.raises(Exception) as caught, run:
        run.collectives.barrier()
        if rank == 1:
            raise ValueError("no such file")
        run.collectives.barrier()
    return type(caught.value).__name__, str(caught.value), is_echo(caught.value)


@pytest.mark.slow
def test_without_it_errors_are_raised_as_they_are(monkeypatch):
    monkeypatch.setenv("STRATAGEM_DISABLE_PLUGINS", "peer_diagnosis")
    (kind, _, is_echoed), theirs = run_in_processes(_fail_on_rank_1, 2, limit_s=180)

    assert theirs == ("ValueError", "no such file", False)
    assert kind != PeerError.__name__
    assert is_echoed


def test_it_leaves_ports_and_threads_behind_where_it_is_pickled():
    diagnosis = PeerDiagnosis()
    diagnosis.endpoints = diagnosis.watchdog = threading.Lock()
    copy = pickle.loads(pickle.dumps(diagnosis))

    assert copy.endpoints is copy.watchdog is None
