"""The model and the data of these checkpoints, for Lightning (`write.py`) and for stratagem (`test_lightning_checkpoints.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def body(base: type) -> type:
    """Return the model as a subclass of `base`: Lightning's or stratagem's module."""

    class Body(base):
        def __init__(self, width: int = 8, seed: int = 0) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

        def configure_optimizers(self) -> Any:
            named = list(self.named_parameters())
            weights = [parameter for name, parameter in named if name.endswith("weight")]
            biases = [parameter for name, parameter in named if name.endswith("bias")]
            groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=0.02)
            by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
            by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
            return [optimizer], [
                {"scheduler": by_step, "interval": "step"},
                {"scheduler": by_epoch, "interval": "epoch"},
            ]

    Body.__name__ = Body.__qualname__ = "Body"
    return Body


def batches(count: int, rank: int = 0, world_size: int = 1, make: Any = DataLoader) -> Any:
    """Return a loader of `count` batches for this rank, which a sampler shuffles by its seed and the epoch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4 * count * world_size, 4, generator=generator)
    data = TensorDataset(x, x[:, :1].sin() + x[:, 1:2] ** 2)
    sampler = DistributedSampler(data, world_size, rank, seed=7)
    return make(data, batch_size=4, sampler=sampler)


def validation() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(8, 4, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=8)
