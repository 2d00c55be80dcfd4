"""Train without a fault, in an unusual way: python odd.py WHAT FOLDER.

WHAT is a number, from which a variant is drawn, or "feature=value,feature=value": others have their first value.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.callbacks import Callback, ModelCheckpoint

#: By feature: its values. The first one is nothing unusual, and the most likely one.
FEATURES = {
    "strategy": ("ddp", "fsdp", "ddp_sharded", "parallel"),
    "world": ("2", "3"),
    "launcher": ("subprocess", "fork", "torchrun"),
    "loader": ("even", "uneven", "slow", "workers"),
    "validation": ("none", "slow", "slow_on_rank_0"),
    "collective": ("none", "all_reduce", "broadcast", "barrier", "objects", "half", "async", "two_groups", "in_hook"),
    "process": (
        "quiet",
        "gc",
        "thread",
        "sleep",
        "user_signal",
        "sigterm_handler",
        "faulthandler",
        "stopped",
        "skewed",
    ),
    "saves": ("none", "often", "slow", "save_checkpoint"),
    "script": ("fit", "fit_fit", "fit_test_fit", "other_strategy", "in_thread", "caught", "caught_in_step"),
    "close": ("no", "yes"),
    "end": ("return", "sys_exit", "os_exit", "sys_exit_in_fit"),
    "outside": ("nothing", "SIGTERM", "SIGTERM_to_all", "SIGINT_to_all"),
}
#: Each value is as likely as the others of these.
_EVEN = ("strategy", "world", "launcher", "script", "close", "end")


def variant(what: str) -> dict[str, str]:
    """Return the value of each feature."""
    if not what.isdecimal():
        return {name: values[0] for name, values in FEATURES.items()} | dict(
            pair.split("=") for pair in what.split(",")
        )
    dice = random.Random(int(what))
    return {
        name: dice.choice(values) if name in _EVEN or dice.random() < _share(name) else values[0]
        for name, values in FEATURES.items()
    }


def _share(name: str) -> float:
    """Return how often a feature is unusual."""
    return 0.12 if name == "outside" else 0.5


class Samples(Dataset):
    def __init__(self, num_batches: int, slow: bool = False) -> None:
        self.num_batches, self.slow = num_batches, slow

    def __len__(self) -> int:
        return self.num_batches * 4

    def __getitem__(self, index):
        if self.slow and index == 8:
            time.sleep(1.5)
        return torch.randn(8), torch.randn(1)


class Model(sg.Module):
    def __init__(self, chosen: dict[str, str], folder: Path, fails: bool = False) -> None:
        super().__init__()
        self.chosen, self.folder, self.fails = chosen, folder, fails
        self.net = self.groups = self.half = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def on_fit_start(self):
        if self.chosen["process"] == "skewed" and dist.get_rank() == 1:
            clock = time.time
            time.time = lambda: clock() + 100
        everybody = list(range(dist.get_world_size()))
        if self.chosen["collective"] == "two_groups":
            self.groups = dist.new_group(everybody), dist.new_group(everybody)
        if self.chosen["collective"] == "half":
            halves = everybody[: len(everybody) // 2], everybody[len(everybody) // 2 :]
            groups = [(ranks, dist.new_group(ranks)) for ranks in halves]  # torch wants all ranks to make all groups
            (self.half,) = [group for ranks, group in groups if dist.get_rank() in ranks]

    def training_step(self, batch, batch_idx):
        if self.fails and batch_idx == 2:
            raise ValueError("bad data on all ranks")
        if self.chosen["script"] == "caught_in_step" and batch_idx == 2 and dist.get_rank() == 1:
            try:
                raise ValueError("bad data")
            except ValueError:
                pass
        if self.chosen["outside"] != "nothing" and not self.trainer.sanity_checking:
            if batch_idx == 2:
                (self.folder / f"ready.{dist.get_rank()}").touch()
            time.sleep(0.3)
        if batch_idx == 2:
            self.odd_process()
        if self.chosen["collective"] not in ("none", "in_hook"):
            self.collective()
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def collective(self) -> None:
        kind, rank, world_size = self.chosen["collective"], dist.get_rank(), dist.get_world_size()
        if kind == "all_reduce":
            dist.all_reduce(torch.ones(7))
        if kind == "broadcast":
            dist.broadcast(torch.ones(5), world_size - 1)
        if kind == "barrier":
            dist.barrier()
        if kind == "objects":
            dist.all_gather_object([None] * world_size, "x" * rank)
        if kind == "half":
            for _ in range(3 if rank == 0 else 1):  # rank 0 has a group of its own
                dist.all_reduce(torch.ones(2 if rank == 0 else 3), group=self.half)
        if kind == "async":
            works = [dist.all_reduce(torch.ones(9), async_op=True), dist.broadcast(torch.ones(3), 0, async_op=True)]
            for work in reversed(works):
                work.wait()
        if kind == "two_groups":
            for group in self.groups:
                dist.all_reduce(torch.ones(2), group=group)

    def odd_process(self) -> None:
        kind = self.chosen["process"]
        if dist.get_rank() == 1 and kind == "gc":
            gc.collect()
            time.sleep(1.0)
        if dist.get_rank() == 1 and kind == "stopped":
            stop = "sleep .1; kill -STOP $0; sleep 2; kill -CONT $0"
            subprocess.Popen(["sh", "-c", stop, str(os.getpid())])
            time.sleep(0.5)
        if kind == "user_signal":
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_before_zero_grad(self, *_):
        if self.chosen["process"] == "sleep" and self.trainer.global_step == 2 and dist.get_rank() == 0:
            time.sleep(1.5)
        if self.chosen["collective"] == "in_hook":
            dist.all_reduce(torch.ones(3))

    def validation_step(self, batch, batch_idx):
        if self.chosen["validation"] == "slow" or (
            self.chosen["validation"] == "slow_on_rank_0" and dist.get_rank() == 0
        ):
            time.sleep(0.8)
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test", self.net(batch[0]).mean())

    def on_save_checkpoint(self, checkpoint):
        if self.chosen["saves"] == "slow" and dist.get_rank() == 0:
            time.sleep(1.0)

    def on_train_batch_end(self, *_):
        if self.chosen["saves"] == "save_checkpoint":
            self.trainer.save_checkpoint(self.folder / "of_user.ckpt")

    def on_fit_end(self):
        if self.chosen["end"] == "sys_exit_in_fit":
            sys.exit(0)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(sg.DataModule):
    def __init__(self, chosen: dict[str, str]) -> None:
        super().__init__()
        self.chosen = chosen

    def train_dataloader(self):
        kind, rank = self.chosen["loader"], dist.get_rank()
        samples = Samples(6 - rank if kind == "uneven" else 12, slow=kind == "slow" and rank == 1)
        return DataLoader(samples, batch_size=4, num_workers=2 if kind == "workers" else 0)

    def val_dataloader(self):
        return DataLoader(Samples(2), batch_size=4) if self.chosen["validation"] != "none" else None

    def test_dataloader(self):
        return DataLoader(Samples(2), batch_size=4)


class SlowDisk(Callback):
    def on_save_checkpoint(self, *_):
        time.sleep(0.5)


def trainer_of(chosen: dict[str, str], folder: Path, strategy: str) -> sg.Trainer:
    saves = chosen["saves"] in ("often", "slow")
    callbacks = [ModelCheckpoint(dirpath=folder, every_n_train_steps=2 if chosen["saves"] == "often" else 4)]
    return sg.Trainer(
        max_steps=30 if chosen["outside"] != "nothing" else 8, strategy={"name": strategy, "timeout": 20},
        accelerator="cpu", devices=int(chosen["world"]),
        launcher=None if chosen["launcher"] == "torchrun" else chosen["launcher"], default_root_dir=folder,
        logger=False, callbacks=[*(callbacks if saves else []), *([SlowDisk()] if chosen["saves"] == "slow" else [])],
        enable_checkpointing=saves, enable_progress_bar=False, num_sanity_val_steps=0,
        use_distributed_sampler=chosen["loader"] != "uneven", check_val_every_n_epoch=None, val_check_interval=4,
    )  # fmt: skip


def prepare(chosen: dict[str, str]) -> None:
    """Do what the script does before it trains."""
    kind = chosen["process"]
    if kind == "thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    if kind == "user_signal":
        signal.signal(signal.SIGUSR1, lambda *_: None)
    if kind == "sigterm_handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if kind == "faulthandler":
        faulthandler.enable()


def fit(chosen: dict[str, str], folder: Path, trainer: sg.Trainer, fails: bool = False) -> Model:
    model = Model(chosen, folder, fails)
    trainer.fit(model, datamodule=Data(chosen))
    return model


def script(chosen: dict[str, str], folder: Path) -> None:
    strategy = chosen["strategy"]
    trainer = trainer_of(chosen, folder, strategy)
    if chosen["script"] == "caught":
        try:
            fit(chosen, folder, trainer, fails=True)
        except Exception as error:
            print("caught", type(error).__name__)
        if chosen["launcher"] != "subprocess":  # which cannot train again after an error
            fit(chosen, folder, trainer_of(chosen, folder, strategy))
        return
    model = fit(chosen, folder, trainer)
    if chosen["script"] == "fit_fit":
        trainer = trainer_of(chosen, folder, strategy)
        fit(chosen, folder, trainer)
    if chosen["script"] == "fit_test_fit":
        trainer.test(model, datamodule=Data(chosen))
        fit(chosen, folder, trainer_of(chosen, folder, strategy))
    if chosen["script"] == "other_strategy":
        fit(chosen, folder, trainer_of(chosen, folder, "fsdp" if strategy == "ddp" else "ddp"))
    if chosen["close"] == "yes":
        trainer.close()


if __name__ == "__main__":
    chosen, folder = variant(sys.argv[1]), Path(sys.argv[2])
    prepare(chosen)
    if chosen["script"] == "in_thread":
        thread = threading.Thread(target=script, args=(chosen, folder))
        thread.start()
        thread.join()
    else:
        script(chosen, folder)
    print("trained to the end", flush=True)
    if chosen["end"] == "sys_exit":
        sys.exit(0)
    if chosen["end"] == "os_exit":
        os._exit(0)
