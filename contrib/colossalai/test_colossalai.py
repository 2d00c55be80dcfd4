"""`colossalai` trains as plain PyTorch, and moves checkpoints from and to `ddp`."""

import os
import signal
import subprocess
import sys

import pytest
from stratagem_colossalai import engine
from torch import nn

import stratagem
from stratagem.errors import ConfigError
from stratagem_testing import StrategyConformance, run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, share, train, weights_of, weights_on_all_ranks

BATCHES = joined_batches(6, 24)


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    """Processes are forked from this one; the import takes seconds."""
    engine.load("cpu")


class TestColossalAI(StrategyConformance):
    plugin = "colossalai"
    unplannable = "whose engines read values"


def trained(make=Net, options=None, **arguments):
    chosen = {"strategy": {"name": "colossalai", **(options or {})}, "accelerator": "cpu"} | arguments
    return weights_on_all_ranks(run_in_processes(train, 2, make, BATCHES, chosen))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("options", [{}, {"static_graph": True, "gradient_as_bucket_view": True}], ids=["", "static"])
def test_two_processes_train_as_one(accumulate, clip, options):
    reference, norms = train_module_plainly(Net(), BATCHES, accumulate=accumulate, max_norm=clip)
    weights = trained(options=options, accumulate_grad_batches=accumulate, gradient_clip_val=clip)

    assert relative_difference(weights, reference) < 1e-6
    assert max(norms) > 1


def in_two_parts(rank, size, strategies, path):
    for strategy, last, resume in zip(strategies, (3, 6), (None, path), strict=True):
        limits = QUIET | {"max_epochs": -1, "max_steps": last}
        trainer = stratagem.Trainer(strategy=strategy, devices=size, accelerator="cpu", **limits)
        trainer.fit(Net(), share(trainer, BATCHES), ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(path)
        weights = weights_of(trainer)
        trainer.run.close()
    return weights


@pytest.mark.parametrize("strategies", [("colossalai", "ddp"), ("ddp", "colossalai")])
def test_checkpoints_go_to_ddp_and_back_with_momentum(strategies, tmp_path):
    weights = run_in_processes(in_two_parts, 2, strategies, str(tmp_path / "one.ckpt"))[0]

    assert relative_difference(weights, train_module_plainly(Net(), BATCHES)[0]) < 1e-6


class Normalized(Net):
    """Has a batch norm, which Colossal-AI's Booster would replace."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(self.net[0].in_features)

    def forward(self, x):
        return self.net(self.norm(x))


def kinds_after_fit(rank, size):
    trainer = stratagem.Trainer(strategy="colossalai", devices=size, accelerator="cpu", **QUIET)
    module = Normalized()
    trainer.fit(module, share(trainer, BATCHES))
    return type(module.norm).__name__


def test_batch_norms_are_not_replaced():
    assert run_in_processes(kinds_after_fit, 2) == ["BatchNorm1d"] * 2


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(2, 2)


def test_a_parameter_without_gradient_is_named():
    with pytest.raises(
        ProcessesFailed, match=r"ConfigError: idle.weight, idle.bias got no gradient.*find_unused_parameters"
    ):
        trained(Unused)
    weights = trained(Unused, {"find_unused_parameters": True})
    rest = {name: weights[name] for name in Net().state_dict()}

    assert relative_difference(rest, train_module_plainly(Net(), BATCHES)[0]) < 1e-6


class Dying(Net):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_here(rank, size):
    trainer = stratagem.Trainer(strategy="colossalai", devices=size, accelerator="cpu", **QUIET)
    trainer.fit(Dying(), share(trainer, BATCHES))


def test_a_rank_that_is_killed_ends_the_others():
    with pytest.raises(ProcessesFailed, match="rank 1"):
        run_in_processes(fit_here, 2)


IMPORTS = """
import os, sys, torch, stratagem_colossalai
assert "colossalai" not in sys.modules
def state():
    return torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed(), set(vars(torch.Tensor))
before = state()
stratagem_colossalai.strategy.engine.load("cpu")
assert "colossalai" in sys.modules and state() == before and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
"""


def test_the_engine_is_imported_late_and_leaves_torch_as_it_was():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_two_options_that_exclude_each_other_are_refused():
    options = {"static_graph": True, "find_unused_parameters": True}
    with pytest.raises(ConfigError, match=r"static_graph and .* are both true; expected one of them"):
        stratagem.Trainer(strategy={"name": "colossalai", **options}, accelerator="cpu")


def test_an_option_of_lightning_is_answered_with_its_plugin():
    with pytest.raises(
        ConfigError, match=r"use_chunk is True, and .*plugin is 'ddp'; .* set plugin='gemini', which has"
    ):
        stratagem.Trainer(strategy={"name": "colossalai", "use_chunk": True}, accelerator="cpu")
