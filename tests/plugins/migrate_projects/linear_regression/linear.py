"""Linear regression as a module, with the class of its optimizer as an argument."""

from argparse import ArgumentParser
from typing import Type

import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, TensorDataset


class LinearRegression(LightningModule):
    def __init__(
        self,
        input_dim: int,
        output_dim: int = 1,
        bias: bool = True,
        learning_rate: float = 1e-4,
        optimizer: Type[Optimizer] = Adam,
        l1_strength: float = 0.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.optimizer = optimizer
        self.linear = nn.Linear(in_features=input_dim, out_features=output_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, batch, batch_idx: int):
        x, y = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self(x), y, reduction="sum")
        if self.hparams.l1_strength > 0:
            loss += self.hparams.l1_strength * sum(param.abs().sum() for param in self.parameters())
        loss /= x.size(0)
        return {"loss": loss}

    def training_epoch_end(self, outputs):
        average = torch.stack([out["loss"] for out in outputs]).mean()
        self.log("epoch_loss", average, True)

    def validation_step(self, batch, batch_idx: int):
        x, y = batch
        return {"val_loss": F.mse_loss(self(x), y)}

    def validation_epoch_end(self, outputs) -> None:
        val_loss = torch.stack([x["val_loss"] for x in outputs]).mean()
        self.log("val_loss", val_loss)

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer(self.parameters(), lr=self.hparams.learning_rate)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=30)
    args = parser.parse_args()
    seed_everything(1234)
    x = torch.randn(256, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.25
    train, val = TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])
    model = LinearRegression(input_dim=3, learning_rate=0.05, optimizer=torch.optim.Adam)
    trainer = Trainer(
        max_epochs=args.max_epochs,
        gpus=0,
        progress_bar_refresh_rate=0,
        checkpoint_callback=False,
        logger=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32))
    with open("loss.txt", "w") as file:
        file.write(f"{float(trainer.callback_metrics['val_loss'])} {float(trainer.callback_metrics['epoch_loss'])}")


if __name__ == "__main__":
    main()
