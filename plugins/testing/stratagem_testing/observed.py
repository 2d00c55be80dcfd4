"""Models of the kit for ranks that share data: one draws random numbers in a cut region, one logs what it reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stratagem_testing.reference import Batch, Net


class DroppedWithin(Net):
    """Draws random numbers between the two layers that tensor parallelism may cut, and after them."""

    def __init__(self) -> None:
        super().__init__()
        first, tanh, second, _, last = self.net.children()
        self.net = nn.Sequential(first, tanh, nn.Dropout(0.5), second, nn.Tanh(), nn.Dropout(0.5), last)

    def parallel_plan(self) -> dict[str, str]:
        return {"net.0": "colwise", "net.3": "rowwise"}


class Counted(Net):
    """Logs what it reads: once each sample, or each part of a sequence, and a number that parts need not give."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self._log_read("", batch[1])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        self._log_read("val_", batch[1])
        super().validation_step(batch, batch_idx)

    def _log_read(self, stage: str, y: Tensor) -> None:
        together: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log(f"{stage}count", float(y.numel()), reduce_fx="sum", **together)
        self.log(f"{stage}highest", y.max(), reduce_fx="max", **together)
        self.log(f"{stage}average", y.mean(), **together)
        self.log(f"{stage}exponential", y.mean().exp(), **together)
