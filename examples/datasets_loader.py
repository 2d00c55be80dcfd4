"""Train on a data set of datasets, which the trainer shards: python examples/datasets_loader.py --devices 2."""

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

import stratagem as sg


class Regression(sg.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch["x"])[:, 0], batch["y"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def data() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(512, 4, generator=generator)
    rows = Dataset.from_dict({"x": x.tolist(), "name": ["a name"] * 512})
    rows = rows.map(lambda row: {"y": sum(row["x"])})
    return rows.with_format("torch", columns=["x", "y"])  # only these columns, as tensors


if __name__ == "__main__":
    parts = data().train_test_split(128, seed=0)
    trainer = sg.Trainer.from_cli(max_epochs=8, logger=False, enable_checkpointing=False)
    trainer.fit(Regression(), DataLoader(parts["train"], 16, shuffle=True), DataLoader(parts["test"], 16))
    trainer.print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}")
