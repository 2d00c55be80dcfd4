"""Replicas of a training run that may die and come back while the others go on, with torchft and its lighthouse."""

from stratagem_torchft.every_step import TorchFTDDPStrategy
from stratagem_torchft.periodic import TorchFTDiLoCoStrategy, TorchFTLocalSGDStrategy

__all__ = ["TorchFTDDPStrategy", "TorchFTDiLoCoStrategy", "TorchFTLocalSGDStrategy"]
