"""A fit in two processes: run by release.py with the Python of a clean environment."""

import torch

import stratagem as sg


class Line(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=2, accelerator="cpu")
trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8))
assert trainer.global_step == 4, trainer.global_step
