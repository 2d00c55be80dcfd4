"""What the conformance kit needs to know of the strategy: ``stratagem plugins check horovod`` reads it."""

from __future__ import annotations

from stratagem_testing import StrategyConformance


class HorovodConformance(StrategyConformance):
    """A plan of one process is made, and one of several is refused."""

    unplannable = None
