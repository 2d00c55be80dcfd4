"""Weights that user code writes during a fit: copied to the fp32 masters that ZeRO steps.

[Note: manual writes]
ZeRO steps copies of the weights (masters) and then overwrites the module's parameters. A write to a parameter
(`clamp_`, `copy_`, `load_state_dict`) increments its version, which is checked before each step and before state is
read. At stage 3 the parameter must be gathered for that: `GatheredParameters` reports the write, and what a step has
written gets into the partitions when the parameter is released. A write through `.data` does not increment the version:
what a step lists and reads `.data` of is taken to be written; elsewhere a checksum detects it after steps 1, 2, 4,
8, ... and between epochs, and it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError
from stratagem_deepspeed.state import flats
from stratagem_process_group.comparison import are_equal

if TYPE_CHECKING:
    from stratagem.api import Collectives

_GATHER = "write inside deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ManualWrites:
    """Detects writes to the parameters that `zero` steps; see [Note: manual writes]."""

    def __init__(self, zero: Any, user: nn.Module, over: Collectives) -> None:
        self._zero, self._over = zero, over
        named: list[tuple[str, Any]] = list(user.named_parameters())
        self._named = [(name, each) for name, each in named if each.requires_grad or hasattr(each, "ds_id")]
        self._parameters = [parameter for _, parameter in self._named]
        self._versions: list[int] = []
        self._scattered: set[int] = set()
        self._steps, self._sums = 0, list[tuple[int, int]]()
        #: Whether a step runs, the parameters whose `.data` it has read, and checksums of what it has written, by name.
        self.in_step, self.read, self._of_step = False, set[int](), dict[str, Any]()
        #: Called with what all ranks are expected to do now.
        self.visit: Callable[[str], None] = lambda _: None
        self._wrapped = [each for each in self._parameters if hasattr(each, "ds_id")]  # at stage 3 all
        for number, parameter in enumerate(self._wrapped):
            self._watch_scatter(number, parameter)
        self.record()

    def _watch_scatter(self, number: int, parameter: Any) -> None:
        """Record what `GatheredParameters` scatters again, and scatter what a step has written, on all ranks."""
        partition = parameter.partition

        def watched(param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, **options: Any) -> Any:
            if param_list is None and self.in_step and self._is_written(number):
                has_been_updated = True
            if has_been_updated:
                self._scattered |= {id(each) for each in param_list or [parameter]}
            return partition(param_list, hierarchy=hierarchy, has_been_updated=has_been_updated, **options)

        parameter.__dict__["partition"] = watched
        watched.__dict__["inner"] = partition

    def begin_step(self) -> None:
        """Notice from now on what a step writes.

        Raises:
            ConfigError: a parameter was written before, while it was partitioned.
        """
        self._check_gathered(self._changed())
        self.in_step = True

    def _is_written(self, number: int) -> bool:
        """Whether the step may have written into a gathered parameter."""
        name, parameter = self._named[number]
        if parameter.numel() == 0 or (parameter._version == self._versions[number] and id(parameter) not in self.read):
            return False
        self._of_step[name] = _checksum(parameter)
        return True

    def stop(self) -> None:
        """Restore the parameters' methods."""
        for parameter in self._wrapped:
            parameter.partition = parameter.partition.inner

    def record(self, *, stepped: bool = False) -> None:
        """Record the current parameters as those that ZeRO wrote."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._scattered.clear()
        self.read.clear()
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
        written = self._changed()
        for number, parameter in enumerate(self._parameters):  # small ones stay gathered
            if id(parameter) in self.read - self._scattered and self._is_written(number):
                written.add(id(parameter))
        if not written and not self._scattered and not self._sums:
            return
        self._check(written)
        for parameter in self._wrapped:
            if id(parameter) in written - self._scattered and not parameter.requires_grad:
                parameter.partition(has_been_updated=True)
        written |= self._scattered
        if written:
            for flat in flats(self._zero, write=True):
                for piece in flat.pieces:
                    if id(piece.parameter) in written:
                        _put(_values(piece), piece.of(flat.tensor))
        self._versions, self._sums = [parameter._version for parameter in self._parameters], []
        self._scattered.clear()
        self.read.clear()

    def _changed(self) -> set[int]:
        """Return the ids of the parameters with another version than was recorded."""
        both = zip(self._parameters, self._versions, strict=True)
        return {id(parameter) for parameter, version in both if parameter._version != version}

    def _check_gathered(self, written: set[int]) -> None:
        for name, parameter in self._named:
            lies_elsewhere = parameter.numel() == 0 and getattr(parameter, "ds_numel", 0) > 0
            if id(parameter) in written - self._scattered and lies_elsewhere:
                raise ConfigError(
                    f"{name!r} was written to between steps, while it was partitioned over the ranks",
                    expected="writes to gathered parameters", do=_GATHER,
                )  # fmt: skip

    def _check(self, written: set[int]) -> None:
        self._check_gathered(written)
        of_step, self._of_step = self._of_step, {}
        if of_step:
            self.visit("the end of a step that has written into parameters")
        if of_step and not are_equal(torch.tensor(fingerprint(repr(sorted(of_step.items())))), self._over):
            raise ConfigError(
                f"training_step wrote into {', '.join(map(repr, sorted(of_step)))}, and not the same on all ranks",
                expected="the same values on all ranks", do="average them over the ranks, or write to a buffer",
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
        return [(parameter.numel(), _checksum(parameter)) for parameter in self._parameters]


def _checksum(parameter: Any) -> int:
    here = _held(parameter)
    return int(here.view(_BITS.get(here.dtype.itemsize, torch.int64)).sum())


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
