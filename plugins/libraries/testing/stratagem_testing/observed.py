"""Models of the kit for ranks that share data: one draws random numbers in a cut region, one counts what it reads."""

from __future__ import annotations

from typing import Any

from torch import nn

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
    """Counts what it reads: the sum over ranks counts each sample, or each part of a sequence, once."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.log("read", float(batch[1].numel()), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:  # type: ignore[override]
        self.log("val_read", float(batch[1].numel()), reduce_fx="sum", sync_dist=True)
        super().validation_step(batch, batch_idx)
