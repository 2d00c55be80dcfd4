"""Samples of two domains."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch.utils.data import DataLoader, TensorDataset


class Domains(pl.LightningDataModule):
    NAMES = ("clean", "noisy")

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(112, 6, generator=generator)
        self.x, self.y = x, x.sum(1, keepdim=True).sin()

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        return DataLoader(TensorDataset(self.x[:80], self.y[:80]), batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> EVAL_DATALOADERS:
        clean = TensorDataset(self.x[80:], self.y[80:])
        noisy = TensorDataset(self.x[80:] + 0.3, self.y[80:])
        return [DataLoader(each, batch_size=self.hparams.batch_size) for each in (clean, noisy)]
