"""Write predictions to disk as they are made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from stratagem.api import Callback, hookimpl
from stratagem.api.paths import create_beside
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import TrainerView


@define(eq=False, kw_only=True)
class PredictionWriter(Callback):
    """Writes what `predict_step` returns with ``torch.save``, on the CPU; each rank its own share.

    ``rank{r}_loader{l}_batch{b}.pt`` for each batch, or ``rank{r}.pt`` at the end: for each loader a list of batches.
    """

    #: Folder to write into.
    dirpath: Path = field(converter=Path)
    #: A file for each batch, which keeps memory small, or one at the end.
    write_interval: Literal["batch", "epoch"] = "batch"

    _kept: dict[int, list[Any]] = field(init=False, factory=dict)

    @hookimpl
    def on_predict_start(self) -> None:
        self._kept = {}
        try:
            self.dirpath.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"prediction_writer.dirpath is {str(self.dirpath)!r} ({error.strerror})",
                expected="a folder to write to",
            ) from error

    @hookimpl
    def on_predict_batch_end(self, trainer: TrainerView, outputs: Any, batch_idx: int, dataloader_idx: int) -> None:
        import torch

        from stratagem.api.batches import move_batch

        outputs = move_batch(outputs, torch.device("cpu"))  # a file with CUDA tensors needs a GPU to be read
        if self.write_interval == "batch":
            name = f"rank{trainer.global_rank}_loader{dataloader_idx}_batch{batch_idx}.pt"
            _write(self.dirpath / name, outputs)
        else:
            self._kept.setdefault(dataloader_idx, []).append(outputs)

    @hookimpl
    def on_predict_end(self, trainer: TrainerView) -> None:
        if self.write_interval == "epoch":
            _write(
                self.dirpath / f"rank{trainer.global_rank}.pt", [self._kept[loader] for loader in sorted(self._kept)]
            )
        self._kept = {}


def _write(path: Path, value: Any) -> None:
    import torch

    file = create_beside(path)
    try:
        with file:
            torch.save(value, file)
        os.replace(file.path, path)
    finally:
        with contextlib.suppress(OSError):
            file.path.unlink()
