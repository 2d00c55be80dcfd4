"""Stage 3: partition a model over the ranks module by module, and use it in one run after another."""

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

#: Attribute of a module that was partitioned: its `Partitions`.
_PARTITIONS = "_stratagem_shared"


@define(eq=False)
class Partitions:
    """A module partitioned over `world_size` ranks, whose parameters refer to the process group of one run."""

    module: nn.Module
    world_size: int
    #: The ``deepspeed.zero.Init`` that partitioned it; several if it has got new parameters since.
    makers: list[Any] = field(factory=list)

    def join(self) -> None:
        """Make the parameters gather over the process group of the current run."""
        from deepspeed import comm

        self._set_group(comm.get_world_group())

    def leave(self) -> None:
        """Make the parameters refer to no process group, which would otherwise outlive its run."""
        self._set_group(None)

    def _set_group(self, group: Any) -> None:
        for maker in self.makers:
            maker.ds_process_group = group
        parameters: Iterable[Any] = self.module.parameters()  # with attributes of DeepSpeed's
        for parameter in parameters:
            if hasattr(parameter, "ds_id"):
                parameter.ds_process_group = group


def check_not_compiled(module: nn.Module) -> None:
    """Refuse compiled layers: torch would trace partitions, and layers without the hooks that gather parameters.

    Raises:
        ConfigError: there is one.
    """
    for name, part in module.named_modules():
        called = getattr(part, "_compiled_call_impl", None) is not None
        if (called or isinstance(part, OptimizedModule)) and next(part.parameters(), None) is not None:
            raise ConfigError(
                f"{name or type(part).__name__!r} is compiled, and stage 3 gathers the parameters of each layer in "
                "hooks, which a compiled layer does not run as required",
                expected="layers that are not compiled",
                do='leave out torch.compile at stage 3, or choose strategy="deepspeed_stage_2"',
            )


def partition(module: nn.Module, make: Callable[[], Any], dtype: torch.dtype | None, run: RunContext) -> Partitions:
    """Materialize `module` layer by layer, and keep a partition of each parameter on each rank. Collective.

    Args:
        module: what is partitioned.
        make: returns the ``deepspeed.zero.Init`` that partitions parameters.
        dtype: of the partitions; None keeps the dtypes of the parameters.
        run: the current run.

    Raises:
        ConfigError: an earlier run partitioned it over another number of processes.
    """
    partitions: Partitions = module.__dict__.get(_PARTITIONS) or Partitions(module, run.world_size)
    module.__dict__[_PARTITIONS] = partitions
    if partitions.world_size != run.world_size:
        raise ConfigError(
            f"the model was partitioned over {partitions.world_size} processes by an earlier run",
            expected=f"a model that is not partitioned, or the {run.world_size} processes of this run",
            do="save a checkpoint and load it into a new model",
        )
    if any(not hasattr(parameter, "ds_id") for parameter in module.parameters()):
        maker = make()
        partitions.makers.append(maker)
        _partition_new(module, maker, dtype, run)
    partitions.join()
    return partitions


def _partition_new(module: nn.Module, maker: Any, dtype: torch.dtype | None, run: RunContext) -> None:
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
