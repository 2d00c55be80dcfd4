"""A strategy that trains with Colossal-AI, which is imported when the strategy connects."""

from stratagem_colossalai.sharded import GeminiStrategy, LowLevelZeroStrategy
from stratagem_colossalai.strategy import ColossalAIStrategy

__all__ = ["ColossalAIStrategy", "GeminiStrategy", "LowLevelZeroStrategy"]
