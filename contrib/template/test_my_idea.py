"""my_idea keeps the promises of every strategy."""

from stratagem_testing import StrategyConformance


class TestMyIdea(StrategyConformance):
    plugin = "my_idea"
