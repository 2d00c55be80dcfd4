"""`central` passes the checks for strategies, and only rank 0 has an optimizer state."""

import stratagem
from stratagem_testing import StrategyConformance, run_in_processes
from stratagem_testing.reference import Net, joined_batches
from stratagem_testing.training import share

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class TestCentral(StrategyConformance):
    plugin = "central"


def _bytes_of_momentum(rank, world_size):
    trainer = stratagem.Trainer(strategy="central", devices=world_size, accelerator="cpu", max_epochs=1, **QUIET)
    trainer.fit(Net(), share(trainer, joined_batches(3, 12)))
    states = trainer.run.optimizers[0].state.values()
    return sum(state["momentum_buffer"].nbytes for state in states)


def test_only_rank_0_keeps_an_optimizer_state():
    first, second = run_in_processes(_bytes_of_momentum, 2)

    assert first == sum(parameter.nbytes for parameter in Net().parameters())
    assert second == 0
