"""torchao in a run of stratagem: precision `fp8`, AdamW with few bits of state, training that is aware of int8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem_torchao.float8 import Float8Precision
from stratagem_torchao.layers import load, restore
from stratagem_torchao.qat import Int8QAT

if TYPE_CHECKING:
    from stratagem_torchao.optimizers import AdamW4bit, AdamW8bit, AdamWFp8

__all__ = ["AdamW4bit", "AdamW8bit", "AdamWFp8", "Float8Precision", "Int8QAT", "restore"]


def __getattr__(name: str) -> Any:
    if name in ("AdamW4bit", "AdamW8bit", "AdamWFp8"):  # their module imports torchao, which takes seconds
        load(f"optimizer {name}", "use torch.optim.AdamW")
        from stratagem_torchao import optimizers

        return getattr(optimizers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
