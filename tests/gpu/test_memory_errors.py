"""On a GPU whose memory is limited: what the error says that held the memory is what torch has allocated."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from on_device import QUIET
from torch import nn

import stratagem as sg
from stratagem_callbacks import memory_ways
from stratagem_callbacks.memory_held import Memory, held_by
from stratagem_callbacks.memory_ways import ways_out

pytestmark = pytest.mark.gpu
MIB, WIDTH, LAYERS = 1 << 20, 2048, 8
#: Bytes of the parameters, without biases: 128 MiB.
PARAMETERS = 4 * LAYERS * WIDTH**2
#: More than what cuBLAS takes, and a batch with its activations.
OTHER = 64 * MIB


@pytest.fixture
def limit():
    """Return a function that limits the memory of this process to a number of MiB."""
    total = torch.cuda.get_device_properties(0).total_memory
    yield lambda size: torch.cuda.set_per_process_memory_fraction(size * MIB / total, 0)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Large(sg.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Measures(sg.Callback):
    @sg.hookimpl
    def on_before_zero_grad(self, trainer):
        self.allocated = torch.cuda.memory_allocated()
        self.held = held_by(trainer, trainer.run.device, self.allocated)


def fit(samples, module=None, **options):
    batches = [torch.randn(samples, WIDTH) for _ in range(2)]
    sg.Trainer(**(QUIET | {"max_epochs": 1} | options)).fit(module or Large(), batches)


def error_of(samples, **options):
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(samples, **options)
    return str(raised.value), str(raised.value.__cause__)


def said(kind, text):
    """Return how many MiB of `kind` the sentence `text` has."""
    number, unit = re.search(rf"([\d.]+) (\w+) of {kind}", text).groups()
    return float(number) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "ddp_sharded", "fsdp"])
def test_the_kinds_are_what_torch_has_allocated(strategy):
    callback = Measures()
    before = torch.cuda.memory_allocated()
    fit(8, strategy=strategy, callbacks=callback)

    held = callback.held
    assert held.parameters == held.gradients == PARAMETERS
    assert held.optimizer == pytest.approx(2 * PARAMETERS, rel=1e-3)
    buckets = PARAMETERS if strategy == "ddp" else 0  # of one rank, too, unless gradients are views of them
    assert before <= held.rest <= before + buckets + OTHER
    assert held.states + held.rest == callback.allocated


def test_activations_that_do_not_fit_are_named_and_recomputed(limit):
    limit(1024)
    samples = (
        20 * MIB // WIDTH
    )  # 80 MiB for each of two tensors of a layer, beside 512 MiB of parameters and their like
    text, cause = error_of(samples)

    assert re.match(
        r"rank 0 ran out of memory on cuda:0, in (training_step|backward) at step 0, batch 0: it asked", text
    )
    assert "and 1.0 GiB are allowed" in text
    assert "CUDA out of memory" in cause
    assert re.search(r"; it held [\d.]+ MiB of activations", text), text
    assert said("parameters", text) == pytest.approx(PARAMETERS / MIB, rel=0.01)
    assert 'set activation_checkpointing="blocks", or ' in text, text
    torch.cuda.empty_cache()
    fit(samples // 4, activation_checkpointing="blocks")


def test_an_optimizer_state_that_does_not_fit_is_named(limit):
    limit(450)
    text, cause = error_of(8)

    assert "in the optimizer step at step 0, batch 0: " in text
    assert said("parameters", text) == pytest.approx(PARAMETERS / MIB, rel=0.01)
    assert said("gradients", text) == pytest.approx(PARAMETERS / MIB, rel=0.01)
    held = sum(said(kind, text) for kind in ("parameters", "gradients", "optimizer state"))
    assert 0 <= float(re.search(r"([\d.]+) MiB is allocated by PyTorch", cause)[1]) - held < OTHER / MIB
    assert 'strategy="fsdp' in text, text


@pytest.mark.parametrize("most", [4096, 1024])
def test_a_snapshot_has_the_allocations_also_of_a_run_that_dies(limit, tmp_path, most):
    limit(most)
    options = {"profiler": {"name": "memory", "wait": 0}, "default_root_dir": tmp_path}
    if most == 1024:
        error_of(20 * MIB // WIDTH, **options)
    else:
        fit(8, **options)
        assert "parameters" in (tmp_path / "memory-rank0.txt").read_text()

    snapshot = pickle.loads((tmp_path / "memory-rank0.pickle").read_bytes())
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) > PARAMETERS
    actions = {event["action"] for event in snapshot["device_traces"][0]}
    assert "alloc" in actions
    assert ("oom" in actions) == (most == 1024)


def test_a_batch_that_does_not_fit_is_computed_in_parts(limit, capsys):
    samples, weights = 20 * MIB // WIDTH, []
    for most, callbacks in ((4096, []), (1024, "auto_microbatch")):
        limit(most)
        torch.manual_seed(0)
        module = Large()
        fit(samples, module, callbacks=callbacks)
        weights.append({name: value.cpu() for name, value in module.state_dict().items()})
        del module
        torch.cuda.empty_cache()

    assert "auto_microbatch: out of memory at batch 0" in capsys.readouterr().out
    for name, whole in weights[0].items():  # Adam moves a weight by 1e-4 in each of two steps
        assert (whole - weights[1][name]).abs().mean() < 2e-5


class Collects(sg.Callback):
    @sg.hookimpl
    def on_train_batch_end(self, trainer):
        held, memory = held_by(trainer, trainer.run.device, 0), Memory(total=9, free=1, allocated=8)
        self.ways = ways_out(trainer, held, memory, "backward")


@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_each_way_out_trains(strategy, monkeypatch):
    monkeypatch.setattr(memory_ways, "_MOST", 99)
    monkeypatch.setattr(memory_ways, "_SHARE", 0.0)
    callback = Collects()
    fit(8, strategy=strategy, callbacks=callback)

    texts = [way.text for way in callback.ways]
    if strategy != "fsdp":
        assert 'set precision="bf16-true"' in texts
    else:
        assert 'choose strategy="fsdp_cpu_offload", which keeps states in the memory of the host' in texts
    for way in callback.ways:
        fit(8, **({"strategy": strategy} | way.arguments))
