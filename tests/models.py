"""Small models whose gradient norm exceeds 1, and plain PyTorch loops to compare with: no stratagem below `Net`."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg


def net(seed: int = 0) -> nn.Sequential:
    generator = torch.random.fork_rng()
    with generator:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def data(samples: int = 64, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 16, generator=generator)
    return x, x[:, :1].sin() + x[:, 1:2] ** 2


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 4 * F.mse_loss(out.float(), y.float())


class Net(sg.Module):
    """Regression on `data` with SGD and momentum: Adam would hide a gradient that is scaled wrongly."""

    def __init__(self, seed: int = 0, lr: float = 5e-3) -> None:
        super().__init__()
        self.net, self.lr = net(seed), lr

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = loss_of(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", loss_of(self(x), y), sync_dist=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", loss_of(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Gan(sg.Module):
    """Two optimizers stepped by hand; each loss reaches the other half of the model or leaves it out."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(2)[:3], net(3)[2:]

    def training_step(self, batch, batch_idx):
        real = torch.cat([batch[0], batch[0]], 1)
        for_critic, for_generator = self.optimizers()
        made = self.generator(batch[0])
        for_critic.zero_grad()
        self.manual_backward(critic_loss(self.critic, real, made.detach()))
        for_critic.step()
        for_generator.zero_grad()
        self.manual_backward(generator_loss(self.critic, made))
        for_generator.step()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.SGD(self.generator.parameters(), lr=1e-2, momentum=0.9),
        ]


def critic_loss(critic: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    return 4 * ((critic(real) - 1) ** 2).mean() + 4 * (critic(made) ** 2).mean()


def generator_loss(critic: nn.Module, made: torch.Tensor) -> torch.Tensor:
    return 4 * ((critic(made) - 1) ** 2).mean()


# --- References: one process, plain PyTorch ----------------------------------------------------------------------


def train_plainly(
    batches: list[tuple[torch.Tensor, torch.Tensor]], accumulate: int = 1, max_norm: float | None = None,
    max_value: float | None = None, model: nn.Module | None = None, lr: float = 5e-3,
) -> tuple[dict[str, torch.Tensor], list[float]]:  # fmt: skip
    """Train `net` on joined batches; return its weights and the gradient norms before clipping."""
    model = net() if model is None else copy.deepcopy(model)
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), []
    for index, (x, y) in enumerate(batches):
        (loss_of(model(x), y) / accumulate).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            norms.append(float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if max_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), max_value)
            optimizer.step()
            optimizer.zero_grad()
    return {f"net.{name}": tensor for name, tensor in model.state_dict().items()}, norms


def train_gan_plainly(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    generator, critic = net(2)[:3], net(3)[2:]
    for_critic = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    for_generator = torch.optim.SGD(generator.parameters(), lr=1e-2, momentum=0.9)
    for x, _ in batches:
        made = generator(x)
        for_critic.zero_grad()
        critic_loss(critic, torch.cat([x, x], 1), made.detach()).backward()
        for_critic.step()
        for_generator.zero_grad()
        generator_loss(critic, made).backward()
        for_generator.step()
    return {f"generator.{k}": v for k, v in generator.state_dict().items()} | {
        f"critic.{k}": v for k, v in critic.state_dict().items()
    }


def joined_batches(num_batches: int, batch_size: int, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Different batches, each to be cut into equal parts for the ranks of a run."""
    x, y = data(num_batches * batch_size, seed)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def part(
    batches: list[tuple[torch.Tensor, torch.Tensor]], rank: int, world_size: int
) -> list[tuple[torch.Tensor, ...]]:
    """One rank's share of every batch."""
    return [tuple(tensor.chunk(world_size)[rank].clone() for tensor in batch) for batch in batches]


def relative_difference(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    assert weights.keys() == reference.keys()
    return max(
        float((weights[k].double() - reference[k].double()).norm() / reference[k].double().norm()) for k in weights
    )
