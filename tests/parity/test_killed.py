"""A program that is killed, or told to stop, and started again ends with the weights of one that was left alone."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from programs import scripts

PROGRAM = """
import os, random, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
import stratagem as sg
from stratagem.callbacks import ModelCheckpoint
from stratagem_testing.reference import Net, data

kind, strategy, devices, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])


class Augmented(Dataset):
    def __init__(self):
        self.x, self.y = data(64)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        noise = 0.1 * torch.randn(16) if kind == "plain" or workers == 0 else 0
        return self.x[index] + noise, self.y[index]


class Slow(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.03)
        x, y = batch
        return self.criterion(self.net(torch.nn.functional.dropout(x, 0.2)), y)
    def validation_step(self, batch, batch_idx):
        self.log("val", self.criterion(self(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}
    def on_train_batch_end(self):
        with open(f"steps{self.global_rank}", "a") as file:
            file.write(f"{self.global_step}\\n")


if __name__ == "__main__":
    sg.seed_everything(1)
    torch.set_num_threads(1)
    make = DataLoader if kind == "plain" else StatefulDataLoader
    loader = make(Augmented(), 4, shuffle=True, num_workers=workers)
    keep = ModelCheckpoint(every_n_train_steps=1, save_top_k=1)
    module = Slow()
    trainer = sg.Trainer(
        strategy=strategy, devices=devices, accelerator="cpu", max_epochs=6, accumulate_grad_batches=3, logger=False,
        enable_progress_bar=False, callbacks=[keep, "preemption"], val_check_interval=0.5,
        default_root_dir=".", precision={"name": "16-mixed", "init_scale": 256.0},
    )
    trainer.fit(module, loader, DataLoader(Augmented(), 4), ckpt_path="last" if os.path.exists("checkpoints") else None)
    with trainer.run.gathered_state():
        state = trainer.run.ask("model_state", module=module)
    if trainer.is_global_zero:
        torch.save({k: v.clone() for k, v in state.items()} | {"steps": torch.tensor(trainer.global_step)}, "end.pt")
"""


def start(folder, arguments):
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", *map(str, arguments)]
    return scripts.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(folder):
    with contextlib.suppress(FileNotFoundError):
        return [int(line) for line in (folder / "steps0").read_text().split()]
    return []


def finish(process):
    output, _ = process.communicate(timeout=360)
    assert process.returncode == 0, output


def interrupt(folder, arguments, after, how):
    """Start the program and end it by signal `how` once it has made `after` steps more; return its exit code."""
    before = len(steps(folder))
    process = start(folder, arguments)
    deadline = time.monotonic() + 270
    while len(steps(folder)) < before + after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, how)
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


CASES = [
    ("plain", "single_device", 1, 2, signal.SIGKILL),
    ("stateful", "single_device", 1, 0, signal.SIGTERM),
    ("plain", "ddp", 2, 0, signal.SIGTERM),
    ("stateful", "ddp", 2, 2, signal.SIGKILL),
    ("plain", "ddp_spawn", 2, 0, signal.SIGUSR1),
    ("plain", "fsdp", 2, 0, signal.SIGTERM),
]


@pytest.mark.every_push("plain-single_device-1-2-9")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy", "devices", "workers", "how"), CASES)
def test_it_ends_as_if_nothing_had_happened(tmp_path, kind, strategy, devices, workers, how):
    arguments = (kind, strategy, devices, workers)
    for folder in ("whole", "broken"):
        (tmp_path / folder).mkdir()
    undisturbed = start(tmp_path / "whole", arguments)
    for after in (13, 9):
        if how == signal.SIGUSR1:  # to one of the children, which are the ranks there
            code, output = interrupt_a_child(tmp_path / "broken", arguments, after)
        else:
            code, output = interrupt(tmp_path / "broken", arguments, after, how)
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 75), output
        if how != signal.SIGKILL:
            assert f"{signal.Signals(how).name} to rank" in output
    finish(start(tmp_path / "broken", arguments))
    finish(undisturbed)

    whole, broken = (torch.load(tmp_path / folder / "end.pt") for folder in ("whole", "broken"))
    assert [name for name in whole if not torch.equal(whole[name], broken[name])] == []
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps(tmp_path / "whole")))
    if how != signal.SIGKILL:  # nothing was lost, and nothing done twice
        assert steps(tmp_path / "broken") == steps(tmp_path / "whole")


def interrupt_a_child(folder, arguments, after):
    before = len(steps(folder))
    process = start(folder, arguments)
    deadline = time.monotonic() + 270
    while len(steps(folder)) < before + after:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True
    )
    workers = [line.split()[0] for line in listed.stdout.splitlines() if "spawn_main" in line]
    os.kill(int(workers[-1]), signal.SIGUSR1)
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


@pytest.mark.slow
def test_a_signal_to_the_whole_group_spares_the_loaders_workers(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    process = scripts.Popen(
        [sys.executable, "program.py", "plain", "single_device", "1", "2"], cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 270
    while len(steps(tmp_path)) < 9:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=180)

    assert process.returncode == 75, output
    assert (tmp_path / "checkpoints" / "preempted.ckpt").exists()
