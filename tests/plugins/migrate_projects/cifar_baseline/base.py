"""What all networks of the baseline share."""

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule


class BaseClassifier(LightningModule):
    def __init__(self, lr=0.1, epochs=4, **kwargs):
        super().__init__()
        self.save_hyperparameters()

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch, stage=None):
        x, y = batch
        logits = self(x)
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        if stage:
            self.log(f"{stage}_loss", F.nll_loss(logits, y), prog_bar=True)
            self.log(f"{stage}_acc", accuracy, prog_bar=True)
        return accuracy

    def validation_step(self, batch, batch_idx):
        return self.evaluate(batch, "val")

    def validation_epoch_end(self, outputs):
        # the mean over batches
        self.log("val_mean_acc", torch.stack(outputs).mean())

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
