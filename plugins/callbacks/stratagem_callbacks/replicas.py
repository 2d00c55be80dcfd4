"""Compare the parameters of ranks that should hold the same ones."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError, StratagemError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from stratagem.api import RunContext
    from stratagem_trainer.api import TrainerView

#: A parameter by its name, and which part of it, counted along each axis of the mesh that cuts it.
_Part = tuple[str, tuple[int, ...]]
_ABSENT = torch.iinfo(torch.int64).min
#: A prime, so that rows of matrices do not lie in the same columns.
_COLUMNS = 251
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@define(eq=False, kw_only=True)
class Replicas(Callback):
    """Compare each parameter between the ranks that hold it, or the same part of it, and name the first that differs.

    A rank sends two integers for each parameter.
    """

    #: Optimizer steps between two comparisons. The first one is before the first step.
    every_n_steps: int = field(default=100, validator=at_least(1))

    #: The parts that several ranks hold, and those of this rank.
    _shared: list[_Part] = field(init=False, factory=list)
    _mine: list[_Part] = field(init=False, factory=list)
    #: The step after which parameters were compared.
    _compared_at: int = field(init=False, default=0)

    @hookimpl
    def on_train_start(self, trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
        if not run.environment.simulated:
            self._mine, self._compared_at = [], trainer.global_step
            self._compare(module, run, trainer.global_step)

    @hookimpl
    def on_train_batch_end(self, trainer: TrainerView, module: nn.Module, run: RunContext) -> None:
        step = trainer.global_step
        if step // self.every_n_steps > self._compared_at // self.every_n_steps and not run.environment.simulated:
            self._compare(module, run, step)
            self._compared_at = step

    def _compare(self, module: nn.Module, run: RunContext, step: int) -> None:
        """Compare the parameters after `step`. Collective.

        Raises:
            ConfigError: no parameter is held by several ranks.
            StratagemError: ranks hold different values; raised on all of them.
        """
        parts = _parts(module)
        if list(parts) != self._mine:
            self._mine, self._shared = list(parts), _held_by_several(list(parts), run)
        sums = dict(zip(parts, _fingerprints(parts.values()), strict=True))
        mine = [(sums[part], -sums[part]) if part in sums else (_ABSENT, _ABSENT) for part in self._shared]
        found = run.peers.all_reduce(torch.tensor(mine, dtype=torch.int64), "max").tolist()
        for part, (most, least) in zip(self._shared, found, strict=True):
            if most != -least:
                self._raise(part, run.peers.all_gather_object((run.rank, sums.get(part))), step)

    def _raise(self, part: _Part, sums: list[tuple[int, int | None]], step: int) -> None:
        usual, _ = Counter(value for _, value in sums if value is not None).most_common(1)[0]
        same = [str(rank) for rank, value in sums if value == usual]
        others = [str(rank) for rank, value in sums if value not in (usual, None)]
        raise StratagemError(
            f"the parameter {part[0]!r} after step {step} is not the same on rank {', '.join(others)} as on rank "
            f"{', '.join(same)}" + (f", and was after step {self._compared_at}" if step > self._compared_at else ""),
            expected="equal parameters on ranks that hold the same ones",
            do="look for code that changes parameters or gradients on some ranks only; "
            'checks={"name": "replicas", "every_n_steps": 1} finds the step',
        )


def _parts(module: nn.Module) -> dict[_Part, torch.Tensor]:
    """Return what this rank holds of the parameters of `module`."""
    parts = {}
    for name, parameter in module.named_parameters():
        value: Any = parameter.detach()
        numbers: tuple[int, ...] = ()
        if hasattr(value, "to_local"):
            axes = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
            numbers, value = tuple(n for n, placement in axes if not placement.is_replicate()), value.to_local()
        if not value.is_meta and value.numel():
            parts[name, numbers] = value
    return parts


def _held_by_several(parts: list[_Part], run: RunContext) -> list[_Part]:
    """Return the parts that several ranks hold, in one order on all ranks. Collective."""
    count = Counter(part for each in run.peers.all_gather_object(parts) for part in each)
    shared = [part for part, ranks in count.items() if ranks > 1]
    if not shared:
        raise ConfigError(
            f"replicas compares ranks that hold the same parameters, and no two do in this run of {run.world_size}",
            expected="a strategy with replicas in a team, such as ddp",
            do="leave it out of checks",
        )
    return shared


def _fingerprints(values: Iterable[torch.Tensor]) -> list[int]:
    """Return a number for each of `values` that equal bits give, in whatever order they are added.

    Opposite changes of two elements do not cancel out: bits are added in columns, each of which has a weight.
    """
    columns = [_column_sums(value) for value in values]
    weights = torch.randint(2**62, (_COLUMNS,), generator=torch.Generator().manual_seed(0))
    numbers: list[int] = (torch.stack(columns).cpu() * weights).sum(1).tolist() if columns else []
    return numbers


def _column_sums(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of all elements of `value` as integers, added in columns: (_COLUMNS,) int64."""
    value = torch.view_as_real(value) if value.is_complex() else value
    bits = value.reshape(-1).view(_INTEGERS[value.dtype.itemsize])
    rest = len(bits) % _COLUMNS
    sums = bits[: len(bits) - rest].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    sums[:rest] += bits[len(bits) - rest :]
    return sums
