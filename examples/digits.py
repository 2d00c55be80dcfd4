"""Learn to read handwritten digits: the first example to read, and to run on one process or several.

    python examples/digits.py
    python examples/digits.py --strategy ddp --devices 2 --accelerator cpu
    python examples/digits.py --precision bf16-mixed --max_epochs 5
    python examples/digits.py --help

The images come with scikit-learn (`pip install scikit-learn`): 1797 of 8 x 8 pixels, nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset, random_split

import stratagem as sg


class DigitsData(sg.DataModule):
    """1077 images to train on, 360 to choose the best epoch by, 360 to test with; always the same ones.

    360 divides by two, three and four processes, so that none of them sees an image twice.
    """

    def __init__(self, batch_size: int = 32, split_seed: int = 0) -> None:
        self.batch_size = batch_size  # of one process
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load and split; called in every process, so each must come to the same split."""
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8), from 0 to 1
        labels = torch.tensor(digits.target)  # (N,)
        generator = torch.Generator().manual_seed(self.split_seed)
        self.train, self.val, self.test = random_split(TensorDataset(images, labels), [1077, 360, 360], generator)

    # Plain loaders: stratagem gives each process its own share of them.

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=180)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, batch_size=180)


class Digits(sg.Module):
    """Two convolutions and a linear layer. Nothing in here says where it runs, or on how many processes."""

    def __init__(self, width: int = 32, lr: float = 3e-3, weight_decay: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()  # the three arguments are self.hparams.width and so on, and in every checkpoint
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),  # (B, 2 * width, 4, 4)
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return a score for each of the ten digits: (B, 10)."""
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss; the trainer calls backward and steps the optimizer."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("test", batch)

    def measure(self, name: str, batch: Any) -> None:
        images, labels = batch
        scores = self(images)
        accuracy = (scores.argmax(1) == labels).float().mean()
        # sync_dist=True: the mean over the images of all processes, and not of this one alone.
        self.log(f"{name}_loss", F.cross_entropy(scores, labels), sync_dist=True)
        self.log(f"{name}_accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """AdamW, its learning rate falling along a cosine to zero in the last epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


#: Stop when nothing gets better, and keep the best epoch.
CALLBACKS = [
    {"name": "early_stopping", "monitor": "val_loss", "patience": 5},
    {"name": "model_checkpoint", "monitor": "val_loss"},
]


def main() -> None:
    sg.seed_everything(1)
    # What holds unless the command line says otherwise.
    trainer = sg.Trainer.from_cli(max_epochs=20, default_root_dir="digits_run", callbacks=CALLBACKS)
    data = DigitsData()
    trainer.fit(Digits(), datamodule=data)
    best = None if trainer.fast_dev_run else "best"  # a trial of one batch saves nothing
    (results,) = trainer.test(datamodule=data, ckpt_path=best)
    trainer.print(f"test accuracy {results['test_accuracy']:.1%} after {trainer.current_epoch} epochs")


if __name__ == "__main__":
    main()
