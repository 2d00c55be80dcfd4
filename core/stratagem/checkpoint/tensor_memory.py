"""Which tensors are copied on their way into a checkpoint and out of it.

[Note: gathered tensors]
What a strategy gathers for a save is a copy already. Where it calls `as_gathered`, a background save uses that memory
rather than copy it once more. This holds only for tensors that are made while the state of a save is collected: what
is gathered for another caller belongs to that caller, which may change it during a later save.

[Note: mapped tensors]
A format may return tensors that are mapped from its files. Weights are copied into the model, and
`physical_optimizer_state` copies the state of optimizers. `with_own_memory` copies all other tensors, as soon as the
state is read. So nothing refers to the files once a load has returned: they may be overwritten or deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

_GATHERED = "_stratagem_gathered"
_collecting: ContextVar[bool] = ContextVar("collecting", default=False)


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Within: the state of a save is collected, which nothing but the save uses; see [Note: gathered tensors]."""
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def as_gathered(tensor: Tensor, part: Tensor | None = None) -> Tensor:
    """Return `tensor`, which was gathered; it is not copied again for a save, unless it shares memory with `part`.

    Args:
        part: what this rank had of it. A tensor that was not divided may have been returned as it is.
    """
    if _collecting.get() and tensor.device.type == "cpu" and not _share_memory(tensor, part):
        setattr(tensor.untyped_storage(), _GATHERED, True)
    return tensor


def _share_memory(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def is_gathered(tensor: Tensor) -> bool:
    """Whether `tensor`, on the CPU, was made for a save alone; see [Note: gathered tensors]."""
    return tensor.device.type == "cpu" and hasattr(tensor.untyped_storage(), _GATHERED)


#: What is copied when it is applied.
_APPLIED = ("state_dict", "optimizers")


def with_own_memory(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with copies of all tensors but the model's, the optimizers' and the rows of ranks.

    See [Note: mapped tensors].
    """
    # Of rows of ranks, the few that a rank decodes have their own memory.
    kept = {"ranks", *_APPLIED} if isinstance(state.get("ranks"), torch.Tensor) else _APPLIED
    return {key: value if key in kept else _copied(value) for key, value in state.items()}


def with_own_extras(weights: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return `weights` with copies of the tensors that no parameter or buffer of `module` takes the values of.

    They are the extra state of a part, or a weight in another form, which the part may keep.
    """
    taken: set[str] = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = {*part._parameters, *part._buffers} - {*getattr(part, "loads_converted", ())}
        taken |= {f"{prefix}.{name}".removeprefix(".") for name in own}
    extras = {
        name: value.clone()
        for name, value in weights.items()
        if name not in taken and isinstance(value, torch.Tensor) and not value.is_meta
    }
    return {**weights, **extras} if extras else weights  # an engine may have a mapping of its own


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
