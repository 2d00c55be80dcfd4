"""my_idea passes the checks for every strategy."""

from stratagem_my_idea.conformance import MyIdeaStrategyConformance


class TestMyIdeaStrategy(MyIdeaStrategyConformance):
    """Add tests of what only this plugin does."""
