"""Values that replicas log, combined and logged once for the whole batch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from stratagem_dp.replicas import RefusedInReplica, accumulates, refused_in_replica
from stratagem_trainer.api.metric_values import combine, number


@define
class ReplicaLog:
    """Replaces a module's `log` in one replica, and keeps the calls until all replicas have ended."""

    #: Samples in the replica's chunk.
    size: int
    entries: list[tuple[str, Any, dict[str, Any]]] = field(factory=list)

    def __call__(self, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, RefusedInReplica) or accumulates(value):
            raise refused_in_replica(value.name if isinstance(value, RefusedInReplica) else type(value).__name__)
        self.entries.append((name, value.detach() if isinstance(value, Tensor) else value, options))


def publish(module: Any, logs: list[ReplicaLog], device: torch.device) -> None:
    """Call `log` of `module` once for each value that replicas logged, combined over the whole batch."""
    calls: dict[tuple[str, int], list[tuple[Any, int, dict[str, Any]]]] = {}
    for log in logs:
        times: Counter[str] = Counter()
        for name, value, options in log.entries:
            moved = value.to(device) if isinstance(value, Tensor) else value
            size = log.size if options.get("batch_size") is None else options["batch_size"]
            calls.setdefault((name, times[name]), []).append((moved, size, options))
            times[name] += 1
    for (name, _), entries in calls.items():
        values, sizes, (options, *_) = zip(*entries, strict=True)
        reduce_fx = options.get("reduce_fx", "mean")
        merged = [_merged(name, values, sizes, reduce_fx)] if _can_merge(values, reduce_fx) else values
        for value in merged:
            module.log(name, value, **options | {"batch_size": sum(sizes)})


def _can_merge(values: Sequence[Any], reduce_fx: Any) -> bool:
    """Whether the values can be combined; otherwise each is passed to `Module.log`, which checks it."""
    numbers = all(isinstance(value, Tensor | int | float) for value in values)
    return numbers and isinstance(reduce_fx, str) and reduce_fx in ("mean", "sum", "max", "min")


def _merged(name: str, values: Sequence[Any], sizes: Sequence[int], reduce_fx: str) -> Any:
    numbers = [number(name, value) for value in values]
    if reduce_fx == "mean":
        precise = [value.double() if isinstance(value, Tensor) else value for value in numbers]
        return sum(value * (size / sum(sizes)) for value, size in zip(precise, sizes, strict=True))
    return functools.reduce(lambda total, value: combine(total, value, reduce_fx), numbers, None)
