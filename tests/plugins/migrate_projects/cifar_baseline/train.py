"""Classify small colour images."""

import pytorch_lightning as pl
import torch
from base import BaseClassifier
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.callbacks.progress import TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pl.seed_everything(7, True)


class Images(pl.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(1)
        labels = torch.arange(192) % 3
        images = torch.randn(192, 3, 8, 8, generator=generator)
        images[torch.arange(192), labels] += 1.0  # the channel that is brighter
        self.train_set = TensorDataset(images[:128], labels[:128])
        self.val_set = TensorDataset(images[128:], labels[128:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.batch_size)


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x):
        return x + self.layers(x)


class ResNet(BaseClassifier):
    def __init__(self, channels=8, lr=0.05, **kwargs):
        super().__init__(lr=lr, **kwargs)
        self.model = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            ResidualBlock(channels),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, 3),
        )


class BestAccuracy(pl.Callback):
    """Remembers the best accuracy."""

    def __init__(self):
        super().__init__()
        self.best = 0.0

    def on_validation_end(self, trainer, pl_module):
        super().on_validation_end(trainer, pl_module)
        self.best = max(self.best, float(trainer.callback_metrics.get("val_mean_acc", 0.0)))
        pl_module.print(f"best accuracy: {self.best:.2f}")


if __name__ == "__main__":
    best = BestAccuracy()
    model = ResNet(channels=6)
    trainer = pl.Trainer(
        max_epochs=4,
        gpus=1 if torch.cuda.is_available() else None,  # limiting got iPython runs
        logger=CSVLogger(save_dir="logs/"),
        callbacks=[LearningRateMonitor(logging_interval="step"), TQDMProgressBar(), best],
        weights_summary=None,
        progress_bar_refresh_rate=10,
        log_every_n_steps=2,
    )
    data = Images()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    if trainer.is_global_zero:
        trainer.save_checkpoint("model.ckpt")
    again = ResNet.load_from_checkpoint("model.ckpt", map_location="cpu")
    assert again.hparams.channels == 6 and again.hparams.lr == 0.05
    with open("accuracy.txt", "w") as file:
        file.write(str(best.best))
