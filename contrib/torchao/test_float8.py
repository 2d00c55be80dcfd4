"""Precision `fp8`: linear layers in 8 bits under every strategy, and checkpoints of plain parameters."""

from stratagem_testing import PrecisionConformance


class TestFloat8(PrecisionConformance):
    plugin = "fp8"
    tolerance = 0.03
