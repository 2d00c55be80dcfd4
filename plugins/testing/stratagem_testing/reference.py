"""Small models whose gradient norm exceeds 1, and plain PyTorch loops to compare with."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded

Batch = tuple[Tensor, ...]


def net(seed: int = 0) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def data(samples: int = 64, seed: int = 1, sequence: int | None = None) -> Batch:
    """Return inputs (samples, 16) and targets (samples, 1); with `sequence`, (samples, sequence, 16) and so on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples * (sequence or 1), 16, generator=generator)
    y = x[:, :1].sin() + x[:, 1:2] ** 2
    return (x, y) if sequence is None else (x.view(samples, sequence, 16), y.view(samples, sequence, 1))


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return 4 * F.mse_loss(out.float(), y.float())


def square(out: Tensor, y: Tensor) -> Tensor:
    return 4 * ((out - y) ** 2).mean()


def attended(x: Tensor) -> Tensor:
    """Return samples that are vectors as they are; to each position of a sequence add attention to those before it."""
    if x.dim() < 3:
        return x
    heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
    out: Tensor = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    return out


class Net(sg.Module):
    """Regression on `data` with SGD and momentum: Adam would hide a gradient that is scaled wrongly."""

    criterion = staticmethod(loss_of)

    def __init__(self, seed: int = 0, lr: float = 5e-3) -> None:
        super().__init__()
        self.net, self.lr = net(seed), lr

    @property
    def sequential_module(self) -> nn.Sequential:
        """The layers that a pipeline may cut into stages."""
        return self.net

    def parallel_plan(self) -> dict[str, str]:
        """Return how tensor parallelism may cut the first two layers; the third stays whole."""
        return {"net.0": "colwise", "net.2": "rowwise"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(attended(x))
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        x, y = batch
        self.log("val_loss", loss_of(self(x), y), sync_dist=True)

    def test_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        x, y = batch
        self.log("test_loss", loss_of(self(x), y), sync_dist=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Frozen(Net):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


class Tied(Net):
    """One block of two layers is used twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Sequential(net(1)[2], nn.Tanh(), net(2)[2])
        self.net = nn.Sequential(self.net[0], nn.Tanh(), shared, nn.Tanh(), shared, nn.Tanh(), self.net[4])

    def parallel_plan(self) -> dict[str, str]:
        return {"net.2.0": "colwise", "net.2.2": "rowwise"}


class Scalar(Net):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gain * self.net(attended(x))
        return out


class Buffered(Net):
    """A buffer in which every rank counts its batches."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.net(attended(x))
        return out


class Shifted(Net):
    """A buffer that is used in forward, and depends on the seed."""

    shift: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("shift", torch.tensor(1.0 + seed))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shift + self.net(attended(x))
        return out


class Unused(Net):
    """Two parameters that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = net(1)[2]


class Branching(Net):
    """From batch `since` on, the first number of a batch selects one of two layers, so that ranks may differ."""

    since = 0

    def __init__(self) -> None:
        super().__init__()
        self.cat, self.dog = net(1)[2], self.other()

    def other(self) -> nn.Module:
        layer: nn.Module = net(2)[2]
        return layer

    def branch(self, x: Tensor, batch_idx: int) -> Tensor:
        layer = self.dog if batch_idx >= self.since and x.flatten()[0] < 0 else self.cat
        out: Tensor = self.net[4](torch.tanh(layer(self.net[:4](attended(x)))))
        return out

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return loss_of(self.branch(batch[0], batch_idx), batch[1])


class BranchingLater(Branching):
    """The ranks use the same layer in two steps, and then different ones."""

    since = 2


class BranchingInSize(Branching):
    """The two layers have different sizes."""

    def other(self) -> nn.Module:
        return nn.Sequential(net(2)[2], nn.Tanh(), net(3)[2])


class Indexed(Net):
    """Records the indices of the samples it reads, which are the third tensor of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[int] = []

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.indices += [int(each) for each in batch[2]]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step(batch[:2], batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        return batch[2], self(batch[0])


class Dropped(Net):
    """Draws random numbers in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(attended(F.dropout(x, 0.3, training=self.training)))
        return out


class Scheduled(Net):
    """The learning rate falls after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByHand(Net):
    """Trains as `Net`; the module steps the optimizer."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss_of(self(batch[0]), batch[1]))
        optimizer.step()


class Halves(Net):
    """Trains as `Net`, with two optimizers that make one step together."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(some, lr=self.lr, momentum=0.9) for some in (parameters[::2], parameters[1::2])]


class CustomStep(Net):
    """Doubles the loss in `backward` and quarters the learning rate in `optimizer_step`: half that of `Net`."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        super().backward(2 * loss, *arguments, **options)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr / 4
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class CustomClipping(Net):
    """Clips gradients to a norm of 0.5 with torch's function."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class Double(Net):
    """Double precision in parameters, data and loss."""

    criterion = staticmethod(square)

    def __init__(self) -> None:
        super().__init__()
        self.double()


class Lbfgs(Double):
    """In double precision: a line search amplifies the rounding of single precision beyond any tolerance."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=6, line_search_fn="strong_wolfe")


class Gan(sg.Module):
    """Two optimizers that the module steps; the critic's loss excludes the generator."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = net(2)[:3], net(3)[2:]

    def parallel_plan(self) -> dict[str, str]:
        return {"*.0": "colwise", "*.2": "rowwise"}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x = attended(batch[0])
        real = torch.cat([x, x], -1)
        for_critic, for_generator = self.optimizers()
        made = self.generator(x)
        for_critic.zero_grad()
        self.manual_backward(critic_loss(self.critic, real, made.detach()))
        for_critic.step()
        for_generator.zero_grad()
        self.manual_backward(generator_loss(self.critic, made))
        for_generator.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
            torch.optim.SGD(self.generator.parameters(), lr=1e-2, momentum=0.9),
        ]


def critic_loss(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    loss: Tensor = 4 * ((critic(real) - 1) ** 2).mean() + 4 * (critic(made) ** 2).mean()
    return loss


def generator_loss(critic: nn.Module, made: Tensor) -> Tensor:
    loss: Tensor = 4 * ((critic(made) - 1) ** 2).mean()
    return loss


# --- References: one process, plain PyTorch ----------------------------------------------------------------------


def train_plainly(
    batches: list[Batch], accumulate: int = 1, max_norm: float | None = None, max_value: float | None = None,
    model: nn.Module | None = None, lr: float = 5e-3,
) -> tuple[dict[str, Tensor], list[float]]:  # fmt: skip
    """Train `net`, or `model` instead, on joined batches; return its weights and the norms before clipping."""
    module = Net(lr=lr)
    if model is not None:
        module.net = copy.deepcopy(model)  # type: ignore[assignment]
    return train_module_plainly(module, batches, accumulate, max_norm, max_value)


def window_size(index: int, count: int, accumulate: int) -> int:
    """Return how many batches the accumulation window of batch `index` has, in an epoch of `count` batches."""
    return min(accumulate, count - index // accumulate * accumulate)


def train_module_plainly(
    module: Net, batches: list[Batch], accumulate: int = 1, max_norm: float | None = None,
    max_value: float | None = None,
) -> tuple[dict[str, Tensor], list[float]]:  # fmt: skip
    """Train `module` with its own optimizer without a trainer; return its weights and the norms before clipping."""
    made = module.configure_optimizers()
    schedule = made["lr_scheduler"]["scheduler"] if isinstance(made, dict) else None
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    norms = []
    module.train()
    for index, (x, y) in enumerate(batches):
        (module.criterion(module(x), y) / window_size(index, len(batches), accumulate)).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            gradients = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            norms.append(float(torch.linalg.vector_norm(torch.cat(gradients))))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            if max_value is not None:
                nn.utils.clip_grad_value_(module.parameters(), max_value)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
    weights: dict[str, Tensor] = module.state_dict()
    return weights, norms


def branching_batches(num_batches: int, batch_size: int, num_parts: int, sequence: int | None = None) -> list[Batch]:
    """Return joined batches for `Branching`, with which every other of their parts uses the other layer."""
    batches = joined_batches(num_batches, batch_size, sequence=sequence)
    for x, _ in batches:
        for number, part_of_it in enumerate(x.chunk(num_parts)):
            part_of_it[..., 0] = (-1.0) ** number
    return batches


def train_branching_plainly(
    module: Branching, batches: list[Batch], num_parts: int
) -> tuple[dict[str, Tensor], list[float]]:
    """Train `module` on the mean loss of the `num_parts` parts that ranks have of each joined batch."""
    optimizer, norms = module.configure_optimizers(), []
    for index, batch in enumerate(batches):
        losses = [module.training_step(part([batch], number, num_parts)[0], index) for number in range(num_parts)]
        torch.stack(losses).mean().backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    weights: dict[str, Tensor] = module.state_dict()
    return weights, norms


def train_lbfgs_plainly(batches: list[Batch]) -> dict[str, Tensor]:
    """Train `Lbfgs` on joined batches in double precision."""
    module = Lbfgs()
    optimizer = module.configure_optimizers()
    for x, y in batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = square(module(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    weights: dict[str, Tensor] = module.state_dict()
    return weights


def train_gan_plainly(batches: list[Batch], gan: Any = None) -> dict[str, Tensor]:
    gan = gan or Gan()
    generator, critic = gan.generator, gan.critic
    for_critic = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    for_generator = torch.optim.SGD(generator.parameters(), lr=1e-2, momentum=0.9)
    for given, _ in batches:
        x = attended(given)
        made = generator(x)
        for_critic.zero_grad()
        critic_loss(critic, torch.cat([x, x], -1), made.detach()).backward()
        for_critic.step()
        for_generator.zero_grad()
        generator_loss(critic, made).backward()
        for_generator.step()
    return {f"generator.{k}": v for k, v in generator.state_dict().items()} | {
        f"critic.{k}": v for k, v in critic.state_dict().items()
    }


def joined_batches(num_batches: int, batch_size: int, seed: int = 5, sequence: int | None = None) -> list[Batch]:
    """Return different batches, each to be split into equal parts for the ranks of a run."""
    x, y = data(num_batches * batch_size, seed, sequence)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def part(batches: list[Batch], rank: int, world_size: int) -> list[Batch]:
    """Return one rank's part of every batch."""
    return [tuple(tensor.chunk(world_size)[rank].clone() for tensor in batch) for batch in batches]


def relative_difference(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Return the largest relative distance of a tensor from its reference in norm; inf if one is not finite."""
    return max(differences(weights, reference).values())


def differences(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative distance of each tensor from its reference in norm, by name; inf if one is not finite."""
    __tracebackhide__ = True
    if weights.keys() != reference.keys():
        missing, more = sorted(reference.keys() - weights.keys()), sorted(weights.keys() - reference.keys())
        raise AssertionError(
            f"weights lack {missing}, and have {more} too; `model_state` must return the module's names"
        )
    return {name: _relative_difference(weights[name].double(), reference[name].double()) for name in weights}


def _relative_difference(tensor: Tensor, reference: Tensor) -> float:
    distance, norm = float((tensor - reference).norm()), float(reference.norm())
    if distance != distance:
        return float("inf")
    return distance / norm if norm else distance
