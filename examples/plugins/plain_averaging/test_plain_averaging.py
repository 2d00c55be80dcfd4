"""`plain_averaging` passes the checks of every strategy."""

from stratagem_testing import StrategyConformance


class TestPlainAveraging(StrategyConformance):
    plugin = "plain_averaging"
