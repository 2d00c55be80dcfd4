"""Tensor and sequence parallelism: layers cut over the axis `tensor`, by a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigError
from stratagem_parallel.description import short_names
from stratagem_parallel.placement import cut_axes
from stratagem_parallel.plan import plan_of
from stratagem_parallel_unchanged.tensor import rules as rules  # slices need them
from stratagem_parallel_unchanged.tensor.copies import without_marks
from stratagem_parallel_unchanged.tensor.cutting import cut, styled
from stratagem_parallel_unchanged.tensor.functions import see_slices, trace_loss_layers
from stratagem_parallel_unchanged.tensor.moves import Line, TracedStep, all_whole
from stratagem_parallel_unchanged.tensor.slices import Slice, part_of_slice
from stratagem_sharding.sharded_use import is_sharded_use, tensors_in_use
from stratagem_transforms.activation_checkpointing import Selective

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from stratagem.api import Collectives

__all__ = [
    "PartsBackend", "all_whole", "connect", "cut_layers", "described", "named_use", "share_parts", "whole_outputs",
]  # fmt: skip

#: Where a module that was cut remembers the ranks that hold its parts.
_LINE = "_stratagem_tensor_line"
#: And the buffers of its layers, which a step may set to an activation.
_BUFFERS = "_stratagem_tensor_buffers"


def cut_layers(
    user: nn.Module, option: Any, over: Collectives, mesh: DeviceMesh, fill: Callable[[nn.Module], None], *,
    with_experts: bool,
) -> dict[str, Any]:  # fmt: skip
    """Cut the layers of `user` that its plan names over the ranks of `over`; return the styles by name. Collective.

    Args:
        option: ``strategy.parallel.plan``.
        mesh: torch's mesh of these ranks.
        fill: gives values to a part of the model that was built without.
        with_experts: as in `plan_of`.

    Raises:
        ConfigError: a plan with a mistake, or none at all.
    """
    line = Line(over, mesh)
    plan, where = plan_of(user, option, line.size, with_experts=with_experts)
    cut(user, styled(user, plan, line, where), line, fill)
    user.__dict__ |= {_LINE: line, _BUFFERS: [part._buffers for part in user.modules() if part._buffers]}
    return plan


def whole_outputs(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Return what a step returned, with the whole of each activation that is cut: a hook on the step. Collective."""
    return without_marks(all_whole(output))


@frozen
class PartsBackend:
    """A backend of ``torch.compile`` whose graphs compute with the parts of slices that enter them."""

    backend: Callable[[Any, Any], Any]

    def __call__(self, graph: Any, inputs: Any) -> Any:
        compiled = self.backend(graph, inputs)
        return lambda *values: compiled(*(part_of_slice(value) if type(value) is Slice else value for value in values))


def connect(user: nn.Module, over: Collectives, *, traced: bool) -> None:
    """Let the layers of `user` that are cut send over `over`.

    Args:
        traced: whether torch's compiler traces what they compute.
    """
    line = user.__dict__.get(_LINE)
    if line is not None:
        line.connect(over, traced=traced)
        if traced:
            trace_loss_layers()
        line.sharing.traces = not any(isinstance(part.forward, Selective) for part in user.modules())


def share_parts(user: nn.Module, over: Collectives) -> None:
    """Give the parts of parameters that `user` has cut itself the values of the first replica. Collective.

    Args:
        over: the ranks that are at the same place of the axis `tensor`.
    """
    if over.world_size > 1:
        parts = [parameter for parameter in user.parameters() if isinstance(parameter, DTensor)]
        over.replicate(part.to_local().detach() for part in parts)


def described(plan: dict[str, Any], user: nn.Module, size: int) -> str:
    """Return a plan as text: the layers of each style, by patterns where all that match are cut."""
    parts = {each for name in plan for each in user.get_submodule(name).parameters()}
    share = sum(each.numel() for each in parts) / sum(each.numel() for each in user.parameters())
    every = [name for name, _ in user.named_modules()]
    cut: dict[str, list[str]] = {}
    for name, style in plan.items():
        cut.setdefault(str(style), []).append(name)
    shown = [f"{name} {style}" for style, names in cut.items() for name in short_names(names, every)]
    return f"tensor parallelism of {share:.0%} of the parameters over {size} ranks: {', '.join(shown)}"


@contextlib.contextmanager
def named_use(user: nn.Module) -> Iterator[None]:
    """Within a step: an operation on a parameter that is cut, outside of its layer, is an error that names it.

    A program's own functions see slices, and buffers are whole afterwards.
    """
    line = user.__dict__.get(_LINE)
    if line is None:
        yield
        return
    try:
        with see_slices(traced=line.traced), TracedStep(line) if line.traced else contextlib.nullcontext():
            yield
        for buffers in user.__dict__[_BUFFERS]:
            for name, buffer in buffers.items():
                if isinstance(buffer, Slice):  # what is saved is read on some ranks alone
                    buffers[name] = all_whole(buffer)
    except RuntimeError as error:
        if not is_sharded_use(error):
            raise
        used = {id(tensor) for tensor in tensors_in_use(error)}
        named = [(name, each) for name, each in user.named_parameters() if "tensor" in cut_axes(each)]
        names = [name for name, each in named if id(each) in used]
        if not names:
            raise ConfigError(
                "an operation outside of layers got plain tensors and parameters that are cut over "
                "strategy.parallel.tensor",
                expected="operations on parameters of one kind, such as a penalty of each one alone",
                do="regularize with the optimizer's weight_decay, or leave the layers that are used out of the plan",
            ) from error
        layer = names[0].rpartition(".")[0]
        raise ConfigError(
            f"{names[0]!r}, which is cut over strategy.parallel.tensor, was used outside of its layer's forward",
            expected="a call of the layer, which computes with the parts of all ranks",
            do=f"call the layer (a Linear that is tied to an Embedding), or leave {layer!r} out of the plan",
        ) from error
    finally:
        line.sharing.forget()
