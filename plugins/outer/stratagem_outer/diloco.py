"""Train each replica for hundreds of steps, then make one outer step with the average of their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from attrs import define, field
from torch import Tensor

from stratagem.api.validators import at_least, between, more_than
from stratagem.errors import ConfigError
from stratagem_outer.compressed import mean_in_fp16, mean_in_int8
from stratagem_outer.outer_strategy import OuterStrategy
from stratagem_process_group.messages import averages, local_tensor, plain_mean

if TYPE_CHECKING:
    from stratagem.api import RunContext

_AVERAGES = {None: plain_mean, "fp16": mean_in_fp16, "int8": mean_in_int8}


@define(eq=False, kw_only=True)
class DiLoCoStrategy(OuterStrategy):
    """Every team trains its replica for a period; then an outer SGD steps with the average change of the parameters.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023. The module's optimizer
    is the inner one; the paper uses AdamW. Holds two more copies of the trained parameters: those after the last outer
    step (the anchor), and the outer momentum.
    """

    path: ClassVar[str] = "strategy.diloco"

    #: Inner steps between two outer steps. A longer period sends less, and replicas differ more.
    period: int = field(default=500, validator=at_least(1))
    #: Learning rate of the outer SGD: 1 without momentum gives the average of the teams' parameters.
    outer_lr: float = field(default=0.7, validator=more_than(0))
    #: Momentum of the outer SGD; 0 saves the memory for it.
    outer_momentum: float = field(default=0.9, validator=between(0, 1))
    #: Nesterov momentum instead of classical momentum.
    nesterov: bool = True
    #: Dtype in which the outer step sends: fp16 halves the bytes of fp32, int8 with scales quarters them. Rounds the
    #: changes of the parameters, not the parameters; there is no error feedback.
    compress: Literal["fp16", "int8"] | None = None

    #: The parameters after the last outer step, at least in fp32: a step may be below the precision of 16 bits.
    _anchor: dict[str, Tensor] = field(init=False, factory=dict)
    _momentum: dict[str, Tensor] = field(init=False, factory=dict)

    def before_step(self, run: RunContext) -> None:
        if self._anchor.keys() != self._trained.keys():  # the first step, or one with other trained parameters
            self.reset_sync_state()
            self._check_compression()
            with torch.no_grad():
                self._anchor = {name: _to_at_least_fp32(tensor) for name, tensor in self.local_parameters().items()}

    def _check_compression(self) -> None:
        if self.compress == "fp16" and all(local_tensor(p).dtype.itemsize <= 2 for p in self._trained.values()):
            raise ConfigError(
                f"{self.path}.compress is 'fp16' and all parameters have 16 bits already", expected="'int8' or None"
            )

    def is_sync_step(self) -> bool:
        return self.steps % self.period == 0

    def sync(self, run: RunContext) -> None:
        mine = self.local_parameters()
        for name, tensor in mine.items():  # the change of this team's parameters, with the sign of a gradient
            tensor.sub_(self._anchor[name]).neg_()
        for name, gradient in averages(mine, self.sync_group, run.device, _AVERAGES[self.compress]):
            anchor = self._anchor[name]
            anchor.sub_(self._direction(name, gradient.to(anchor)), alpha=self.outer_lr)
        for name, tensor in mine.items():
            tensor.copy_(self._anchor[name])
        self.parameters_in_sync = True

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        """Return the direction of a step of torch.optim.SGD."""
        if not self.outer_momentum:
            return gradient
        previous = self._momentum.get(name)
        momentum = gradient.clone() if previous is None else previous.mul_(self.outer_momentum).add_(gradient)
        self._momentum[name] = momentum
        return gradient.add(momentum, alpha=self.outer_momentum) if self.nesterov else momentum

    def reset_sync_state(self) -> None:
        self._anchor, self._momentum = {}, {}

    def shared_sync_state(self) -> dict[str, Any]:
        return {"anchor": self._anchor, "momentum": self._momentum}

    def load_shared_sync_state(self, state: dict[str, Any]) -> None:
        devices = {name: tensor.device for name, tensor in self.local_parameters().items()}
        self._anchor = {name: tensor.to(devices[name]) for name, tensor in state["anchor"].items()}
        self._momentum = {name: tensor.to(devices[name]) for name, tensor in state["momentum"].items()}


def _to_at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
