"""Write predictions to disk."""

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
    """Write the outputs of `predict_step` with ``torch.save``, as CPU tensors; each rank writes its own.

    Files: ``rank{r}_loader{l}_batch{b}.pt`` for each batch, or ``rank{r}.pt`` at the end, with a list of batches for
    each loader.
    """

    #: Folder to write into.
    dirpath: Path = field(converter=Path)
    #: Write a file for each batch, which needs less memory, or one at the end.
    write_interval: Literal["batch", "epoch"] = "batch"

    _outputs: dict[int, list[Any]] = field(init=False, factory=dict)

    @hookimpl
    def on_predict_start(self) -> None:
        self._outputs = {}
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

        outputs = move_batch(outputs, torch.device("cpu"))  # loading CUDA tensors needs a GPU
        if self.write_interval == "batch":
            name = f"rank{trainer.global_rank}_loader{dataloader_idx}_batch{batch_idx}.pt"
            _write(self.dirpath / name, outputs)
        else:
            self._outputs.setdefault(dataloader_idx, []).append(outputs)

    @hookimpl
    def on_predict_end(self, trainer: TrainerView) -> None:
        if self.write_interval == "epoch":
            _write(
                self.dirpath / f"rank{trainer.global_rank}.pt",
                [self._outputs[loader] for loader in sorted(self._outputs)],
            )
        self._outputs = {}


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
