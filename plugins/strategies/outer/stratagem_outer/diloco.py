"""Train far apart for hundreds of steps, then step together with how far the teams came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api.validators import at_least, between, more_than
from stratagem.errors import ConfigError
from stratagem_outer.compressed import mean_in_fp16, mean_in_int8
from stratagem_outer.messages import local, means, plain_mean
from stratagem_outer.outer_strategy import OuterStrategy

if TYPE_CHECKING:
    from stratagem.api import RunContext

_AVERAGES = {None: plain_mean, "fp16": mean_in_fp16, "int8": mean_in_int8}


@define(eq=False, kw_only=True)
class DiLoCoStrategy(OuterStrategy):
    """Every team trains by itself for a period; then one step of an outer SGD is made on how far they came, on average.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. The module's optimizer
    is the inner one; AdamW is what the method was made with. Holds two more copies of the trained parameters: where the
    teams met last (the anchor), and the outer momentum.
    """

    path: ClassVar[str] = "strategy.diloco"

    #: Inner steps between two outer ones.
    period: int = field(default=500, validator=at_least(1))
    #: Learning rate of the outer SGD: 1 with no momentum takes the average of the teams' models.
    outer_lr: float = field(default=0.7, validator=more_than(0))
    #: Momentum of the outer SGD; 0 needs no memory for it.
    outer_momentum: float = field(default=0.9, validator=between(0, 1))
    #: Nesterov's momentum instead of the heavy ball's.
    nesterov: bool = True
    #: What the outer step sends: half the bytes of fp32, or a quarter at 8 bits and a scale for each message. Rounds
    #: how far the teams came, not where they are; what is rounded off is not made up for later.
    compress: Literal["fp16", "int8"] | None = None

    #: At least in fp32: an outer step may be smaller than a 16-bit parameter can tell.
    _anchor: dict[str, Tensor] = field(init=False, factory=dict)
    _momentum: dict[str, Tensor] = field(init=False, factory=dict)

    def _before_step(self, run: RunContext) -> None:
        if self._anchor.keys() != self._trained.keys():  # the first step, or one with other parameters
            self._forget()
            self._check_compression()
            with torch.no_grad():
                self._anchor = {name: _exact(tensor) for name, tensor in self._local().items()}

    def _check_compression(self) -> None:
        if self.compress == "fp16" and all(local(p).dtype.itemsize <= 2 for p in self._trained.values()):
            raise ConfigError(
                f"{self.path}.compress is 'fp16' and the parameters have 16 bits already",
                expected="'int8' or None",
            )

    def _meets(self) -> bool:
        return self._steps % self.period == 0

    def _meet(self, run: RunContext) -> None:
        mine = self._local()
        for name, tensor in mine.items():  # the way this team came, with the sign of a gradient
            tensor.sub_(self._anchor[name]).neg_()
        for name, gradient in means(mine, self._across, run.device, _AVERAGES[self.compress]):
            anchor = self._anchor[name]
            anchor.sub_(self._direction(name, gradient.to(anchor)), alpha=self.outer_lr)
        for name, tensor in mine.items():
            tensor.copy_(self._anchor[name])
        self._met = True

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        """Return where torch.optim.SGD would step."""
        if not self.outer_momentum:
            return gradient
        earlier = self._momentum.get(name)
        momentum = gradient.clone() if earlier is None else earlier.mul_(self.outer_momentum).add_(gradient)
        self._momentum[name] = momentum
        return gradient.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum

    def _forget(self) -> None:
        self._anchor, self._momentum = {}, {}

    def _memory(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "momentum": self._momentum}

    def _remember(self, memory: dict[str, Any]) -> None:
        devices = {name: tensor.device for name, tensor in self._local().items()}
        self._anchor = {name: tensor.to(devices[name]) for name, tensor in memory["anchor"].items()}
        self._momentum = {name: tensor.to(devices[name]) for name, tensor in memory["momentum"].items()}


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
