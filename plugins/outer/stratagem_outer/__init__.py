"""Strategies whose replicas diverge between syncs: start reading in `stratagem_outer.diverging_replicas`.

`OuterStrategy` is the base for such strategies in other packages: see "Write one yourself" in docs/local-updates.md.
"""

from stratagem_outer.outer_strategy import OuterStrategy
from stratagem_process_group.messages import average_in_place

__all__ = ["OuterStrategy", "average_in_place"]
