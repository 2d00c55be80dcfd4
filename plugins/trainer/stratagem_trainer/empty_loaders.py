"""Warn of loaders without batches: nothing is validated, tested or predicted with them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from stratagem_trainer.batches import length

if TYPE_CHECKING:
    from stratagem.runtime.context import Context

#: What is not done without batches.
_NOT_DONE = {"validate": "validated", "test": "tested", "predict": "predicted"}


def warn_of_empty_loaders(stage: str, loaders: list[Any], limit: float | None, run: Context) -> None:
    """Warn of `loaders` of `stage` whose length is 0, on rank 0; not if `limit` is 0, and not of an empty list."""
    if limit == 0 or not run.is_global_zero:
        return
    for index, loader in enumerate(loaders):
        if length(loader) == 0 and not isinstance(loader, list | tuple):
            which = f"{stage} loader" + (f" {index} of {len(loaders)}" if len(loaders) > 1 else "")
            warnings.warn(
                f"the {which} has no batches{_contents(loader)}: nothing is {_NOT_DONE[stage]} with it. "
                "Check its data set, batch_size and drop_last, or leave the loader out",
                stacklevel=2,
            )


def _contents(loader: Any) -> str:
    """Return what `loader` makes its batches of, in parentheses; "" if that is not known."""
    size = length(loader.dataset) if isinstance(loader, DataLoader) else None
    if size is None or loader.batch_size is None:
        return ""
    return f" ({int(size)} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last})"
