"""Expert parallelism: where tokens go, evaluation of uneven parts, what is refused, and the example."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from programs import scripts
from stratagem.api.seeding import seeded
from stratagem.errors import ConfigError
from stratagem_parallel.expert.dispatch import DispatchedExperts
from stratagem_testing import recording, run_in_processes
from stratagem_testing.reference import Net, data, joined_batches
from stratagem_testing.training import loader, outcome, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
EXAMPLES = Path(__file__).parents[2] / "examples"


class Experts(nn.Module):
    """Each expert multiplies by its own row; the forward counts the tokens that it gets."""

    def __init__(self, num_experts=4, width=16):
        super().__init__()
        self.num_experts, self.seen = num_experts, []
        self.weight = nn.Parameter(torch.randn(num_experts, width, width) / 4)

    def forward(self, tokens, indices, weights):
        self.seen.append(len(tokens))
        result = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = torch.where(indices == expert)
            result = result.index_add(0, token, tokens[token] @ self.weight[expert] * weights[token, place, None])
        return result


class Layer(nn.Module):
    """Sends every token to the experts that the sign of its first number selects."""

    def __init__(self, first=0):
        super().__init__()
        self.first, self.experts = first, Experts()

    def forward(self, x):
        indices = torch.stack([torch.full((len(x),), self.first), self.first + (x[:, 0] > 0).long()], 1)
        weights = torch.stack([x[:, 1].sigmoid(), x[:, 2].sigmoid()], 1)
        return self.experts(x, indices, weights)


class Routed(Net):
    """All tokens go to the first two of four experts: the other ranks have none."""

    def __init__(self, first=0):
        super().__init__()
        with seeded(1):
            self.net = nn.Sequential(nn.Linear(16, 16), Layer(first), nn.Linear(16, 1))


class Doubled(nn.Module):
    num_experts = 4

    def forward(self, tokens, indices, weights):
        return tokens * 2


def _waits(rank, world_size):
    trainer = sg.Trainer(strategy={"name": "parallel", "expert": world_size}, devices=world_size, **QUIET)
    trainer.run.connect()
    experts = DispatchedExperts(Doubled(), "experts", trainer.run.strategy._groups.over("expert"))
    chosen, weights = torch.tensor([[0, 3], [1, 0], [2 * rank, 1]]), torch.full((3, 2), 0.5)
    with recording() as recorder:
        given = [each.to(torch.device("cpu", 0), non_blocking=True) for each in (torch.ones(3, 8), chosen, weights)]
        out = experts(*given)
    for wrong in (4, -1):
        with pytest.raises(ConfigError, match=f"experts was called with expert {wrong}; expected numbers from 0 to 3"):
            experts(torch.ones(3, 8), chosen.where(chosen != 1, wrong).to(torch.int8), weights)
    return [each.operation for each in recorder.found], bool((out == 2).all())


@pytest.mark.slow
def test_the_host_waits_once_for_the_numbers_of_tokens():
    assert run_in_processes(_waits, 2) == [(["tolist"], True)] * 2


def _unused_experts(rank, world_size):
    trainer = sg.Trainer(strategy="expert_parallel", devices=world_size, **QUIET)
    module = Routed()
    before = module.net[1].experts.weight.detach().clone()
    trainer.fit(module, joined_batches(3, 8))
    after = weights_of(trainer)["net.1.experts.weight"]
    own = module.net[1].experts.weight
    return (before != after).flatten(1).any(1).tolist(), own.grad is None, own.to_local().shape[0]


@pytest.mark.slow
def test_experts_without_tokens_do_not_hang():
    for changed, _, own in run_in_processes(_unused_experts, 2):
        assert changed == [True, True, False, False]
        assert own == 2


def _evaluate(rank, world_size, samples):
    trainer = sg.Trainer(strategy="auto" if world_size == 1 else "expert_parallel", devices=world_size, **QUIET)
    module = Routed(first=1)
    (metrics,) = trainer.test(module, loader(data(samples), 4))
    own = data(12) if rank == 0 else data(4, seed=9)
    uneven = (
        sg.Trainer(strategy="auto", use_distributed_sampler=False, **QUIET)
        if world_size == 1
        else sg.Trainer(strategy="expert_parallel", devices=world_size, use_distributed_sampler=False, **QUIET)
    )
    predictions = uneven.predict(Routed(first=1), loader(own, 4))
    return metrics["test_loss"], torch.cat(predictions)


@pytest.mark.slow
def test_ranks_with_fewer_batches_serve_the_others():
    ((loss, predictions),) = run_in_processes(_evaluate, 1, 16)
    for rank, (its_loss, own) in enumerate(run_in_processes(_evaluate, 2, 16)):
        assert its_loss == pytest.approx(loss, rel=1e-6)
        if rank == 0:
            assert torch.allclose(own, predictions, rtol=1e-5)
        else:
            assert own.shape == (4, 1)


# --- Refused -------------------------------------------------------------------------------------------------------


class Listed(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])


class Wide(Routed):
    """Its experts are called with one argument."""

    def __init__(self):
        super().__init__()
        self.net[1] = Experts(16)

    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](x)))


class Tied(Routed):
    def __init__(self):
        super().__init__()
        self.other = nn.Module()
        self.other.weight = self.net[1].experts.weight


class Hooked(Routed):
    def __init__(self):
        super().__init__()
        self.net[1].experts.weight.register_hook(torch.zeros_like)


CASES = {
    "none": (Net, {}, "has no layer of experts"),
    "a list": (Listed, {"plan": {"experts": "expert"}}, "a list of modules cannot be divided"),
    "misspelt": (Routed, {"plan": {"net.1.exports": "expert"}}, "net.1.experts"),
    "other arguments": (Wide, {}, "tokens (N, D), numbers of experts (N, K) and weights (N, K)"),
    "tied": (Tied, {}, "is also other.weight"),
    "a hook": (Hooked, {}, "net.1.experts.weight, which strategy.parallel.expert cuts, has a hook on its gradient"),
}


def _refused(rank, world_size):
    said = {}
    for name, (kind, options, _) in CASES.items():
        trainer = sg.Trainer(
            strategy={"name": "parallel", "expert": world_size, **options}, devices=world_size, **QUIET
        )
        said[name] = outcome(lambda: trainer.fit(kind(), joined_batches(1, 8)))  # noqa: B023 - called at once
    return said


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused_on_all_ranks():
    first, second = run_in_processes(_refused, 2)
    assert first == second
    for name, (_, _, expected) in CASES.items():
        assert first[name].startswith("refused: "), (name, first[name])
        assert expected in first[name], (name, first[name])


def _three(rank, world_size):
    trainer = sg.Trainer(strategy="expert_parallel", devices=world_size, **QUIET)
    return outcome(lambda: trainer.fit(Routed(), joined_batches(1, 6)))


@pytest.mark.slow
def test_the_number_of_experts_divides():
    for said in run_in_processes(_three, 3):
        assert "net.1.experts has 4 experts, and strategy.parallel.expert is 3; expected a multiple of 3" in said


# --- The example ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep(guard="tests/parity/test_parallel_expert.py::test_trains_as_one_process")
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--strategy", "expert_parallel", "--devices", "2"]], ids=["one", "two"])
def test_the_example_reads_digits(arguments):
    command = [sys.executable, str(EXAMPLES / "mixture_of_experts.py"), "--accelerator", "cpu", "--max_epochs", "4"]
    done = scripts.run(
        [*command, "--enable_progress_bar", "false", *arguments], capture_output=True, text=True, timeout=360,
        check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) >= 90
    assert len((EXAMPLES / "mixture_of_experts.py").read_text().splitlines()) < 100
