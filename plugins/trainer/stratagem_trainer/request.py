"""`StageRequest`: what the user called; `RequestLoaders`: the loaders for it, shared among the processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api.paths import as_path
from stratagem.errors import ConfigError, differences
from stratagem_trainer.combined_loader import CombinedLoader, are_several, joined, length, one_by_one, parts_of
from stratagem_trainer.datamodule import DataModule
from stratagem_trainer.loader_samplers import in_order, seed_loader_workers, set_epoch
from stratagem_trainer.module import overrides

if TYPE_CHECKING:
    from stratagem.api.world import Collectives
    from stratagem_trainer.fit_state import FitState

#: The method that returns the loaders of a stage, and its name in ``limit_*_batches``.
_LOADERS = {
    "fit": ("train_dataloader", "train"),
    "validate": ("val_dataloader", "val"),
    "test": ("test_dataloader", "test"),
    "predict": ("predict_dataloader", "predict"),
}


def _path_or_name(path: Any) -> str | Path | None:
    return as_path(path) if isinstance(path, os.PathLike) else path


@define(eq=False)
class StageRequest:
    """What the user called; sent to the processes that do it."""

    stage: str
    loaders: Any = None
    val_loaders: Any = None
    datamodule: Any = None
    ckpt_path: str | Path | None = field(default=None, converter=_path_or_name)
    #: Keep what `predict_step` returns.
    keep_predictions: bool = True
    #: Optimizer states of an earlier fit of the same module, to go on with.
    worker_state: dict[str, Any] | None = None


def agree(collectives: Collectives, facts: Mapping[str, Any]) -> None:
    """Compare the `facts` of a call over all ranks. Collective.

    Raises:
        ConfigError: on every rank, with the first rank that differs from rank 0 and how.
    """
    if collectives.world_size == 1:
        return
    text = json.dumps(dict(facts), sort_keys=True)
    if len(set(collectives.all_gather_object(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    first, *others = [json.loads(each) for each in collectives.all_gather_object(text)]
    for rank, other in enumerate(others, start=1):
        if found := differences(other, first, f"on rank {rank}", "on rank 0"):
            raise ConfigError(
                found, expected="the same on all ranks",
                do="start every rank with the same code, files, variables and packages",
            )  # fmt: skip


class RequestLoaders:
    """Makes the loaders of a request in this process."""

    def __init__(self, state: FitState, request: StageRequest) -> None:
        self.run, self.settings, self.request, self.module = state.run, state.settings, request, state.module

    def training(self) -> Any:
        """Return the training loader, which yields this process's share."""
        return self.share(self.given()[0], "train")

    def of_stage(self) -> list[Any]:
        """Return the loaders to validate, test or predict on."""
        return [self.share(loader, self.request.stage) for loader in self.given()]

    def limits(self, loaders: list[Any]) -> tuple[str, list[float]]:
        """Return the word of the stage in ``limit_*_batches``, and how many batches of each loader to use."""
        word = _LOADERS[self.request.stage][1]
        return word, [self.limited(f"limit_{word}_batches", loader) for loader in loaders]

    def given(self) -> list[Any]:
        """Return the loaders of this request: those given, else the data module's, else the module's own."""
        method, _ = _LOADERS[self.request.stage]
        given = self.request.loaders if self.request.loaders is not None else self._ask_for(method)
        if given is None:
            raise ConfigError(
                f"{self.request.stage} got no loader", expected=f"a DataLoader, a datamodule, or a module with {method}"
            )
        return [joined(given)] if self.request.stage == "fit" else one_by_one(given)

    def validation(self) -> list[Any]:
        given = self.request.val_loaders if self.request.val_loaders is not None else self._ask_for("val_dataloader")
        if given is None or (self.settings.limit_val_batches == 0 and not self.settings.fast_dev_run):
            return []
        if not overrides(self.module, "validation_step"):
            raise ConfigError(
                f"fit got validation loaders and {type(self.module).__name__} has no validation_step",
                expected="both or neither",
                do="define it, or leave the loaders out",
            )
        return [self.share(loader, "validate") for loader in one_by_one(given)]

    def _ask_for(self, method: str) -> Any:
        data = self.request.datamodule
        left_out = data is None or (isinstance(data, DataModule) and not overrides(data, method, DataModule))
        source = self.module if left_out and (data is None or overrides(self.module, method)) else data
        return getattr(source, method)() if callable(getattr(source, method, None)) else None

    def share(self, loader: Any, stage: str) -> Any:
        if isinstance(loader, CombinedLoader):
            combined = loader.with_each(lambda each: self.share(each, stage))
            combined.repeats = stage == "train" and bool(self.settings.overfit_batches)
            return combined
        if are_several(loader):
            raise ConfigError(
                f"one of several {stage} loaders is a {type(loader).__name__} of loaders",
                expected="a loader",
                do="put a CombinedLoader there",
            )
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"the {stage} loader is a {type(loader).__name__}", expected="an iterable of batches")
        if stage == "train" and self.settings.overfit_batches:
            loader = in_order(loader)
        shared = self.run.share(loader, stage)
        seed_loader_workers(shared, self.run.rank)
        return shared

    def limited(self, option: str, loader: Any) -> float:
        """Return how many batches of `loader` this epoch uses by `option`; inf if unknown and unlimited."""
        for part in (loader, *parts_of(loader)):
            set_epoch(part, self.run.progress.epoch)
        limit = int(self.settings.fast_dev_run) or getattr(self.settings, option)
        size = length(loader)
        if limit is None or (limit == 1.0 and isinstance(limit, float)):
            return size
        if isinstance(limit, int):
            return min(size, limit)
        if math.isinf(size):
            raise ConfigError(f"{option} is {limit} and the loader has no length", expected="a whole number of batches")
        if limit and int(size * limit) == 0:
            raise ConfigError(
                f"{option} is {limit}, and the loader has {int(size)} batches: none of them",
                expected="a share that is at least one batch, or a whole number",
            )
        return int(size * limit)
