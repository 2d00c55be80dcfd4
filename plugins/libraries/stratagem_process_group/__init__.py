"""What strategies share that connect a torch process group: a base class, its options, variables of NCCL and gloo."""

from stratagem_process_group.strategy import USUAL, ProcessGroupStrategy, group_options_after

__all__ = ["USUAL", "ProcessGroupStrategy", "group_options_after"]
