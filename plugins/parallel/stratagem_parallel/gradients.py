"""Average gradients over replicas while backward runs, in buckets that comm hooks may transform.

torch's DDP cannot hold DTensors, averages all parameters over one group, and takes part in some pipeline schedules
only; so buckets are formed here (README.md tells why).

[Note: equal messages on all ranks]
Buckets are sent in a fixed order, whichever gradients arrive first, and a parameter without a gradient adds zeros. A
parameter that no rank has a gradient of keeps none: a flag of each parameter is reduced together with the gradients.
Parameters that become trained during a run get buckets after those that are there, which keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from stratagem_buckets.flat import averaged, flatten, grouped, reached, views
from stratagem_process_group.losses import note_gradient
from stratagem_sharding.shards import local

if TYPE_CHECKING:
    from stratagem.api import Collectives


def settle(parameter: nn.Parameter) -> torch.Tensor | None:
    """Complete the gradient of `parameter` over the axes that it is cut on, and return it. Collective on these."""
    gradient = parameter.grad
    if not (isinstance(gradient, DTensor) and isinstance(parameter, DTensor)):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient


class GradientAverager:
    """Averages the gradients of some parameters over some ranks; see [Note: equal messages on all ranks].

    Args:
        parameters: those of this rank, in the order of the model; they are averaged once they are trained.
        over: the ranks to average over.
        reduce: the comm hooks, if there are any.
        cap_mb: the size of a bucket, in megabytes.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], over: Collectives, reduce: Any = None, *, cap_mb: float
    ) -> None:
        self.over, self.reduce = over, reduce
        self._limit = cap_mb * 2**20
        self._frozen = list(reversed(parameters))
        self._buckets: list[list[nn.Parameter]] = []
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._waiting: list[int] = []
        self._sent: list[tuple[list[nn.Parameter], torch.futures.Future[torch.Tensor]]] = []
        self._seen: set[torch.Tensor] = set()
        self._is_active = False
        self._handles: list[Any] = []
        self._add_trained()

    def _add_trained(self) -> None:
        """Make buckets of the parameters that are trained and have none yet."""
        trained = [parameter for parameter in self._frozen if parameter.requires_grad]
        if not trained:
            return
        self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        for bucket in grouped(trained, self._limit, lambda parameter: local(parameter.detach())):
            self._bucket_of.update(dict.fromkeys(bucket, len(self._buckets)))
            self._buckets.append(bucket)
        self._handles += [parameter.register_post_accumulate_grad_hook(self._on_gradient) for parameter in trained]

    def begin(self) -> None:
        """Send buckets from now on, as soon as their gradients are complete: called before the last backward."""
        self._add_trained()
        self._waiting, self._sent, self._is_active = [len(bucket) for bucket in self._buckets], [], True
        self._seen.clear()

    def finish(self) -> None:
        """Send the rest and put the averages into the gradients: called after the last backward. Collective."""
        if not self._is_active:
            self.begin()
        self._is_active = False
        while len(self._sent) < len(self._buckets):
            self._send()
        averages = [future.wait() for _, future in self._sent]
        if self.reduce is not None:
            self.reduce.finish()  # what hooks still send must not meet the flags, which may come first on some ranks
        for (bucket, _), average, flags in zip(self._sent, averages, self._reached(), strict=True):
            _write_back(bucket, average, flags)
        self._sent = []

    def close(self) -> None:
        """Leave the parameters alone from now on."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_active:
            return
        note_gradient(self._seen, parameter)
        self._waiting[self._bucket_of[parameter]] -= 1  # type: ignore[index]  # it is a parameter
        while len(self._sent) < len(self._buckets) and self._waiting[len(self._sent)] <= 0:
            self._send()

    def _send(self) -> None:
        index = len(self._sent)
        bucket = self._buckets[index]
        gradients = [settle(parameter) for parameter in bucket]
        parts = [
            torch.zeros_like(local(parameter)) if gradient is None else local(gradient)
            for parameter, gradient in zip(bucket, gradients, strict=True)
        ]
        flat = flatten(parts)
        self._sent.append((bucket, averaged(flat, index, self._buckets, parts, self.over, self.reduce)))

    def _reached(self) -> list[list[bool]]:
        """Return, for each parameter of each bucket, whether any rank has a gradient of it. Collective."""
        here = [parameter.grad is not None for bucket in self._buckets for parameter in bucket]
        found = iter(reached(here, self.over))
        return [[next(found) for _ in bucket] for bucket in self._buckets]


def _write_back(bucket: list[nn.Parameter], average: torch.Tensor, flags: list[bool]) -> None:
    parts = views(average, [local(parameter) for parameter in bucket])
    for parameter, view, has_gradient in zip(bucket, parts, flags, strict=True):
        if not has_gradient:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(view)
