"""Regression with a backbone that is frozen at first, accumulated gradients, and two validation loaders."""

import json

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from data import Domains
from pytorch_lightning.callbacks import BaseFinetuning
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only
from torch import nn


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, initial_denom_lr=5)


class Losses(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.losses += [trainer.callback_metrics[name].item() for name in ("val/clean", "val/noisy", "val/worst")]


class Regressor(pl.LightningModule):
    def __init__(self, width=16, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.head = nn.Linear(width, 1)
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.head(self.backbone(x)), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("train/loss", outputs["loss"], on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        loss = F.mse_loss(self.head(self.backbone(x)), y)
        self.log(f"val/{Domains.NAMES[dataloader_idx]}", loss, add_dataloader_idx=False)
        self.outputs.append(loss)

    def on_validation_epoch_end(self):
        self.log("val/worst", torch.stack(self.outputs).max())
        self.outputs.clear()

    def configure_optimizers(self):
        trained = filter(lambda p: p.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trained, lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "epoch"}]


@rank_zero_only
def save(losses):
    with open("losses.json", "w") as file:
        json.dump(losses, file)


if __name__ == "__main__":
    pl.seed_everything(11)
    losses = Losses()
    trainer = pl.Trainer(
        max_epochs=4, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False,
        callbacks=[losses, Unfreeze()], enable_checkpointing=False, enable_progress_bar=False,
    )
    trainer.fit(Regressor(), datamodule=Domains())
    rank_zero_info(f"epochs: {trainer.current_epoch}")
    save(losses.losses)
