"""What users attach to parameters before training, for checks that a strategy which replaces parameters keeps it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem.errors import StratagemError
from stratagem_testing.reference import Batch, Net
from stratagem_testing.training import QUIET, share, weights_of


def _sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, 5e-3, momentum=0.9)


def _weight(module: Net) -> nn.Parameter:
    return module.net.get_parameter("0.weight")


class OptimizerOfInit(Net):
    """Makes its optimizer in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [_sgd(self.parameters())]

    def configure_optimizers(self) -> Any:
        return self.made[0]


class ListOfInit(Net):
    """Has a dictionary of parameters since the constructor, and makes groups of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"weights": [p for p in self.parameters() if p.dim() > 1]}

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.kept["weights"] if p.ndim == 2]
        return _sgd(
            [{"params": weights, "weight_decay": 0.1}, {"params": [p for p in self.parameters() if p.dim() < 2]}]
        )


class GroupsById(Net):
    """Knows since the constructor by ``id`` which parameters have another rate."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = list(self.net.get_submodule("0").parameters())
        self.ids = {id(p) for p in self.slow}

    def configure_optimizers(self) -> Any:
        rest = [p for p in self.parameters() if id(p) not in self.ids]
        return _sgd([{"params": self.slow, "lr": 5e-4}, {"params": rest}])


class HookOfInit(Net):
    """Changes a gradient as it is computed."""

    def __init__(self) -> None:
        super().__init__()
        _weight(self).register_hook(lambda grad: grad * 0.25)


class HookLater(Net):
    """Adds the hook when the model is prepared."""

    def configure_optimizers(self) -> Any:
        _weight(self).register_hook(lambda grad: grad * 0.25)
        return super().configure_optimizers()


def _scale_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 0.25


class HookAfterAccumulation(Net):
    """Changes a gradient that is complete."""

    def __init__(self) -> None:
        super().__init__()
        _weight(self).register_post_accumulate_grad_hook(_scale_gradient)


class Attributes(Net):
    """Chooses groups by attributes of parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.decays = name.endswith("weight")  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if getattr(p, "decays", None) is True]
        return _sgd(
            [
                {"params": decayed, "weight_decay": 0.1},
                {"params": [p for p in self.parameters() if getattr(p, "decays", None) is False]},
            ]
        )


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.weight.factor = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, getattr(self.weight, "factor", 1.0) * self.weight, self.bias)


class AttributeInForward(Net):
    """Computes with an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.net = nn.Sequential(self.net[0], nn.Tanh(), nn.Linear(32, 16), Scaled(), nn.Linear(16, 1))


class Kept(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0], self.bias)


class KeptInForward(Net):
    """Computes with a parameter from a list that was made in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.net = nn.Sequential(self.net[0], nn.Tanh(), nn.Linear(32, 16), Kept(), nn.Linear(16, 1))

    def parallel_plan(self) -> dict[str, str]:
        return {"net.2": "colwise", "net.3": "rowwise"}


WAYS: tuple[type[Net], ...] = (
    OptimizerOfInit, ListOfInit, GroupsById, HookOfInit, HookLater, HookAfterAccumulation, Attributes,
    AttributeInForward, KeptInForward,
)  # fmt: skip


def train_each(
    rank: int, world_size: int, choose: dict[str, Any], prepare: Any, batches: list[Batch], ways: Sequence[type[Net]]
) -> list[tuple[Any, list[str]]]:
    """Train a module of each class on this rank's share; return its weights, or what was refused, and all warnings."""
    outcomes: list[tuple[Any, list[str]]] = []
    for way in ways:
        trainer = sg.Trainer(**(QUIET | {"devices": world_size} | choose))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(prepare(way()), share(trainer, batches))
                outcomes.append((weights_of(trainer), [str(each.message) for each in caught]))
            except StratagemError as error:
                outcomes.append((f"refused: {error}", []))
            finally:
                trainer.run.close()  # an engine may count a run that is open as another replica
    return outcomes
