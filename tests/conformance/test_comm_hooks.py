"""Every first-party communication hook under the kit."""

from __future__ import annotations

from stratagem.testing import CommHookConformance


class TestFP16Compress(CommHookConformance):
    plugin = "fp16_compress"
    tolerance = 1e-3
    training_tolerance = 1e-3


class TestBF16Compress(CommHookConformance):
    plugin = "bf16_compress"
