"""Parameters, gradients and optimizer state sharded over the processes, with torch's FSDP2 (`fully_shard`)."""

from stratagem_fsdp.strategy import FSDPStrategy, cpu_offload

__all__ = ["FSDPStrategy", "cpu_offload"]
