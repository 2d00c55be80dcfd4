"""Let an optimizer step groups in which some parameters are cut and others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

#: Options of a group with which torch updates all of its parameters in one call.
_TOGETHER = ("foreach", "fused")


@contextlib.contextmanager
def stepped_by_kind(optimizer: Optimizer) -> Iterator[None]:
    """Within: one call of torch updates parameters of one kind, as it needs DTensors of one mesh or plain tensors.

    Groups that mix kinds are in pieces within, and whole, with all of their options, before and after: checkpoints
    and schedulers see those that the user made.

    Raises:
        ConfigError: an operation of the optimizer for which torch has no rule where parameters are cut.
    """
    try:
        with _in_pieces(optimizer):
            yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} computes what torch has no rule for where strategy.parallel cuts parameters "
            f"({str(error).splitlines()[0]})",
            expected="an optimizer that updates each element alone", do="use SGD, Adam, AdamW, Adagrad or RMSprop",
        ) from error  # fmt: skip


#: Parts of torch's messages about DTensors.
_SIGNS = ("mixed torch.Tensor and DTensor", "require placement changes", "Sharding propagation failed")


@contextlib.contextmanager
def _in_pieces(optimizer: Optimizer) -> Iterator[None]:
    groups = optimizer.param_groups
    pieces = [_pieces(group) for group in groups]
    if all(len(each) == 1 for each in pieces):
        yield
        return
    optimizer.param_groups = [piece for each in pieces for piece in each]
    try:
        yield
    finally:
        for group, each in zip(groups, pieces, strict=True):
            if len(each) > 1:  # what the step has changed, it has changed in all pieces
                group.update({key: value for key, value in each[0].items() if key != "params"})
        optimizer.param_groups = groups


def _pieces(group: dict[str, Any]) -> list[dict[str, Any]]:
    if not any(group.get(option) for option in _TOGETHER):
        return [group]
    by_kind: dict[Any, list[Any]] = {}
    for parameter in group["params"]:
        kind = parameter.device_mesh if isinstance(parameter, DTensor) else None
        by_kind.setdefault(kind, []).append(parameter)
    return [group] if len(by_kind) == 1 else [group | {"params": parameters} for parameters in by_kind.values()]
