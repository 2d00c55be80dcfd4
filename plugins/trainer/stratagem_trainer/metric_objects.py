"""Objects that compute a metric, such as those of torchmetrics, where several ranks have the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor, nn

if TYPE_CHECKING:
    from stratagem.api.world import Collectives
    from stratagem.runtime.context import Context


@contextmanager
def gathered_once(module: nn.Module, run: Context) -> Iterator[None]:
    """Within, metrics of `module` gather the states of ranks with different samples, rather than those of all ranks.

    Ranks that cut the layers of one model have the same samples, and torchmetrics would count them several times.
    """
    found = []
    if run.readers.world_size < run.world_size:
        found = [part for part in module.modules() if getattr(part, "dist_sync_fn", "") is None]
    for part in found:
        part.dist_sync_fn = _Gather(run.readers)  # type: ignore[assignment]
    try:
        yield
    finally:
        for part in found:
            part.dist_sync_fn = None  # type: ignore[assignment]


@frozen
class _Gather:
    """What torchmetrics calls with each state; a copy of the module keeps it, and a pickle has None instead."""

    readers: Collectives

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        return [each.to(state.device) for each in self.readers.all_gather_object(state.cpu())]

    def __deepcopy__(self, _: Any) -> _Gather:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()
