"""A pipeline trains as one process does: every schedule, tied parameters, parameters outside of the stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem.errors import StratagemError
from stratagem_parallel.pipeline.schedules import SCHEDULES
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly, window_size
from stratagem_testing.training import QUIET, share, weights_of

VOCABULARY, WIDTH, LENGTH, STEPS = 29, 16, 12, 7  # the last window is short
#: Clipping hides what accumulation multiplies: most tests have those in the middle.
WINDOWS = ((1, None), (1, 0.5), (3, None), (3, 0.5))


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, 2, WIDTH // 2).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))


class Head(nn.Module):
    """Logits from an embedding's weight."""

    def __init__(self, token):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = token.weight

    def forward(self, x):
        return self.logits(self.norm(x))


class Gpt(sg.Module):
    """Six layers, of which the first and the last share the embedding's weight."""

    def __init__(self):
        super().__init__()
        with seeded(3):
            embedding = Embedding()
            self.sequential_module = nn.Sequential(embedding, *(Block() for _ in range(6)), Head(embedding.token))
        self.double()

    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        logits = self.sequential_module(tokens[:, :-1])
        loss = 12 * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Outside(Gpt):
    """The embedding and the head are used around the pipelined layers, and share a weight."""

    def __init__(self):
        super().__init__()
        layers = self.sequential_module
        self.embedding, self.head = layers[0], layers[-1]
        self.sequential_module = layers[1:-1]

    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        logits = self.head(self.sequential_module(self.embedding(tokens[:, :-1])))
        loss = 12 * F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return {"loss": loss}


def batches(samples):
    generator = torch.Generator().manual_seed(7)
    return [
        {"tokens": torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)} for _ in range(STEPS)
    ]  # fmt: skip


def train_plainly(make, joined, accumulate, max_norm):
    """Train in plain PyTorch; return the weights, the norms before clipping and the losses."""
    module, norms, losses = make(), [], []
    module.log = lambda *_, **__: None
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(joined):
        output = module.training_step(batch, index)
        loss = output["loss"] if isinstance(output, dict) else output
        losses.append(loss.item())
        (loss / window_size(index, len(joined), accumulate)).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(joined):
            norms.append(float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])))
            if max_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict(), norms, losses


def _part(batch, index, count):
    return {key: value.chunk(count)[index] for key, value in batch.items()}


def _train(rank, world_size, make, joined, options, windows):
    """Return the weights and the metrics of each window, as all ranks have them."""
    found = []
    for accumulate, max_norm in windows:
        trainer = sg.Trainer(
            strategy={"name": "parallel"} | options, devices=world_size, accumulate_grad_batches=accumulate,
            gradient_clip_val=max_norm, **QUIET | {"accelerator": "cpu"},
        )  # fmt: skip
        trainer.run.connect()
        mesh = trainer.run.mesh
        trainer.fit(make(), [_part(batch, mesh.data_shard, mesh.num_data_shards) for batch in joined])
        found.append((weights_of(trainer), {k: float(v) for k, v in trainer.callback_metrics.items()}))
    return found


def _check(world_size, make, options, windows, samples=8):
    joined = batches(samples)
    results = run_in_processes(_train, world_size, make, joined, options, windows, limit_s=900)
    for index, (accumulate, max_norm) in enumerate(windows):
        weights, norms, losses = train_plainly(make, joined, accumulate, max_norm)
        assert max(norms) > 1
        for result in results:
            assert relative_difference(result[index][0], weights) < 1e-6
            assert result[index][1]["loss"] == pytest.approx(losses[-1], rel=1e-6)


OPTIONS = {name: {"schedule": name, "microbatches": 8} for name in SCHEDULES}


@pytest.mark.every_push("dualpipe_v")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_two_stages_train_as_one_process(schedule):
    _check(2, Gpt, {"pipeline": 2} | OPTIONS[schedule], WINDOWS[1:3])


@pytest.mark.sweep(guard="tests/parity/test_parallel_pipeline.py::test_two_stages_train_as_one_process")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_four_stages_train_as_one_process(schedule):
    _check(4, Gpt, {"pipeline": 4} | OPTIONS[schedule], WINDOWS[1:3])


def _net(rank, world_size, joined, options):
    trainer = sg.Trainer(strategy={"name": "parallel"} | options, devices=2, **QUIET | {"accelerator": "cpu"})
    trainer.fit(Net(), share(trainer, joined))
    return weights_of(trainer), {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.every_push("gpipe")
@pytest.mark.parametrize(
    "options",
    [{"schedule": "gpipe", "balance": [2, 3]}, {"schedule": "1f1b", "balance": [4, 1], "microbatches": 4}],
    ids=["gpipe", "1f1b"],
)
def test_layers_cut_by_numbers_train_as_one_process(options):
    joined = joined_batches(STEPS, 24)
    plain = Net()
    plain.log = lambda *_, **__: None
    optimizer, losses = plain.configure_optimizers(), []
    for index, batch in enumerate(joined):
        loss = plain.training_step(batch, index)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for weights, metrics in run_in_processes(_net, 2, joined, {"pipeline": 2} | options):
        assert relative_difference(weights, plain.state_dict()) < 1e-6
        assert metrics["train_loss"] == pytest.approx(losses[-1], rel=1e-6)


@pytest.mark.every_push("default schedule")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble_v"}],
    ids=["default schedule", "zero_bubble_v"],
)
def test_parameters_outside_of_the_stages_are_trained_on_both_ends(options):
    _check(2, Outside, options, WINDOWS[1:3])


@pytest.mark.every_push("gpipe-always")
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble_v"])
def test_activations_that_are_computed_again_change_nothing(mode, schedule):
    _check(2, Gpt, {"pipeline": 2, "checkpoint": mode} | OPTIONS[schedule], WINDOWS[3:])


@pytest.mark.sweep(guard="tests/parity/test_parallel_together.py::test_pipelines_and_another_axis")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"pipeline": 2, "replicate": 2, "microbatches": 4}, {"name": "ddp_sequential"}])
def test_pipelines_are_replicated(options):
    _check(4, Gpt, options, WINDOWS[1:3])


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(0.1 * torch.randn(32, 32, dtype=torch.cfloat))

    def forward(self, x):
        return x + (x.to(self.matrix.dtype) @ self.matrix).real


class WithComplex(Net):
    def __init__(self):
        super().__init__()
        with seeded(7):
            self.net = nn.Sequential(self.net[0], Complex(), nn.Tanh(), self.net[4])


class Penalty(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.pow(2).sum() for p in self.parameters())


def _fit_in_stages(rank, world_size, make):
    strategy = {"name": "parallel", "pipeline": 2, "microbatches": 2}
    trainer = sg.Trainer(strategy=strategy, devices=2, gradient_clip_val=0.1, **QUIET | {"accelerator": "cpu"})
    try:
        trainer.fit(make(), joined_batches(4, 8))
    except StratagemError as error:
        return str(error)
    return weights_of(trainer)


@pytest.mark.slow
def test_gradients_of_complex_parameters_are_clipped():
    reference, norms = train_module_plainly(WithComplex(), joined_batches(4, 8), max_norm=0.1)
    assert max(norms) > 1
    for found in run_in_processes(_fit_in_stages, 2, WithComplex):
        assert relative_difference(found, reference) < 1e-5


@pytest.mark.slow
def test_a_penalty_on_all_parameters_is_refused():
    said = run_in_processes(_fit_in_stages, 2, Penalty)
    assert any(
        "training_step computes with a layer of net that is on another process of the pipeline" in each for each in said
    )
