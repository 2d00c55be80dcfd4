"""Growth of saving and finding checkpoints: with the number of files in a folder, and with the number of tensors.

    python benchmarks/checkpoint_growth.py [--quick]

CPU milliseconds, the minimum of three rounds. `ModelCheckpoint` keeps the best of the files in the folder, whose
content is one small tensor; "of a taken name" saves to a name that all files of the folder have, with versions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stratagem as sg
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoints import DCPCheckpoint, FullCheckpoint, SafetensorsCheckpoint, ShardedCheckpoint
from stratagem_trainer.checkpoint_files import newest_complete

FORMATS = {
    "full": FullCheckpoint, "safetensors": SafetensorsCheckpoint, "dcp": DCPCheckpoint, "sharded": ShardedCheckpoint,
}  # fmt: skip


class Tiny(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def milliseconds(act: Callable[[], object], rounds: int = 3) -> float:
    """Return the least CPU time of `act`."""
    taken = []
    for _ in range(rounds):
        began = time.process_time()
        act()
        taken.append(time.process_time() - began)
    return min(taken) * 1000


def files(folder: Path, count: int) -> dict[str, float]:
    """Fill `folder` with `count` checkpoints; return the milliseconds of each operation."""
    checkpoints = folder / "checkpoints"
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "barebones": False}
    top = ModelCheckpoint(dirpath=checkpoints, filename="c", monitor="loss", save_top_k=count)
    trainer = sg.Trainer(max_epochs=1, callbacks=[top], default_root_dir=folder, **quiet)
    trainer.fit(Tiny(), [torch.ones(1, 1)])
    first = checkpoints / "c.ckpt"
    for number in range(1, count):
        for suffix in ("", ".sum"):
            os.link(f"{first}{suffix}", checkpoints / f"c-v{number}.ckpt{suffix}")
        top._best_k_models[str(checkpoints / f"c-v{number}.ckpt")] = float(number)
    other = checkpoints / "other.ckpt"

    def save_best() -> None:
        top._best_k_models[max(top._best_k_models, key=top._best_k_models.__getitem__)] = 1e9
        top._save(trainer)

    return {
        "listing the folder": milliseconds(lambda: os.listdir(checkpoints)),
        "a save": milliseconds(lambda: trainer.save_checkpoint(other)),
        "a save of ModelCheckpoint, of a taken name": milliseconds(save_best),
        'finding "last"': milliseconds(lambda: newest_complete(checkpoints, FullCheckpoint())),
    }


def tensors(folder: Path, count: int, checkpoint: str) -> dict[str, float]:
    """Save and load a model of `count` tensors; return the milliseconds of each."""
    run = sg.Run(accelerator="cpu", checkpoint=checkpoint)
    run.connect()
    module = nn.ParameterList([nn.Parameter(torch.ones(4_000_000 // count)) for _ in range(count)])
    model, optimizer = run.setup(module, torch.optim.SGD(module.parameters()))
    path = folder / f"{checkpoint}-{count}"
    return {
        f"save: {checkpoint}": milliseconds(lambda: run.save(path, model=model, optimizer=optimizer)),
        f"load: {checkpoint}": milliseconds(lambda: run.load(path, model=model, optimizer=optimizer)),
    }


def table(title: str, rows: dict[int, dict[str, float]]) -> None:
    counts = list(rows)
    print(f"\n| {title} | {' | '.join(map(str, counts))} |\n|---{'|---' * len(counts)}|")
    for name in rows[counts[0]]:
        print(f"| {name} | {' | '.join(f'{rows[count][name]:.1f}' for count in counts)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="up to 1000 files and 500 tensors")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp())
    try:
        by_files = {}
        for count in (10, 100, 1000) if quick else (10, 100, 1000, 10_000):
            by_files[count] = files(root / f"files{count}", count)
            shutil.rmtree(root / f"files{count}")
        table("files in the folder, ms", by_files)
        by_tensors = {}
        for count in (10, 100, 500) if quick else (10, 100, 1000, 5000):
            by_tensors[count] = {}
            for name in FORMATS:
                by_tensors[count] |= tensors(root, count, name)
        table("tensors (16 MB in all), ms", by_tensors)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
