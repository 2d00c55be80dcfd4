"""A layer of experts, of which each image uses two; the experts may be on different processes.

    python examples/mixture_of_experts.py
    python examples/mixture_of_experts.py --strategy expert_parallel --devices 2 --accelerator cpu

Each process then holds half of the experts, and reads its own images: they are sent to the experts that they need and
back. Nothing in this file changes for it.
"""

from __future__ import annotations

from typing import Any

import torch
from digits import DigitsData
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg


class Experts(nn.Module):
    """Several small networks, their parameters stacked: row e of each belongs to expert e.

    These attributes and this forward are what ``strategy.parallel.expert`` expects of a module.
    """

    def __init__(self, num_experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, tokens: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of each token's experts.

        Args:
            tokens: (N, width)
            indices: numbers of the experts of each token, (N, K)
            weights: of these experts, (N, K)
        """
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = torch.where(indices == expert)
            found = F.gelu(tokens[token] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, token, found * weights[token, place, None])
        return result


class MixtureOfExperts(nn.Module):
    """A router, which every process has whole, and its experts."""

    def __init__(self, width: int, hidden: int, num_experts: int = 8, top: int = 2) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, indices = self.router(tokens).topk(self.top)  # (N, K) both
        return tokens + self.experts(tokens, indices, weights.softmax(-1))


class Digits(sg.Module):
    """Two layers of experts for images of 8 x 8 pixels."""

    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = [MixtureOfExperts(width, 2 * width), nn.LayerNorm(width), MixtureOfExperts(width, 2 * width)]
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), *layers, nn.LayerNorm(width), nn.Linear(width, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure("test", batch)

    def measure(self, name: str, batch: Any) -> None:
        images, labels = batch
        self.log(f"{name}_accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    sg.seed_everything(1)
    trainer = sg.Trainer.from_cli(max_epochs=8, default_root_dir="mixture_run")
    data = DigitsData()
    trainer.fit(Digits(), datamodule=data)
    (results,) = trainer.test(datamodule=data)
    trainer.print(f"test accuracy {results['test_accuracy']:.1%} after {trainer.current_epoch} epochs")
