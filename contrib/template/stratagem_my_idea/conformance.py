"""What the conformance kit checks of `my_idea`: the class that ``stratagem plugins check my_idea`` runs."""

from stratagem_testing import StrategyConformance


class MyIdeaStrategyConformance(StrategyConformance):
    plugin = "my_idea"  # {"name": "my_idea", "option": value} if an option has no default
