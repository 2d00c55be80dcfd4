"""`compile` under the axes whose layers send within a forward.

Layers that `tensor` cuts are compiled with what they send. Attention under `context` and layers of experts are called as
they are, and what is between is compiled.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from parallel_models import GPT, LENGTH, Attention, Block, StackedGPT, texts, train_plainly
from parallel_models import Llama as TensorLlama
from test_parallel_context import Llama, labelled
from test_parallel_expert import BATCHES, Mixture
from test_parallel_tensor import LAYERS, NORMS, PLANS
from test_parallel_together import STACKED_VOCAB
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

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


def fitted(module, batches, strategy, world_size, arguments=None, **wanted):
    """Train `module` with ``compile``; return its weights, and how many graphs were compiled."""
    backend = CompileCounterWithBackend("aot_eager")
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, gradient_clip_val=0.5, compile={"backend": backend} | wanted,
        **QUIET | (arguments or {}),
    )  # fmt: skip
    trainer.fit(module, share(trainer, batches))
    return weights_of(trainer), backend.frame_count


def _context(method, **wanted):
    def train(rank, world_size):
        batches, options = texts(4, 4), {"name": "parallel", "context": world_size, "context_method": method}
        plain, norms = train_plainly(GPT(), batches, max_norm=0.5)
        weights, graphs = fitted(GPT(), batches, options, world_size, **wanted)
        return relative_difference(weights, plain), max(norms), graphs

    return train


def _tensor(make=GPT, arguments=None, sizes=None, **wanted):
    def train(rank, world_size):
        batches, options = texts(4, 8), {"name": "parallel", "plan": PLANS["all"], "tensor": 2} | (sizes or {})
        plain, norms = train_plainly(make(), batches, max_norm=0.5)
        weights, graphs = fitted(make(), batches, options, world_size, arguments, **wanted)
        return relative_difference(weights, plain), max(norms), graphs

    return train


class Scaled(Attention):
    """Computes a layer without gradients, and again with."""

    def forward(self, x):
        with torch.no_grad():
            scale = 1 + self.q(x).mean(-1, keepdim=True)
        return super().forward(x) * scale


class Written(Attention):
    """Changes what layers take between two of them."""

    def forward(self, x):
        q = self.q(x)
        x.mul_(2)
        k = self.k(x)
        x *= 0.5
        return self.out((q + k) * self.v(x))


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return -0.5 * gradient * x.cos()


class Own(Attention):
    """Has a function of autograd, a check of a class, a hook and a checkpoint, on activations that are cut."""

    def forward(self, x):
        q = _Reversed.apply(functional.gelu(self.q(x)))
        x = x * 2 if isinstance(x, torch.Tensor) else x[0]
        k = checkpoint(lambda k: torch.tanh(k) * q, self.k(x), use_reentrant=False)
        k.register_hook(lambda gradient: 2 * gradient)
        return self.out(k + self.v(x))


class MakesLoss(GPT):
    """Makes the layer of the loss in its step."""

    def training_step(self, batch, batch_idx):
        logits, targets = self(batch[0]), batch[1]
        return 8 * nn.CrossEntropyLoss(None, ignore_index=-1)(logits.flatten(0, 1), targets.flatten())


def _with_own_code():
    model = _with_attention(Own)
    for layer in model.layers:
        layer.attention.v.register_full_backward_hook(lambda _module, inputs, _outputs: (2 * inputs[0],))
    return model


def _with_attention(kind, frozen=()):
    model = GPT()
    for layer in model.layers:
        layer.attention.__class__ = kind
        for name in frozen:  # plain PyTorch keeps the input of others, and refuses to write to it
            layer.attention.get_submodule(name).requires_grad_(False)
    return model


WRITTEN = functools.partial(_with_attention, Written, frozen=("q", "k"))


def _plain_afterwards(rank, world_size):
    """Compile, then go on with the same model without, and compile again."""
    module, plain, norms, graphs = GPT(), GPT(), [], []
    for disable in (False, True, False):
        options = {"name": "parallel", "plan": LAYERS | NORMS, "tensor": world_size}
        norms += train_plainly(plain, texts(3, 4), max_norm=0.5)[1]
        weights, found = fitted(module, texts(3, 4), options, world_size, modules={Block}, disable=disable)
        graphs.append(found)
    assert graphs[1] == 0
    return relative_difference(weights, plain.state_dict()), max(norms), graphs[0]


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


#: What may be repeated in backward is compiled with what repeats it.
SELECTIVE = {"activation_checkpointing": {"policy": {Block}, "mode": "selective"}}
ONE_GRAPH = {"modules": {Block}, "fullgraph": True}
TENSOR = {
    "blocks, as one graph": _tensor(**ONE_GRAPH), "steps of any plan": _tensor(),
    "a loss that a step makes": _tensor(MakesLoss, sizes={"plan": PLANS["vocab"]}),
    "a llama, in one graph": _tensor(functools.partial(TensorLlama, True), sizes={"plan": None}, fullgraph=True),
    "parts of blocks": _tensor(modules={Attention}),
    "without gradients, then with": _tensor(functools.partial(_with_attention, Scaled), sizes={"plan": LAYERS}),
    "written between layers": _tensor(WRITTEN, sizes={"plan": LAYERS}),
    "parts written between layers": _tensor(WRITTEN, sizes={"plan": LAYERS | NORMS}),
    "code of a model's own": _tensor(_with_own_code, sizes={"plan": LAYERS}),
    "code of a model's own, on parts": _tensor(_with_own_code, sizes={"plan": LAYERS | NORMS}),
    "heads that do not divide": _tensor(functools.partial(GPT, heads=1), **ONE_GRAPH),
    "selective": _tensor(arguments=SELECTIVE, **ONE_GRAPH),
    "repeated": _tensor(arguments={"activation_checkpointing": {"policy": {Block}}}, modules={Block}),
    "sizes that vary": _tensor(dynamic=True, modules={Block}), "plain afterwards": _plain_afterwards,
}  # fmt: skip
TWO_AXES = {
    "shard": _tensor(sizes={"shard": 2, "auto_wrap_policy": {Block}}), "replicate": _tensor(sizes={"replicate": 2}),
    "context": _tensor(sizes={"context": 2}),
    "pipeline": _tensor(StackedGPT, sizes={"pipeline": 2, "plan": STACKED_VOCAB | {"*.norm*": "sequence"}}),
}  # fmt: skip
CASES = {
    "steps around ulysses": _context("ulysses"), "blocks around all-gather": _context("all_gather", modules={Block}),
    "hugging face": _hugging_face, "experts": _experts, "one after the other": _one_after_the_other,
}  # fmt: skip


@pytest.mark.when_changed("plugins/parallel/", "plugins/parallel_unchanged/", cases=("blocks, as one graph",))
@pytest.mark.slow
@pytest.mark.every_push("steps around ulysses", "blocks, as one graph")
@pytest.mark.parametrize("case", [*CASES, *TENSOR, *TWO_AXES])
def test_trains_as_without_compile(case):
    every, world_size = CASES | TENSOR | TWO_AXES, 4 if case in TWO_AXES else 2
    for difference, norm, graphs in run_in_processes(every[case], world_size, limit_s=300):
        assert norm > 1
        assert difference < TOLERANCE
        assert graphs > 0


def _messages(rank, world_size, plan):
    """Return how often each graph of a layer sends: the forwards', then those of backward."""
    found = []

    def counting(graph, _inputs):
        found.append(Counter(node.target.name().split("::")[1].split(".")[0] for node in graph.graph.nodes
                             if isinstance(node.target, torch._ops.OpOverload) and "wait" not in node.target.name()
                             and node.target.namespace == "_c10d_functional"))  # fmt: skip
        return graph.forward

    trainer = sg.Trainer(
        strategy={"name": "parallel", "plan": plan, "tensor": world_size}, devices=world_size,
        compile={"backend": aot_autograd(fw_compiler=counting, bw_compiler=counting)} | ONE_GRAPH, **QUIET,
    )  # fmt: skip
    trainer.fit(GPT(layers=3), texts(2, 4))
    return found


SUMS, PARTS = {"all_reduce": 2}, {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
#: Gradients of norms and biases are sums of the ranks' with sequences that are cut; the first layer cuts its input.
NORMS_TOO = PARTS | {"all_reduce": 6}
GRAPHS = {"layers": [SUMS, SUMS], "sequence": [PARTS, PARTS, NORMS_TOO, NORMS_TOO | {"all_gather_into_tensor": 4}]}


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/parity/test_parallel_compiled.py::test_trains_as_without_compile",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            "layers",
            marks=pytest.mark.when_changed("plugins/parallel/", "plugins/parallel_unchanged/", "plugins/basics/"),
        ),
        "sequence",
    ],
)
def test_equal_layers_share_a_graph_and_what_takes_the_same_a_message(plan):
    for found in run_in_processes(_messages, 2, PLANS[plan], limit_s=300):
        assert found == GRAPHS[plan]


def _given_compiled(rank, world_size):
    trainer = sg.Trainer(
        strategy={"name": "parallel", "tensor": world_size, "plan": LAYERS}, devices=world_size, **QUIET
    )
    with pytest.raises(
        ConfigError, match=r"given as torch.compile\(model\); .*give the model with Trainer\(compile=True"
    ):
        trainer.fit(torch.compile(GPT(), backend="eager"), texts(1, 4))


@pytest.mark.slow
def test_a_model_that_its_user_compiled_is_refused():
    run_in_processes(_given_compiled, 2)


def _bad_label(rank, world_size):
    batches = texts(3, 4)  # the second is compiled again, with any number of a batch
    batches[2][1][0, 0] = 1000
    with pytest.raises(RuntimeError, match="a target is out of bounds"):
        fitted(GPT(layers=1), batches, {"name": "parallel", "plan": PLANS["vocab"], "tensor": world_size}, world_size)


@pytest.mark.when_changed(
    "plugins/parallel_unchanged/stratagem_parallel_unchanged/tensor/",
    guard="tests/parity/test_parallel_compiled.py::test_trains_as_without_compile",
)
@pytest.mark.slow
def test_a_label_beyond_a_vocabulary_that_is_cut_is_refused_in_compiled_code():
    run_in_processes(_bad_label, 2, limit_s=300)
