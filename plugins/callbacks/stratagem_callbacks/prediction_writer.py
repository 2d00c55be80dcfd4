"""Write predictions to disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import define, field

from stratagem.api import hookimpl
from stratagem.api.paths import replacing
from stratagem.errors import ConfigError
from stratagem_trainer.api import Callback

if TYPE_CHECKING:
    from torch import nn

    from stratagem_trainer.api import TrainerView


@define(eq=False)
class BasePredictionWriter(Callback):
    """Write the outputs of `predict_step` in a way of your own: derive from it, and define one of its methods.

    Each rank writes its own share. ``trainer.predict(..., return_predictions=False)`` keeps none in memory.
    """

    positional: ClassVar[tuple[str, ...]] = ("write_interval",)

    #: Call `write_on_batch_end`, `write_on_epoch_end`, or both.
    write_interval: Literal["batch", "epoch", "batch_and_epoch"] = "batch"

    _outputs: dict[int, list[Any]] = field(init=False, factory=dict)

    def write_on_batch_end(
        self, trainer: TrainerView, module: nn.Module, prediction: Any, batch_indices: None, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        """Write what `predict_step` returned for one batch; `batch_indices` is None, as in Lightning without them."""
        raise self._missing("write_on_batch_end")

    def write_on_epoch_end(
        self, trainer: TrainerView, module: nn.Module, predictions: Any, batch_indices: None
    ) -> None:
        """Write what `predict_step` returned for each batch: a list, or one for each of several loaders."""
        raise self._missing("write_on_epoch_end")

    def _missing(self, method: str) -> ConfigError:
        name = type(self).__name__
        return ConfigError(f"{name} has write_interval={self.write_interval!r} and no {method}", expected="one")

    @hookimpl
    def on_predict_start(self) -> None:
        self._outputs = {}
        self._check()

    def _check(self) -> None:
        for word in ("batch", "epoch"):
            method = f"write_on_{word}_end"
            if word in self.write_interval and getattr(type(self), method) is getattr(BasePredictionWriter, method):
                raise self._missing(method)

    @hookimpl
    def on_predict_batch_end(
        self, trainer: TrainerView, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        if "batch" in self.write_interval:
            self.write_on_batch_end(trainer, module, outputs, None, batch, batch_idx, dataloader_idx)
        if "epoch" in self.write_interval:
            self._outputs.setdefault(dataloader_idx, []).append(self._kept(outputs))

    @hookimpl
    def on_predict_epoch_end(self, trainer: TrainerView, module: nn.Module) -> None:
        if "epoch" in self.write_interval:
            outputs, self._outputs = self._outputs, {}
            self._write_all(trainer, module, [outputs[loader] for loader in sorted(outputs)])

    def _kept(self, outputs: Any) -> Any:
        """Return what is kept of `outputs` until the end."""
        return outputs

    def _write_all(self, trainer: TrainerView, module: nn.Module, by_loader: list[Any]) -> None:
        self.write_on_epoch_end(trainer, module, by_loader[0] if len(by_loader) == 1 else by_loader, None)


@define(eq=False, kw_only=True)
class PredictionWriter(BasePredictionWriter):
    """Write the outputs of `predict_step` with ``torch.save``, as CPU tensors; each rank writes its own.

    Files: ``rank{r}_loader{l}_batch{b}.pt`` for each batch, or ``rank{r}.pt`` at the end, with a list of batches for
    each loader.
    """

    positional: ClassVar[tuple[str, ...]] = ("dirpath", "write_interval")

    #: Folder to write into.
    dirpath: Path = field(converter=Path)
    #: Write a file for each batch, which needs less memory, or one at the end.
    write_interval: Literal["batch", "epoch"] = "batch"

    def _check(self) -> None:
        try:
            self.dirpath.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"prediction_writer.dirpath is {str(self.dirpath)!r} ({error.strerror})",
                expected="a folder to write to",
            ) from error

    def write_on_batch_end(
        self, trainer: TrainerView, module: nn.Module, prediction: Any, batch_indices: None, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        """Write a file for this batch."""
        name = f"rank{trainer.global_rank}_loader{dataloader_idx}_batch{batch_idx}.pt"
        _write(self.dirpath / name, self._kept(prediction))

    def _kept(self, outputs: Any) -> Any:
        import torch

        from stratagem.api.batches import move_batch

        return move_batch(outputs, torch.device("cpu"))  # loading CUDA tensors needs a GPU

    def _write_all(self, trainer: TrainerView, module: nn.Module, by_loader: list[Any]) -> None:
        _write(self.dirpath / f"rank{trainer.global_rank}.pt", by_loader)

    @hookimpl
    def on_predict_end(self, trainer: TrainerView) -> None:
        if trainer.settings.enable_progress_bar and not trainer.settings.barebones:
            files = "rank*_loader*_batch*.pt" if self.write_interval == "batch" else "rank*.pt"
            trainer.run.print(f"predict: wrote {self.dirpath / files}", flush=True)


def _write(path: Path, value: Any) -> None:
    import torch

    with replacing(path) as file:
        torch.save(value, file)
