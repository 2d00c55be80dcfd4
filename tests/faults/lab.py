"""Train with a fault on one rank: python lab.py KIND STRATEGY WORLD_SIZE LAUNCHER TIMEOUT_S FOLDER [NODES BAD_RANK].

The line that a good diagnosis names ends in a comment, ``# KIND`` or ``# KIND others``.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint

kind, strategy, launcher, folder = sys.argv[1], sys.argv[2], sys.argv[4], sys.argv[6]
world_size, timeout_s = int(sys.argv[3]), float(sys.argv[5])
NODES, BAD = map(int, sys.argv[7:] or (1, not kind.startswith("rank_0_")))
SAVES = ("stuck_save", "error_in_save", "rank_0_full_disk")
CHECKS = {"parameter_written": [{"name": "replicas", "every_n_steps": 1}]}
VALIDATES = ("error_in_validation", "stuck_validation", "collective_in_validation")
WORKERS = ("error_in_worker", "killed_worker", "slow_loader")


def is_bad() -> bool:
    return dist.is_initialized() and dist.get_rank() == BAD


def stuck() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # stuck # stuck_in_hook # stuck_validation


def mount_full_disk(path: str) -> None:
    """Mount a file system without free space at `path`, for this process alone: the mount ends with it. Needs root."""
    assert ctypes.CDLL(None).unshare(0x20000) == 0, "CLONE_NEWNS"
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", path], check=True)
    (Path(path) / "large").write_bytes(bytes(60 << 10))


class Samples(Dataset):
    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64 * 8

    def __getitem__(self, index):
        if self.bad and index > 60:
            if kind in ("error_in_worker", "error_in_dataset"):
                raise ValueError("corrupt sample")  # error_in_worker  # error_in_dataset
            if kind == "killed_worker":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "slow_loader":
                time.sleep(1000)
        return torch.randn(16), torch.randn(1)


class Model(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = None
        self.groups = None

    def configure_model(self):
        if self.net is not None:
            return
        if kind.endswith("_skewed") and is_bad():
            clock = time.time
            time.time = lambda: clock() + 100
        width = 65 if kind == "other_model" and is_bad() else 64
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def on_fit_start(self):
        if kind in ("half_of_a_group", "deadlock_of_groups"):
            everybody = list(range(world_size))
            limit = timedelta(seconds=timeout_s)  # torch has 30 minutes
            self.groups = dist.new_group(everybody, timeout=limit), dist.new_group(everybody, timeout=limit)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.collectives(batch[0])
            if is_bad():
                self.alone()
        x, y = batch
        if batch_idx == 3 and is_bad():
            if kind == "nan":
                x = x * float("nan")
            if kind == "skipped_backward":
                return (x.sum() * 0).requires_grad_()
        return nn.functional.mse_loss(self.net(x), y)

    def collectives(self, x) -> None:
        if kind in ("skip", "skip_skewed") and not is_bad():
            dist.all_reduce(torch.ones(7))  # skip # skip_skewed
        if kind == "extra" and is_bad():
            dist.barrier()  # extra
        if kind == "size":
            dist.all_reduce(torch.ones(3 if is_bad() else 7000))  # size
        if kind == "dtype":
            dist.all_reduce(torch.ones(700, dtype=torch.float64 if is_bad() else torch.float32))  # dtype
        if kind == "order":
            one, other = torch.ones(5), torch.ones(9)
            if is_bad():
                dist.broadcast(other, 0)  # order
            dist.all_reduce(one)  # order others
            if not is_bad():
                dist.broadcast(other, 0)
        if kind == "other_root":
            dist.broadcast(torch.ones(5), BAD if is_bad() else 0)  # other_root
        if kind == "gather_sizes":
            mine = torch.ones(9 if is_bad() else 5)
            dist.all_gather([torch.empty_like(mine) for _ in range(world_size)], mine)  # gather_sizes
        if kind == "product_skip" and not is_bad():
            self.all_gather(x)  # product_skip
        if kind == "product_shape":
            self.all_gather(x[:3] if is_bad() else x)  # product_shape
        if kind == "half_of_a_group" and not is_bad():
            dist.all_reduce(torch.ones(2), group=self.groups[0])  # half_of_a_group
        if kind == "deadlock_of_groups":
            first, second = self.groups if is_bad() else self.groups[::-1]
            dist.all_reduce(torch.ones(2), group=first)  # deadlock_of_groups
            dist.all_reduce(torch.ones(2), group=second)
        if kind == "object_skip" and not is_bad():
            dist.all_gather_object([None] * world_size, "x")  # object_skip
        if kind == "one_logs":
            self.log("both", 1.0)
            if is_bad():
                self.log("extra", 1.0, sync_dist=True)  # one_logs
        if kind == "one_saves" and is_bad():
            self.trainer.save_checkpoint(Path(tempfile.mkdtemp()) / "x.ckpt")  # one_saves

    def alone(self) -> None:
        if kind in ("killed", "rank_0_killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "rank_0_terminated":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)
        if kind == "exit_0":
            os._exit(0)
        if kind == "exit_3":
            os._exit(3)
        if kind == "sys_exit_0":
            sys.exit(0)
        if kind in ("error", "error_skewed"):
            raise KeyError("a mistake on this rank")  # error # error_skewed
        if kind == "interrupted":
            raise KeyboardInterrupt
        if kind == "stuck":
            stuck()
        if kind == "stuck_in_gc":
            gc.callbacks.append(lambda *_: time.sleep(1000))  # stuck_in_gc
            gc.collect()
        if kind == "parameter_written":
            self.net[0].weight.data.add_(1.0)
        if kind == "launcher_killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        if kind == "stuck_in_c":
            ctypes.CDLL(None).sleep(1000)  # stuck_in_c
        if kind == "busy":
            while True:  # busy
                pass  # busy
        if kind == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "segmentation_fault":
            ctypes.string_at(0)  # segmentation_fault
        if kind == "aborted":
            ctypes.CDLL(None).abort()  # aborted
        if kind == "bus_error":
            os.kill(os.getpid(), signal.SIGBUS)  # bus_error
        if kind == "no_memory":
            pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (pages + (200 << 20),) * 2)
            torch.ones(600 << 20)  # no_memory
        if kind == "error_in_thread":
            threading.Thread(target=lambda: ctypes.string_at(0)).start()  # error_in_thread
            time.sleep(1000)

    def on_before_zero_grad(self, *_):
        if kind == "stuck_in_hook" and self.trainer.global_step == 3 and is_bad():
            stuck()
        if kind == "error_in_hook" and self.trainer.global_step == 3 and is_bad():
            raise KeyError("a mistake on this rank")  # error_in_hook

    def validation_step(self, batch, batch_idx):
        if is_bad():
            if kind == "error_in_validation":
                raise KeyError("a mistake on this rank")  # error_in_validation
            if kind == "stuck_validation":
                stuck()
            if kind == "collective_in_validation":
                dist.all_reduce(torch.ones(7))  # collective_in_validation

    def on_save_checkpoint(self, checkpoint):
        if is_bad() and kind == "stuck_save":
            path = Path(tempfile.mkdtemp()) / "fifo"
            os.mkfifo(path)
            path.write_bytes(b"x")  # stuck_save
        if is_bad() and kind == "rank_0_full_disk":
            mount_full_disk(folder)
        if is_bad() and kind == "error_in_save":
            raise KeyError("a mistake on this rank")  # error_in_save

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(sg.DataModule):
    def train_dataloader(self):
        return DataLoader(Samples(is_bad()), batch_size=8, num_workers=int(kind in WORKERS))

    def val_dataloader(self):
        return DataLoader(Samples(False), batch_size=8) if kind in VALIDATES else None


if __name__ == "__main__":
    trainer = sg.Trainer(
        max_steps=12, strategy={"name": strategy, "timeout": timeout_s}, accelerator="cpu", num_nodes=NODES,
        devices=world_size // NODES,
        launcher=None if launcher == "torchrun" else launcher, default_root_dir=folder, logger=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=4)] if kind in SAVES else None,
        enable_checkpointing=kind in SAVES, enable_progress_bar=False, num_sanity_val_steps=0, limit_val_batches=2,
        checks=CHECKS.get(kind, "finite"),
        val_check_interval=4 if kind in VALIDATES else 1.0,
    )  # fmt: skip
    trainer.fit(Model(), datamodule=Data())
    print("trained to the end")
