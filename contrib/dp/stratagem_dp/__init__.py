"""The strategies `dp` and `ddp2`: one process trains on all devices of its node."""

from __future__ import annotations

from stratagem_dp.strategy import DDP2Strategy, DPStrategy

__all__ = ["DDP2Strategy", "DPStrategy"]
