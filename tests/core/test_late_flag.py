"""Ranks tell each other whether something has ended, and no step waits for the answer."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import stratagem as sg
from stratagem.api.readback import LateFlag
from stratagem.distributed.process_group import TorchCollectives
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches
from stratagem_testing.training import EveryBatch

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: Each waits for all ranks.
WAITING = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object", "any", "barrier")


def _answers(rank, world_size):
    with sg.Run(strategy="ddp", devices=world_size, accelerator="cpu") as run:
        flag = LateFlag(run.collectives)
        found = [flag.read()]  # none was sent
        flag.send(rank == 1)
        found += [flag.read(), flag.read()]
        return [*found, *(flag.exchange(rank == 0 and step == 1) for step in range(4))]


def test_an_answer_is_read_once_when_the_next_flag_is_sent():
    for answers in run_in_processes(_answers, 2):
        assert answers == [False, True, False, False, False, True, False]


def test_one_rank_knows_at_once():
    with sg.Run(accelerator="cpu") as run:
        flag = LateFlag(run.collectives)
        assert [flag.exchange(step == 1) for step in range(3)] == [False, True, False]


def _steps_without_time(rank, world_size):
    trainer = sg.Trainer(strategy="ddp", devices=world_size, max_time=0, **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    return trainer.global_step


def test_without_time_several_ranks_train_no_step_as_one_rank_does():
    assert run_in_processes(_steps_without_time, 2) == [0, 0]


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = list(zip(*data(samples), strict=True))

    def __iter__(self):
        return iter(self.samples)


class Drawn(IterableDataset):
    """Draws samples from the generator that the model draws from."""

    def __iter__(self):
        for _ in range(6):
            x = torch.randn(4, 16)
            yield x, x.sum(1, keepdim=True)


class Noting(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(float(batch[0].sum() + torch.rand(())))
        return super().training_step(batch, batch_idx)


def _seen(rank, world_size, strategy, path, resumes):
    save = EveryBatch(lambda trainer: trainer.global_step == 2 and trainer.save_checkpoint(path))
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, max_epochs=2, callbacks=[] if resumes else [save], checkpoint="sharded",
        **QUIET,
    )  # fmt: skip
    torch.manual_seed(3)
    module = Noting()
    trainer.fit(module, DataLoader(Drawn(), batch_size=None), ckpt_path=path if resumes else None)
    return module.seen


@pytest.mark.slow
def test_one_process_reads_as_far_ahead_as_several(tmp_path):
    path, tensor = tmp_path / "x.ckpt", {"name": "parallel", "tensor": 2}
    whole, _ = run_in_processes(_seen, 2, tensor, path, False)
    (rest,) = run_in_processes(_seen, 1, "auto", path, True)
    assert len(rest) == 10
    assert rest == whole[2:]


def _steps(rank, world_size, path):
    """Return how often each step of a fit calls what waits; its loader is longer on rank 0."""
    calls = []

    def counted(name):
        plain = getattr(TorchCollectives, name)

        def call(self, *arguments, **options):
            if threading.current_thread() is threading.main_thread():
                calls.append(name)
            return plain(self, *arguments, **options)

        return call

    count = EveryBatch(lambda trainer: len(calls))
    save = EveryBatch(lambda trainer: trainer.global_step == 2 and trainer.save_checkpoint(path))
    trainer = sg.Trainer(
        strategy="ddp", devices=world_size, max_epochs=1, max_time={"hours": 1}, callbacks=[save, count],
        checkpoint={"name": "sharded", "async_save": True}, **QUIET,
    )  # fmt: skip
    loader = DataLoader(Stream(8 * (12 if rank == 0 else 10)), 8)
    for name in WAITING:
        setattr(TorchCollectives, name, counted(name))
    trainer.fit(Net(), loader)
    return [after - before for before, after in zip(count.results, count.results[1:], strict=False)]


@pytest.mark.slow
def test_no_step_waits_to_learn_whether_a_loader_a_save_or_the_time_has_ended(tmp_path):
    """The second step saves."""
    for calls in run_in_processes(_steps, 2, tmp_path / "x.ckpt"):
        assert len(calls) == 9
        assert calls[0] > 0
        assert calls[1:] == [0] * 8
