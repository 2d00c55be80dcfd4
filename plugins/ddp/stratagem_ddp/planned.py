"""DDP where nothing is computed: torch's reducer is in C++, and takes real tensors only."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem_buckets import Bucket
from stratagem_buckets.flat import views
from stratagem_buckets.reducer import bucket_reducer
from stratagem_ddp.words import trained_names, unused

if TYPE_CHECKING:
    from stratagem.api import RunContext


class PlannedReplica(nn.Module):
    """Keeps gradients in the buckets of torch's reducer, and sends these when they are full.

    Args:
        bucket_cap_mb: of DDP, in MiB.
        views: gradients are views of buckets.
        buffers: rank 0's buffers are sent before each forward.
        rebuilds: torch makes new buckets after the first step, in the order in which gradients came.
    """

    def __init__(
        self, module: nn.Module, run: RunContext, bucket_cap_mb: float, views: bool, buffers: bool, rebuilds: bool
    ) -> None:
        super().__init__()
        self.module, self._run, self._views, self._sends_buffers = module, run, views, buffers
        self._reduce = bucket_reducer(run)
        self._groups = _buckets([p for p in module.parameters() if p.requires_grad], int(bucket_cap_mb * (1 << 20)))
        self._memory, self._has_sent, self._rebuilds = self._allocate(), False, rebuilds
        self._first: list[torch.Tensor] = []
        self._waiting = self._all()
        for index, group in enumerate(self._groups):
            for number, parameter in enumerate(group):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, index, number))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            self._rebuild()
            if self._sends_buffers:
                with self._run.peers.traffic.sent_by("buffers"):
                    self._run.peers.replicate(self.module.buffers())
        return self.module(*inputs, **options)

    def _allocate(self) -> list[torch.Tensor]:
        device = self._run.device
        return [
            torch.empty(sum(p.numel() for p in group), dtype=group[0].dtype, device=device) for group in self._groups
        ]

    def _rebuild(self) -> None:
        """Make new buckets once the first were sent, as torch does; what sent them keeps them a moment longer."""
        self._waiting, self._first = self._all(), []
        if self._has_sent and self._rebuilds:
            self._first, self._memory, self._rebuilds = self._memory, self._allocate(), False

    def _parts(self, index: int) -> list[torch.Tensor]:
        return views(self._memory[index], self._groups[index])

    def _arrived(self, index: int, number: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "it has just been computed"
        part = self._parts(index)[number].copy_(parameter.grad)
        if self._views:
            parameter.grad = part
        if number in self._waiting[index]:
            self._waiting[index].remove(number)
            if not self._waiting[index] and self._run.sync_gradients:
                self._send(index)

    def finish(self, searches: bool) -> None:
        """End a backward pass that sends gradients.

        Args:
            searches: unused parameters are searched, and sent as zeros.

        Raises:
            ConfigError: parameters got no gradient, and are not searched.
        """
        left = {id(self._groups[index][number]) for index, numbers in enumerate(self._waiting) for number in numbers}
        if left and not searches:
            raise unused([name for name, parameter in trained_names(self) if id(parameter) in left], self._run.rank)
        self._rebuilds = self._rebuilds and not left
        for index, numbers in enumerate(self._waiting):
            if numbers:
                self._send(index)
        self._waiting = self._all()

    def _all(self) -> list[set[int]]:
        """Return the numbers of all parameters of each bucket."""
        return [set(range(len(group))) for group in self._groups]

    def _send(self, index: int) -> None:
        group, memory = self._groups[index], self._memory[index]
        self._has_sent = True
        if self._reduce is None:
            with self._run.peers.traffic.sent_by("gradients"):
                self._run.peers.average_async(memory)
            return
        parts = tuple(self._parts(index))
        is_last = index == len(self._groups) - 1
        self._reduce(Bucket(buffer=memory, index=index, is_last=is_last, parameters=tuple(group), gradients=parts))


def _buckets(parameters: list[nn.Parameter], limit: int) -> list[list[nn.Parameter]]:
    """Group `parameters` as torch does: in reverse order, by dtype, until a bucket has `limit` bytes."""
    groups: list[list[nn.Parameter]] = []
    sizes: dict[torch.dtype, tuple[int, int]] = {}  # of the open bucket: its number, and its bytes
    for parameter in reversed(parameters):
        number, size = sizes.get(parameter.dtype, (len(groups), 0))
        if number == len(groups):
            groups.append([])
        groups[number].append(parameter)
        size += parameter.nbytes
        if size >= limit:
            number, size = len(groups), 0
        sizes[parameter.dtype] = number, size
    return groups
