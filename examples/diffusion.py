"""A diffusion model of points in the plane: python examples/diffusion.py, which writes diffusion.png."""

import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader

import stratagem as sg


class Diffusion(sg.Module):  # predicts the noise that was added to points (Ho et al., 2020)
    def __init__(self, steps: int = 50, width: int = 128) -> None:
        super().__init__()
        hidden = (layer for _ in range(2) for layer in (nn.Linear(width, width), nn.SiLU()))
        self.net = nn.Sequential(nn.Linear(10, width), nn.SiLU(), *hidden, nn.Linear(width, 2))
        self.register_buffer("beta", torch.linspace(1e-3, 0.2, steps))
        self.register_buffer("kept", (1 - self.beta).cumprod(0))  # the share of the variance that is not noise

    def forward(self, points: Tensor, step: Tensor) -> Tensor:
        waves = step[:, None] / len(self.beta) * math.pi * torch.tensor([0.5, 1, 2, 4], device=self.device)
        return self.net(torch.cat([points, waves.sin(), waves.cos()], 1))

    def training_step(self, points: Tensor, batch_idx: int) -> Tensor:
        step = torch.randint(len(self.beta), (len(points),), device=self.device)
        kept, noise = self.kept[step, None], torch.randn_like(points)
        return F.mse_loss(self(kept.sqrt() * points + (1 - kept).sqrt() * noise, step), noise)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @torch.no_grad()
    def sample(self, number: int) -> list[Tensor]:
        """Return the points before each step and after the last one."""
        points = [torch.randn(number, 2)]
        for step in reversed(range(len(self.beta))):
            noise = self(points[-1], torch.full((number,), step)) * self.beta[step] / (1 - self.kept[step]).sqrt()
            mean = (points[-1] - noise) / (1 - self.beta[step]).sqrt()
            points.append(mean + (self.beta[step].sqrt() * torch.randn_like(mean) if step else 0))
        return points


if __name__ == "__main__":
    sg.seed_everything(1)
    angle = 3 * math.pi * torch.rand(40, 250).sqrt()  # 40 batches of points on a spiral
    spiral = torch.stack([angle * angle.cos(), angle * angle.sin()], 2) / 5 + 0.02 * torch.randn(40, 250, 2)
    model, trainer = Diffusion(), sg.Trainer(max_epochs=100, logger=False, enable_checkpointing=False)
    trainer.fit(model, DataLoader(spiral, batch_size=None, shuffle=True))
    points = model.cpu().sample(1000)
    figure, panels = plt.subplots(1, 5, figsize=(9, 2), layout="constrained")
    for panel, done in zip(panels, (0, 25, 35, 45, 50), strict=True):
        panel.plot(*points[done].T, ".", markersize=1.5)
        panel.set(title=f"{done} of 50 steps", xlim=(-2.6, 2.6), ylim=(-2.6, 2.6), aspect="equal", xticks=[], yticks=[])
    figure.savefig("diffusion.png", dpi=90)
