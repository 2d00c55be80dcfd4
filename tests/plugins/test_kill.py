"""A run that is killed at any moment, training or saving, resumes from a whole checkpoint."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoints import FullCheckpoint
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.checkpoint_files import newest_complete


class Wide(Net):
    """Large enough for a save to take a while."""

    def __init__(self):
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.zeros(500_000))


def train(folder, resume):
    trainer = sg.Trainer(
        max_epochs=-1, default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False,
        callbacks=ModelCheckpoint(every_n_train_steps=1, save_last=True),
    )  # fmt: skip
    trainer.fit(Wide(), joined_batches(50, 8), ckpt_path="last" if resume else None)


def wait_for_another(folder, limit_s=90):
    """Wait until there is a whole checkpoint that was not there before."""
    before, deadline = set(folder.glob("*.ckpt")), time.monotonic() + limit_s
    while not set(folder.glob("*.ckpt")) - before or newest_complete(folder, FullCheckpoint()) is None:
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.01)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path):
    torch.set_num_threads(1)
    randomness, steps = random.Random(4), []
    for attempt in range(20):
        child = os.fork()
        if not child:
            gc.freeze()
            torch.set_num_threads(1)
            try:
                train(tmp_path, resume=attempt > 0)
            finally:
                os._exit(1)
        if attempt % 4 == 0:  # the others may be killed before they save anything
            wait_for_another(tmp_path / "checkpoints")
        time.sleep(randomness.uniform(0.15, 0.6))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it was not killed: it could not resume"
        whole = newest_complete(tmp_path / "checkpoints", FullCheckpoint())
        assert whole is not None
        steps.append(torch.load(whole, weights_only=True)["loop"]["global_step"])

    assert steps == sorted(steps)
    assert steps[-1] > steps[0], "no attempt got anywhere"
    assert len(list(Path(tmp_path / "checkpoints").glob("*.ckpt"))) <= 3 + 20, "old files are removed"
