"""Expert parallelism trains as one process does: each rank has some of the experts, and its own samples."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture_of_experts.py"


def layer(*arguments, **options):
    """Return the layer of the example."""
    spec = importlib.util.spec_from_file_location("mixture_of_experts", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE.parent))
        spec.loader.exec_module(module)
    return module.MixtureOfExperts(*arguments, **options)


class Mixture(Net):
    """Two layers of experts; the samples of a rank need experts of all ranks, and some get none."""

    def __init__(self):
        super().__init__(lr=2e-3)
        with seeded(0):
            self.net = nn.Sequential(nn.Linear(16, 16), layer(16, 8, 8), layer(16, 8, 8, top=1), nn.Linear(16, 1))


BATCHES = joined_batches(7, 24)  # the last window is short
#: Clipping hides what accumulation multiplies: each has a window of its own.
WINDOWS = ((1, 0.5), (3, None))
CASES = {
    "2": (2, {"expert": 2}),
    "4": (4, {"expert": 4}),
    "with replicas": (4, {"expert": 2, "replicate": 2}),
}


OTHERS = {
    "shard": (4, {"expert": 2, "shard": 2}),
    "tensor": (4, {"expert": 2, "tensor": 2, "plan": {"net.0": "colwise_gather_output", "net.1.experts": "expert"}}),
}


def _train(rank, world_size, options, windows):
    """Return the differences from one plain process, and the largest norm."""
    found, norms = {}, []
    for accumulate, max_norm in windows:
        plain, its_norms = train_module_plainly(Mixture(), BATCHES, accumulate, max_norm)
        norms += its_norms
        trainer = sg.Trainer(
            strategy={"name": "parallel", **options}, devices=world_size, accumulate_grad_batches=accumulate,
            gradient_clip_val=max_norm, **QUIET,
        )  # fmt: skip
        trainer.fit(Mixture(), share(trainer, BATCHES))
        found[accumulate, max_norm] = relative_difference(weights_of(trainer), plain)
    return found, max(norms)


@pytest.mark.every_push("2")
@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_trains_as_one_process(case):
    world_size, options = CASES[case]
    for found, norm in run_in_processes(_train, world_size, options, WINDOWS, limit_s=360):
        assert norm > 1
        assert {window: distance for window, distance in found.items() if not distance < 1e-6} == {}
        assert len(found) == len(WINDOWS)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/parity/test_parallel_expert.py::test_trains_as_one_process",
)
@pytest.mark.every_push("tensor")
@pytest.mark.slow
@pytest.mark.parametrize("case", list(OTHERS))
def test_trains_as_one_process_with_other_axes(case):
    world_size, options = OTHERS[case]
    for found, norm in run_in_processes(_train, world_size, options, [(3, 0.5)], limit_s=360):
        assert norm > 1
        assert {window: distance for window, distance in found.items() if not distance < 1e-6} == {}


class Mixtral(sg.Module):
    """A model of Hugging Face with stacked experts, which it computes in the way that its config names."""

    def __init__(self, implementation, lr=2e-2):
        super().__init__()
        self.lr = lr
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(
            vocab_size=23, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, experts_implementation=implementation,
        )  # fmt: skip
        with seeded(0):
            self.model = transformers.MixtralForCausalLM(config)

    def forward(self, tokens):
        return tokens

    def criterion(self, tokens, labels):
        return 4 * self.model(input_ids=tokens, labels=labels).loss

    def training_step(self, batch, batch_idx):
        return self.criterion(*batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def _train_mixtral(rank, world_size, implementation):
    tokens = torch.randint(23, (7, 8, 6), generator=torch.Generator().manual_seed(1))
    batches = [(each, each) for each in tokens]
    plain, norms = train_module_plainly(Mixtral(implementation), batches, 1, None)
    trainer = sg.Trainer(strategy="expert_parallel", devices=world_size, **QUIET)
    trainer.fit(Mixtral(implementation), share(trainer, batches))
    return relative_difference(weights_of(trainer), plain), max(norms)


@pytest.mark.usefixtures("transformers_preloaded")
@pytest.mark.every_push("grouped_mm")
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_mixture_of_hugging_face_trains_as_in_one_process(implementation):
    for difference, norm in run_in_processes(_train_mixtral, 2, implementation, limit_s=360):
        assert norm > 1
        assert difference < 1e-6
