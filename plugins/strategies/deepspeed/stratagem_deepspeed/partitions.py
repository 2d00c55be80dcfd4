"""Stage 3: a model of which each rank keeps a share, part by part, from one run to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import nn
from torch._dynamo import OptimizedModule

from stratagem.errors import ConfigError
from stratagem_transforms.wrap_policy import children_first

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Where a module remembers how it was shared out.
_SHARED = "_stratagem_shared"


@define(eq=False)
class Shares:
    """A module that was shared out over `world_size` ranks; its parameters only know the group of one run."""

    module: nn.Module
    world_size: int
    #: What shared it out; several, if it has grown since.
    makers: list[Any] = field(factory=list)

    def join(self) -> None:
        """Have the parameters gather over the group of this run."""
        from deepspeed import comm

        self._talk_over(comm.get_world_group())

    def leave(self) -> None:
        """Have them hold no group: it would outlive its run."""
        self._talk_over(None)

    def _talk_over(self, group: Any) -> None:
        for maker in self.makers:
            maker.ds_process_group = group
        parameters: Iterable[Any] = self.module.parameters()  # with attributes of DeepSpeed's
        for parameter in parameters:
            if hasattr(parameter, "ds_id"):
                parameter.ds_process_group = group


def check_not_compiled(module: nn.Module) -> None:
    """Refuse a part that was compiled: what torch traces are shares, and layers that gather nothing.

    Raises:
        ConfigError: there is one.
    """
    for name, part in module.named_modules():
        called = getattr(part, "_compiled_call_impl", None) is not None
        if (called or isinstance(part, OptimizedModule)) and next(part.parameters(), None) is not None:
            raise ConfigError(
                f"{name or type(part).__name__!r} is compiled, and stage 3 gathers the parameters of each layer in "
                "hooks, which a compiled part does not run as it should",
                expected="layers that are not compiled",
                do='leave out torch.compile at stage 3, or choose strategy="deepspeed_stage_2"',
            )


def share_out(module: nn.Module, make: Callable[[], Any], dtype: torch.dtype | None, run: RunContext) -> Shares:
    """Give values to one part of `module` after the other, and leave each rank its share of them. Collective.

    Args:
        make: returns the ``deepspeed.zero.Init`` that does so.
        dtype: of the shares, if not that of the parameters.

    Raises:
        ConfigError: an earlier run shared it out over another number of processes.
    """
    shares: Shares = module.__dict__.get(_SHARED) or Shares(module, run.world_size)
    module.__dict__[_SHARED] = shares
    if shares.world_size != run.world_size:
        raise ConfigError(
            f"the model was shared out over {shares.world_size} processes by an earlier run",
            expected=f"a model that is whole, or the {run.world_size} of this one",
            do="save a checkpoint and load it into a new model",
        )
    if any(not hasattr(parameter, "ds_id") for parameter in module.parameters()):
        maker = make()
        shares.makers.append(maker)
        _give(module, maker, dtype, run)
    shares.join()
    return shares


def _give(module: nn.Module, maker: Any, dtype: torch.dtype | None, run: RunContext) -> None:
    fill = run.materializer(module)
    fill.device = run.device
    for part in children_first(module, set(module.modules())):
        fill.fill(part)
        parameters: list[Any] = list(part.parameters(recurse=False))  # DeepSpeed gives them methods
        for parameter in parameters:
            if hasattr(parameter, "ds_id"):
                continue
            keeps = dtype is None or not parameter.is_floating_point()
            parameter.data = parameter.data.to(run.device, None if keeps else dtype)
            run.collectives.broadcast(parameter.data)
            maker._convert_to_deepspeed_param(parameter)
            parameter.partition()
