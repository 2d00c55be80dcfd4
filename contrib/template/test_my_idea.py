"""my_idea passes the checks for every strategy."""

from stratagem_testing import StrategyConformance


class TestMyIdea(StrategyConformance):
    plugin = "my_idea"
