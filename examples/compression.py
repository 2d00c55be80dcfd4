"""Two processes that send fewer bytes: python examples/compression.py, which writes compression.png."""

import csv
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from digits import Digits, DigitsData

import stratagem as sg

HOOKS = {
    "allreduce": "allreduce",  # unchanged
    "fp16_compress": "fp16_compress",
    "int8": "int8",
    "powersgd": {"name": "powersgd", "rank": 2, "start_powerSGD_iter": 17},  # unchanged in the first epoch
    "one_bit": {"name": "one_bit", "start_iter": 17},
}


def train(hook: str | dict, folder: Path) -> list[tuple[float, float]]:
    """Return the megabytes that a process has sent, and the validation loss, after each epoch."""
    sg.seed_everything(1)
    trainer = sg.Trainer(
        max_epochs=10, devices=2, accelerator="cpu", strategy="ddp_fork", comm_hook=hook, callbacks=["comm_stats"],
        logger="csv", default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False,
        log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Digits(), datamodule=DigitsData())
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    sent, bytes_sent, points = 0.0, "comm/wire_bytes_per_step", []
    for row in rows:
        sent += float(row[bytes_sent] or 0) / 1e6
        if row["val_loss"]:
            points.append((sent, float(row["val_loss"])))
    return points


if __name__ == "__main__":
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    with tempfile.TemporaryDirectory() as folder:
        for name, hook in HOOKS.items():
            points = train(hook, Path(folder) / name)
            axes.plot(*zip(*points, strict=True), ".-", label=f"{name}: {points[-1][0]:.1f} MB")
    axes.set(xscale="log", yscale="log", xlabel="MB that each process sent", ylabel="validation loss")
    axes.legend(frameon=False)
    figure.savefig("compression.png", dpi=90)
