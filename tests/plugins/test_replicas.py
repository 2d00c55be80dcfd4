"""replicas names the first parameter that differs between ranks that hold the same ones, the ranks and the step."""

import pytest
import torch

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part
from stratagem_testing.training import outcome

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
NAMES = [name for name, _ in Net().named_parameters()]
HYBRID = {"name": "fsdp", "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
SHARDED = {"name": "parallel", "replicate": 2, "shard": 2}


class Writes(Net):
    """The last rank changes its first parameter after the fourth step, by the smallest number that changes it."""

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == 3 and self.trainer.global_rank + 1 == self.trainer.world_size:
            first = next(self.parameters())
            value = first.to_local() if hasattr(first, "to_local") else first
            with torch.no_grad():
                value.copy_(value.nextafter(torch.tensor(9.0)))


def _fit(rank, world_size, model, strategy, every):
    trainer = sg.Trainer(
        max_epochs=1, strategy=strategy, devices=world_size, checks={"name": "replicas", "every_n_steps": every}, **QUIET
    )  # fmt: skip
    return outcome(lambda: trainer.fit(model(), part(joined_batches(6, 8), rank, world_size)))


@pytest.mark.slow
@pytest.mark.when_changed(
    "plugins/callbacks/",
    cases=("{'name': 'fsdp', 'sharding_strategy': 'HYBRID_SHARD', 'device_mesh': (2, 2)}-4-1", "ddp_sharded-2-0"),
)
@pytest.mark.parametrize(
    ("strategy", "world_size", "same"),
    [
        ("ddp", 3, "0, 1"), (HYBRID, 4, "1"), ("parallel", 2, "0"), ("ddp_sharded", 2, "0"),
        pytest.param(SHARDED, 4, "1", marks=pytest.mark.sweep),
        pytest.param([{"name": "local_sgd", "team_size": 2}, "ddp"], 4, "2", marks=pytest.mark.sweep),
    ],
    ids=str,
)  # fmt: skip
def test_one_changed_bit_is_found_and_equal_parameters_pass(strategy, world_size, same):
    assert set(run_in_processes(_fit, world_size, Net, strategy, 2)) == {"nothing"}
    *_, last = run_in_processes(_fit, world_size, Writes, strategy, 2)

    assert (
        f"the parameter {NAMES[0]!r} after step 4 is not the same on rank {world_size - 1} as on rank {same}, and was "
        "after step 2; expected"
    ) in last


@pytest.mark.parametrize("strategy", ["fsdp", "local_sgd"])
def test_a_run_without_replicas_is_refused_at_the_start(strategy):
    for said in run_in_processes(_fit, 2, Net, strategy, 100):
        assert said.startswith(
            "refused: replicas compares ranks that hold the same parameters, and no two do in this run"
        )


def test_one_process_is_refused():
    with pytest.raises(ConfigError, match="no two do in this run of 1"):
        sg.Trainer(max_epochs=1, checks=["finite", "replicas"], **QUIET).fit(Net(), joined_batches(2, 8))


class Unequal(Net):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            [*self.parameters()][-1].add_(torch.rand(()))


def _start_unequal(rank, world_size):
    torch.manual_seed(rank)
    return _fit(rank, world_size, Unequal, {"name": "ddp", "init_sync": False}, 100)


def test_values_that_differ_before_the_first_step_are_found():
    for said in run_in_processes(_start_unequal, 2):
        assert f"the parameter {NAMES[-1]!r} after step 0 is not the same on rank 1 as on rank 0; expected" in said
