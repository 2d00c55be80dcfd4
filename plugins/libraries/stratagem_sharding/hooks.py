"""Hooks that strategies over FSDP2 share: each reshards first what a step may have left gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.api import hookimpl
from stratagem.api.named_state import physical_optimizer_state
from stratagem.api.state_fit import check_weights, taken_out
from stratagem.errors import ConfigError
from stratagem_sharding.clipping import clip_values
from stratagem_sharding.param_groups import reshard
from stratagem_sharding.shards import local, shard_like

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stratagem.api import RunContext


class ShardingHooks:
    """A base class of strategies. What is on the meta device belongs to other ranks, which load it."""

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Scale the gradients of `parameters` to a norm of at most `max_norm`; return the norm before. Collective."""
        raise NotImplementedError

    @hookimpl
    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, max_value: float | None
    ) -> torch.Tensor | float:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if max_value is not None:
            clip_values((local(p.grad) for p in parameters), max_value)
            return 0.0
        assert max_norm is not None, "one of the two limits is set"
        return self.clip_norm(parameters, max_norm)

    @hookimpl(optionalhook=True)
    def on_validation_end(self, run: RunContext) -> None:
        reshard(run.model)

    on_test_end = on_predict_end = on_validation_end

    @hookimpl
    def load_model_state(
        self, state: dict[str, torch.Tensor], module: nn.Module, strict: bool, run: RunContext
    ) -> bool:
        reshard(run.model)
        own = module.state_dict()
        check_weights({name: getattr(value, "shape", None) for name, value in own.items()}, state, strict)
        mine = {name: shard_like(value, own.get(name)) for name, value in state.items() if _is_here(own.get(name))}
        module.load_state_dict(mine, strict=strict and len(mine) == len(state))
        return True

    @hookimpl
    def load_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext
    ) -> bool:
        reshard(run.model)
        own = dict(module.named_parameters())
        mine = {
            name: {key: shard_like(value, own.get(name)) for key, value in entry.items()}
            for name, entry in taken_out(state["state"])
            if _is_here(own.get(name))
        }
        optimizer.load_state_dict(physical_optimizer_state(state | {"state": mine}, optimizer, module))
        return True


def wrapped_earlier(user: nn.Module, attribute: str, mesh: Any, *, was: str) -> nn.Module | None:
    """Return the root that an earlier run kept with its mesh in an `attribute` of `user`; None if there was none.

    Raises:
        ConfigError: that run had other processes than `mesh`; `was` tells what it did with the model.
    """
    root, earlier = user.__dict__.get(attribute, (None, mesh))
    if earlier != mesh:
        raise ConfigError(
            f"the model was {was} by an earlier run over other processes",
            expected="a model that is whole, or the same processes",
            do="save a checkpoint and load it into a new model",
        )
    return root  # type: ignore[no-any-return]


def _is_here(value: Any) -> bool:
    return not (isinstance(value, torch.Tensor) and value.is_meta)
