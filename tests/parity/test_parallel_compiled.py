"""`compile` under the axes whose layers send within a forward: they are called as they are, and what is between is compiled."""

from __future__ import annotations

import pytest
from parallel_models import GPT, LENGTH, Block, texts, train_plainly
from test_parallel_context import Llama, labelled
from test_parallel_expert import BATCHES, Mixture
from torch._dynamo.testing import CompileCounterWithBackend

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import relative_difference, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
#: The rounding of torch's own kernels.
TOLERANCE = 2e-6


def fitted(module, batches, strategy, world_size, **wanted):
    """Train `module` with ``compile``; return its weights, and how many graphs were compiled."""
    backend = CompileCounterWithBackend("aot_eager")
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, gradient_clip_val=0.5, compile={"backend": backend} | wanted, **QUIET
    )
    trainer.fit(module, share(trainer, batches))
    return weights_of(trainer), backend.frame_count


def _context(method, **wanted):
    def train(rank, world_size):
        batches, options = texts(4, 4), {"name": "parallel", "context": world_size, "context_method": method}
        plain, norms = train_plainly(GPT(), batches, max_norm=0.5)
        weights, graphs = fitted(GPT(), batches, options, world_size, **wanted)
        return relative_difference(weights, plain), max(norms), graphs

    return train


def _hugging_face(rank, world_size):
    batches = labelled(steps=4)
    plain, norms = train_plainly(Llama(), batches, max_norm=0.5)
    weights, graphs = fitted(Llama(), batches, {"name": "parallel", "context": world_size}, world_size)
    return relative_difference(weights, plain), max(norms), graphs


def _experts(rank, world_size):
    plain, norms = train_module_plainly(Mixture(), BATCHES[:6], max_norm=0.5)
    weights, graphs = fitted(Mixture(), BATCHES[:6], {"name": "parallel", "expert": world_size}, world_size)
    return relative_difference(weights, plain), max(norms), graphs


def _one_after_the_other(rank, world_size):
    """Compile for whole sequences, then go on with parts of the same shapes, and with whole ones again."""
    module, plain, norms, graphs = GPT(), GPT(), [], []
    whole = [tuple(each[:, : LENGTH // 2].contiguous() for each in batch) for batch in texts(3, 8)]
    for strategy, batches in (
        ("ddp", whole), ({"name": "parallel", "context": world_size}, texts(3, 4)), ("ddp", whole),
    ):  # fmt: skip
        norms += train_plainly(plain, batches, max_norm=0.5)[1]
        weights, found = fitted(module, batches, strategy, world_size)
        graphs.append(found)
    # The third may find what the first made.
    return relative_difference(weights, plain.state_dict()), max(norms), min(graphs[:2])


CASES = {
    "steps around ulysses": _context("ulysses"), "blocks around all-gather": _context("all_gather", modules={Block}),
    "hugging face": _hugging_face, "experts": _experts, "one after the other": _one_after_the_other,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.every_push("steps around ulysses")
@pytest.mark.parametrize("case", list(CASES))
def test_trains_as_without_compile(case):
    for difference, norm, graphs in run_in_processes(CASES[case], 2, limit_s=300):
        assert norm > 1
        assert difference < TOLERANCE
        assert graphs > 0


def test_tensor_parallelism_is_refused():
    with pytest.raises(ConfigError, match="torch cannot compile the rules by which layers compute"):
        sg.Trainer(strategy={"name": "parallel", "tensor": 2, "context": 2}, devices=4, compile=True, **QUIET)
