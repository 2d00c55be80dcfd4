"""Weights that user code writes during a fit: copied to the fp32 masters that ZeRO steps.

[Note: manual writes]
ZeRO steps copies of the weights (masters) and then overwrites the module's parameters. A write to a parameter
(`clamp_`, `copy_`, `load_state_dict`) increments its version, which is checked before each step and before state is
read. At stage 3 the parameter must be gathered for that, and `GatheredParameters` reports the write. A write through
`.data` does not increment the version: a checksum detects it after steps 1, 2, 4, 8, ... and between epochs, and it is
refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigError
from stratagem_deepspeed.state import flats

_GATHER = "write inside deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ManualWrites:
    """Detects writes to the parameters that `zero` steps; see [Note: manual writes]."""

    def __init__(self, zero: Any, user: nn.Module) -> None:
        self._zero = zero
        self._named = [(name, each) for name, each in user.named_parameters() if each.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._versions: list[int] = []
        self._scattered: set[int] = set()
        self._steps, self._sums = 0, list[tuple[int, int]]()
        self._wrapped: list[Any] = [parameter for parameter in user.parameters() if hasattr(parameter, "ds_id")]
        for parameter in self._wrapped:
            self._watch_scatter(parameter)
        self.record()

    def _watch_scatter(self, parameter: Any) -> None:
        """Record the parameters that `GatheredParameters` scatters again, on all ranks."""
        partition = parameter.partition

        def watched(param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **options: Any) -> Any:
            if has_been_updated:
                self._scattered |= {id(each) for each in param_list or [parameter]}
            return partition(param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, **options)

        parameter.__dict__["partition"] = watched
        watched.__dict__["inner"] = partition

    def stop(self) -> None:
        """Restore the parameters' methods."""
        for parameter in self._wrapped:
            parameter.partition = parameter.partition.inner

    def record(self, *, stepped: bool = False) -> None:
        """Record the current parameters as those that ZeRO wrote."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._scattered.clear()
        self._steps += stepped
        self._sums = self._checksums() if self._steps & (self._steps - 1) == 0 else []

    def always_check_values(self) -> None:
        """Make the next `take_over` detect every write from now on, including those through `.data`."""
        self._sums = self._sums or self._checksums()

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy to the masters what was written since `record`.

        Raises:
            ConfigError: a write has no effect, or is not always detected.
        """
        versions = [parameter._version for parameter in self._parameters]
        if versions == self._versions and not self._scattered and not self._sums:
            return
        written = {id(p) for p, new, old in zip(self._parameters, versions, self._versions, strict=True) if new != old}
        self._check(written)
        written |= self._scattered
        if written:
            for flat in flats(self._zero, write=True):
                for piece in flat.pieces:
                    if id(piece.parameter) in written:
                        _put(_values(piece), piece.of(flat.tensor))
        self._versions, self._sums = versions, []
        self._scattered.clear()

    def _check(self, written: set[int]) -> None:
        for name, parameter in self._named:
            lies_elsewhere = parameter.numel() == 0 and getattr(parameter, "ds_numel", 0) > 0
            if id(parameter) in written - self._scattered and lies_elsewhere:
                raise ConfigError(
                    f"{name!r} was written to between steps, while it was partitioned over the ranks",
                    expected="writes to gathered parameters", do=_GATHER,
                )  # fmt: skip
        sums = self._checksums() if self._sums else []
        for (name, parameter), before, now in zip(self._named, self._sums, sums, strict=False):
            if before[0] == now[0] and before != now and id(parameter) not in written | self._scattered:
                raise ConfigError(
                    f"{name!r} was written to through .data between steps, which is not always detected, and the next "
                    "step overwrites it",
                    expected="writes to the parameter itself", do="write under torch.no_grad(), without .data",
                )  # fmt: skip

    def _checksums(self) -> list[tuple[int, int]]:
        """Return for each parameter the number of gathered elements, and a checksum of what this rank holds."""
        sums = []
        for parameter in self._parameters:
            here = _held(parameter)
            sums.append((parameter.numel(), int(here.view(_BITS[here.dtype.itemsize]).sum())))
        return sums


def _held(parameter: Any) -> torch.Tensor:
    """Return this rank's elements of `parameter`: all, or at stage 3 its partition while it is not gathered."""
    if parameter.numel() == 0 and parameter.__dict__.get("ds_tensor") is not None:
        parameter = parameter.ds_tensor
    whole: torch.Tensor = parameter.detach().reshape(-1)
    return whole


def _values(piece: Any) -> torch.Tensor:
    """Return this rank's slice of a parameter, in the module's dtype."""
    parameter = piece.parameter
    if parameter.numel() == 0 and hasattr(parameter, "ds_tensor"):
        shared: torch.Tensor = parameter.ds_tensor.detach().reshape(-1).narrow(0, 0, piece.length)
        return shared
    whole: torch.Tensor = piece.of_whole(parameter.detach())
    return whole


def _put(values: torch.Tensor, master: torch.Tensor) -> None:
    """Copy `values` to `master`, except where it equals them when rounded to their dtype."""
    values = values.to(master.device)
    master.copy_(torch.where(values == master.to(values.dtype), master, values.to(master.dtype)))
