"""Two networks, two optimizers, stepped by hand: python examples/gan.py, which writes gan.png."""

import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader

import stratagem as sg


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, outputs))


class GAN(sg.Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic, self.drawn = network(8, 2), network(2, 1), {}

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        if batch_idx in (0, 200, 1000, 4000):
            self.drawn[batch_idx] = self.generator(torch.randn(1000, 8, device=self.device)).detach().cpu()
        for optimizer, loss in zip(self.optimizers(), (self.critic_loss, self.generator_loss), strict=True):
            self.toggle_optimizer(optimizer)  # the parameters of the other network get no gradients
            optimizer.zero_grad()
            made = self.generator(torch.randn(len(real), 8, device=self.device))
            self.manual_backward(loss(real.requires_grad_(), made))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def critic_loss(self, real: Tensor, made: Tensor) -> Tensor:
        score = self.critic(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)  # a penalty that keeps the critic smooth
        return (softplus(-score) + softplus(self.critic(made.detach()))).mean() + slope.square().sum(1).mean()

    def generator_loss(self, real: Tensor, made: Tensor) -> Tensor:
        return softplus(-self.critic(made)).mean()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(each.parameters(), 1e-3, (0.5, 0.99)) for each in (self.critic, self.generator)]


if __name__ == "__main__":
    sg.seed_everything(1)
    angle = torch.randint(8, (4001, 256)) * math.pi / 4  # eight groups on a circle
    points = torch.stack([angle.cos(), angle.sin()], 2) + 0.06 * torch.randn(4001, 256, 2)
    model = GAN()
    sg.Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(model, DataLoader(points, batch_size=None))
    figure, panels = plt.subplots(1, 4, figsize=(9, 2.5), layout="constrained")
    for panel, (step, made) in zip(panels, model.drawn.items(), strict=True):
        panel.plot(*points[:3].flatten(0, 1).T, ".", color="0.8", markersize=3)
        panel.plot(*made[:600].T, ".", markersize=2)
        panel.set(title=f"step {step}", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), aspect="equal", xticks=[], yticks=[])
    figure.savefig("gan.png", dpi=90)
