"""Find, before it is trained, what a model would compute wrongly on parts of sequences."""

from stratagem_parallel_unchanged.context.checks import PositionChecks
from stratagem_parallel_unchanged.context.comparison import FAILS, POSITIONS, difference
from stratagem_parallel_unchanged.context.hugging_face import HuggingFaceModels

__all__ = ["FAILS", "POSITIONS", "HuggingFaceModels", "PositionChecks", "difference"]
