"""Peer diagnosis is in every run where it is installed, once, and a run goes on without it."""

from __future__ import annotations

import os
import pickle
import sys
import threading

import pytest
import torch

import stratagem as sg
from stratagem.api.group_services import KeyValueStore
from stratagem.errors import PeerError, is_echo
from stratagem_evidence import EVIDENCE_VARIABLE, read_all
from stratagem_evidence.ring import read_ring
from stratagem_peer_diagnosis import PeerDiagnosis
from stratagem_peer_diagnosis.failure_reports import FailureReports
from stratagem_testing import run_in_processes

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def _chosen(stack):
    return [choice.plugin for choice in stack.active() if isinstance(choice.plugin, PeerDiagnosis)]


def test_every_run_has_it_and_no_list_of_callbacks_shows_it():
    trainer, run = sg.Trainer(enable_model_summary=False, **QUIET), sg.Run(accelerator="cpu")

    assert len(_chosen(trainer.run.stack)) == len(_chosen(run.stack)) == 1
    assert trainer.callbacks == ()
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


class _Phases(sg.Module):
    """Reads in each hook what the evidence of its rank says that it is doing."""

    def __init__(self, folder):
        super().__init__()
        self.net, self.folder, self.seen = torch.nn.Linear(2, 1), folder, {}

    def look(self, name):
        (known,) = [each for each in read_all(self.folder).values() if each.process == os.getpid()]
        self.seen[name] = known.phase.name

    def training_step(self, batch, batch_idx):
        self.look("training_step")
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.look("validation_step")

    def test_step(self, batch, batch_idx):
        self.look("test_step")

    def predict_step(self, batch, batch_idx):
        self.look("predict_step")

    def setup(self, stage):
        self.look(f"setup for {stage}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        self.look("on_save_checkpoint")

    def on_train_end(self):
        self.look("on_train_end")

    def on_fit_end(self):
        self.look("on_fit_end")


class _SavesInTheMiddle(sg.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(module.folder / "middle.ckpt")
        module.look("a save in training")


def _see_phases(rank, world_size, folder):
    os.environ[EVIDENCE_VARIABLE] = str(folder)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    module = _Phases(folder)
    trainer = sg.Trainer(
        strategy="ddp",
        devices=world_size,
        max_epochs=1,
        enable_model_summary=False,
        callbacks=[_SavesInTheMiddle()],
        **QUIET,
    )
    trainer.fit(module, loader)
    module.look("fit")
    trainer.save_checkpoint(folder / "after.ckpt")
    module.look("a save after fit")
    for call in (trainer.validate, trainer.test, trainer.predict):
        call(module, loader)
        module.look(call.__name__)
    return module.seen


@pytest.mark.slow
def test_evidence_tells_the_phase_also_between_and_after_calls_of_the_trainer(tmp_path):
    for seen in run_in_processes(_see_phases, 2, tmp_path, limit_s=180):
        assert seen == {
            "setup for fit": "setup", "training_step": "training_step", "on_save_checkpoint": "save_checkpoint",
            "a save in training": "next batch", "on_train_end": "code after training",
            "on_fit_end": "code after training", "fit": "code after training",
            "a save after fit": "code after training",
            "setup for validate": "setup", "validation_step": "validation", "validate": "code after training",
            "setup for test": "setup", "test_step": "test", "test": "code after training",
            "setup for predict": "setup", "predict_step": "predict", "predict": "code after training",
        }  # fmt: skip


def _see_own_loop(rank, world_size, folder):
    os.environ[EVIDENCE_VARIABLE] = str(folder)
    run, seen = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu"), []
    model = torch.nn.Linear(2, 1)
    model, _ = run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2)).sum()
    loss.register_hook(lambda _: seen.append(read_ring(folder / f"{rank}.ring").phase.name))
    run.backward(loss)
    return [*seen, read_ring(folder / f"{rank}.ring").phase.name]


@pytest.mark.slow
def test_a_loop_of_ones_own_is_in_backward_no_longer_than_that(tmp_path):
    assert run_in_processes(_see_own_loop, 2, tmp_path, limit_s=180) == [["backward", "setup"]] * 2


def _train_in_turns(rank, world_size, folder):
    os.environ[EVIDENCE_VARIABLE] = str(folder)
    loader, seen = torch.utils.data.DataLoader(torch.ones(4, 2)), []
    shared = PeerDiagnosis()
    first, second = (
        sg.Trainer(
            strategy="ddp", devices=world_size, max_epochs=1, enable_model_summary=False, callbacks=[shared], **QUIET
        )
        for _ in range(2)
    )  # fmt: skip
    first.validate(_Phases(folder), loader)
    for trainer in (second, first):
        module = _Phases(folder)
        trainer.fit(module, loader)
        seen.append(module.seen["training_step"])
    return seen


@pytest.mark.slow
def test_two_trainers_with_the_same_instance_train_in_turns(tmp_path):
    assert run_in_processes(_train_in_turns, 2, tmp_path, limit_s=180) == [["training_step"] * 2] * 2


class _OneStore:
    """What ranks share."""

    def __init__(self):
        self.store = KeyValueStore()

    def key_value_store(self, shared=False):
        return self.store


def test_the_first_report_stands():
    reports = FailureReports(_OneStore())
    reports.write("rank 1 failed")
    reports.write("rank 2 failed")

    assert reports.read(0.1).found == "rank 1 failed"


def test_ranks_that_read_a_finding_tell_what_to_do_too(tmp_path):
    store, lost = _OneStore(), _OneStore()
    finding = PeerError(
        "rank 0 has heard nothing from rank 1", expected="an answer", do="make the same calls on all ranks"
    )
    FailureReports(store, folder=tmp_path).write_finding(finding)

    for reports in (FailureReports(store), FailureReports(lost, folder=tmp_path)):
        assert str(reports.read(0.1)) == "rank 0 has heard nothing from rank 1; make the same calls on all ranks."
