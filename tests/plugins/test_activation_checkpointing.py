"""Activation checkpointing changes what is kept, and nothing else, under every strategy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import train
from stratagem_transforms import activation_checkpointing
from stratagem_transforms.activation_checkpointing import ActivationCheckpointing

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.counts = nn.Linear(32, 32), SimpleNamespace(calls=0)

    @property
    def calls(self):
        """How often it computed: what is computed again leaves attributes alone, and not what they refer to."""
        return self.counts.calls

    def forward(self, x):
        self.counts.calls += 1
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.2, training=self.training)


class Deep(Net):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 1))


def fitted(wanted, batches, **arguments):
    torch.manual_seed(7)
    model = Deep()
    trainer = sg.Trainer(max_epochs=1, activation_checkpointing=wanted, **(QUIET | arguments))
    trainer.fit(model, batches)
    return model


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_training_is_the_same_to_the_last_bit_dropout_included(mode):
    batches = joined_batches(4, 16)

    plain, recomputed = fitted(None, batches), fitted({"policy": {Block}, "mode": mode}, batches)

    assert all(torch.equal(value, recomputed.state_dict()[name]) for name, value in plain.state_dict().items())
    assert plain.net[1].calls == 4
    assert recomputed.net[1].calls == (4 if mode == "offload" else 8)


def test_activations_of_a_cpu_are_not_pinned_for_a_gpu_beside_it(monkeypatch):
    """Pinning memory starts CUDA: a run on the CPU must not, whatever the machine has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pinned = []
    save = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", lambda pin_memory: pinned.append(pin_memory) or save())
    fitted({"policy": {Block}, "mode": "offload"}, joined_batches(1, 16))

    assert set(pinned) == {False}


def moved_and_weights(**arguments):
    """Return how many parts of memory are moved to the CPU, how many are of weights, and of both."""
    moved, weights, memory, forward = {}, {}, activation_checkpointing._memory, nn.Linear.forward

    def note(found, tensors):
        found.update((memory(tensor), tensor) for tensor in tensors)  # held, so that no other gets its memory

    class Counting(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: note(moved, [tensor]) or pack(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "save_on_cpu", Counting)
        patch.setattr(nn.Linear, "forward", lambda self, x: note(weights, self.parameters()) or forward(self, x))
        fitted({"policy": {nn.Sequential}, "mode": "offload"}, joined_batches(1, 16), **arguments)
    return len(moved), len(weights), len(moved.keys() & weights.keys())


def _moved_in_a_rank(rank, world_size, unit):
    """Units of the part that is kept are gathered one after the other."""
    return moved_and_weights(strategy={"name": "fsdp", "auto_wrap_policy": {unit}}, devices=world_size)


@pytest.mark.slow
def test_offload_leaves_weights_where_they_are():
    in_ranks = [found for unit in (Block, nn.Linear) for found in run_in_processes(_moved_in_a_rank, 2, unit)]
    for moved, weights, both in [moved_and_weights(), *in_ranks]:
        assert moved > 0
        assert weights > 0
        assert both == 0


class Graph(nn.Module):
    """Multiplies by a sparse matrix, and by a weight that is needed in backward."""

    def __init__(self):
        super().__init__()
        self.near, self.weight = torch.eye(4).to_sparse(), nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return torch.sparse.mm(self.near, x) @ self.weight


def test_offload_keeps_sparse_tensors_and_refuses_weights_that_change():
    graph, x = Graph(), torch.ones(4, 4, requires_grad=True)
    activation_checkpointing._keep_on_cpu(graph)
    graph(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 4.0))

    out = graph(x).sum()
    graph.weight.data.mul_(1)  # without a trace
    with torch.no_grad():
        graph.weight.add_(1)
    with pytest.raises(ConfigError, match=r"a weight of shape \[4, 4\] changed between forward and backward"):
        out.backward()


def test_selective_keeps_what_every_fused_attention_returns():
    """A kernel that is left out is computed twice, on the GPUs that torch chooses it for."""
    from torch.utils.checkpoint import CheckpointPolicy

    policy, aten = activation_checkpointing._keeping_products()[0].policy_fn, torch.ops.aten
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    fused = {name for name in names if name.startswith("_scaled_dot_product_") and not name.endswith("_backward")}
    fused.remove("_scaled_dot_product_attention_math")  # torch takes it apart
    assert "_scaled_dot_product_cudnn_attention" in fused

    for name in sorted(fused | {"mm", "_scaled_mm", "_grouped_mm"}):
        assert policy(None, getattr(aten, name).default) == CheckpointPolicy.MUST_SAVE, name
    assert policy(None, aten.gelu.default) == CheckpointPolicy.PREFER_RECOMPUTE


def choose(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, Block)


@pytest.mark.parametrize(
    "wanted",
    [
        {Block}, [Block], Block, "Block", {"Block"}, ModuleWrapPolicy({Block}), {"policy": "Block"},
        choose, "blocks",
    ],
    ids=["set", "list", "class", "name", "names", "torch policy", "mapping", "callable", "blocks"],
)  # fmt: skip
def test_every_way_to_say_which_parts(wanted):
    assert [block.calls for block in fitted(wanted, joined_batches(2, 16)).net[1:3]] == [4, 4]


def test_the_callback_is_what_the_argument_adds():
    callback = {"name": "activation_checkpointing", "policy": [Block], "mode": "selective"}
    model = fitted(None, joined_batches(2, 16), callbacks=[callback])

    assert [block.calls for block in model.net[1:3]] == [4, 4]
    with pytest.raises(
        ConfigError, match="activation_checkpointing is set, and callback 'activation_checkpointing' is li"
    ):
        sg.Trainer(activation_checkpointing={Block}, callbacks=[callback], **QUIET)


def test_evaluation_computes_once():
    model, batches = Deep(), joined_batches(2, 16)
    trainer = sg.Trainer(max_epochs=1, activation_checkpointing={Block}, num_sanity_val_steps=0, **QUIET)
    trainer.fit(model, batches, batches)

    assert model.net[1].calls == 2 * 2 + 2


def test_a_second_fit_applies_it_once():
    model, batches = Deep(), joined_batches(2, 16)
    for _ in range(2):
        sg.Trainer(max_epochs=1, activation_checkpointing={Block}, **QUIET).fit(model, batches)

    assert model.net[1].calls == 8


def saved_bytes(wanted):
    """How much backward keeps in one step."""
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.untyped_storage().nbytes()
        return tensor

    class Counting(Deep):
        def training_step(self, batch, batch_idx):
            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                return super().training_step(batch, batch_idx)

    sg.Trainer(max_epochs=1, activation_checkpointing=wanted, **QUIET).fit(Counting(), joined_batches(1, 4096))
    return total


def test_less_is_kept():
    nothing, full = saved_bytes(None), saved_bytes({Block})

    assert full < nothing * 0.7


def _train(rank, world_size, batches, strategy, mode):
    arguments = {"strategy": strategy, "activation_checkpointing": {"policy": {nn.Sequential}, "mode": mode}}
    return train(rank, world_size, Net, batches, QUIET | arguments)["weights"]


@pytest.mark.every_push("ddp-offload")
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", {"name": "fsdp", "auto_wrap_policy": {nn.Linear}}], ids=str)
def test_two_processes_equal_plain_pytorch(strategy, mode):
    batches = joined_batches(6, 24)
    reference, _ = train_module_plainly(Net(), batches)

    for weights in run_in_processes(_train, 2, batches, strategy, mode):
        assert relative_difference(weights, reference) < 1e-6


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (5, "activation_checkpointing is 5; expected 'blocks', a set of classes"),
        (set(), r"activation_checkpointing is set\(\); expected a set of classes"),
        ({"policy": {Block}, "mod": "full"}, "has the keys 'policy', 'mod'; expected .*did you mean 'mode'"),
        ({"mode": "full"}, "has the keys 'mode'; expected 'policy'"),
        ({}, "has no keys; expected 'policy'"),
        (nn.Linear(1, 1), "activation_checkpointing is Linear.*; expected 'blocks', a set of classes"),
        (
            lambda part: True,
            r"a callable with the arguments \(part\); expected .*\(module, recurse, nonwrapped_numel\)",
        ),
        (
            {"policy": {Block}, "mode": "some"},
            "activation_checkpointing.mode is 'some'; expected 'full' or 'selective'",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wanted, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(activation_checkpointing=wanted, **QUIET)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {nn.Conv2d},
            "names Conv2d, and Deep has none; expected classes of its parts: Block, Deep, Linear, Sequential",
        ),
        ("Blok", "names Blok, and Deep has none.*did you mean 'Block'"),
        ({Deep}, "chooses no part of Deep"),
    ],
)
def test_parts_that_are_not_there_are_refused(wanted, message):
    with pytest.raises(ConfigError, match=message):
        fitted(wanted, joined_batches(1, 8))


def test_two_different_wishes_for_one_part_are_refused():
    model, batches = Deep(), joined_batches(1, 8)
    sg.Trainer(max_epochs=1, activation_checkpointing={Block}, **QUIET).fit(model, batches)
    again = {"policy": {Block}, "mode": "offload"}

    with pytest.raises(ConfigError, match="'offload' for Block, which is under 'full' already"):
        sg.Trainer(max_epochs=1, activation_checkpointing=again, **QUIET).fit(model, batches)


@pytest.mark.slow
def test_both_names_for_it_are_refused_under_fsdp():
    strategy = {"name": "fsdp", "activation_checkpointing_policy": {Block}}

    with pytest.raises(ConfigError, match="are both set; expected one of the two"):
        fitted({Block}, joined_batches(1, 8), strategy=strategy, devices=1)


def test_the_command_line_names_classes():
    trainer = sg.Trainer.from_cli(["--activation_checkpointing", "Block,Other", "--accelerator", "cpu"])

    (callback,) = [each for each in trainer.callbacks if isinstance(each, ActivationCheckpointing)]
    assert (callback.policy, callback.mode) == ({"Block", "Other"}, "full")


class Changing(nn.Module):
    """What its forward changes is changed once, and backward computes again with what it was."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what, self.count, self.seen = nn.Linear(16, 16), what, 0, []
        self.register_buffer("centre", torch.zeros(16))
        self.norm = nn.BatchNorm1d(16) if what == "batch norm" else nn.Identity()
        if what == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.linear)

    def forward(self, x, cache):
        if self.what == "buffer in place":
            self.centre.mul_(0.5).add_(0.5 * x.detach().mean(0))
        if self.what == "buffer":
            self.centre = 0.5 * self.centre + 0.5 * x.detach().mean(0)
        if self.what == "attributes":
            self.count += 1
            self.seen.append(self.count)
            x = x / len(self.seen)
        if self.what == "argument":
            cache.append(x)
            x = torch.cat(cache)
        return torch.tanh(self.linear(self.norm(x - self.centre)))


class Changed(Net):
    def __init__(self, what):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.blocks, self.out = nn.ModuleList([Changing(what), Changing(what)]), nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        x, cache = batch[0], []
        for block in self.blocks:
            x = block(x, cache)
        return self.out(x).square().mean()


def _changed(what, wanted, **arguments):
    model = Changed(what)
    sg.Trainer(max_epochs=1, activation_checkpointing=wanted, **QUIET | arguments).fit(model, joined_batches(3, 8))
    return model.state_dict(), [(block.count, block.seen) for block in model.blocks]


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("what", ["buffer in place", "buffer", "attributes", "spectral norm", "batch norm"])
def test_what_a_forward_changes_is_changed_once(what, mode):
    (plain, counts), (found, found_counts) = (
        _changed(what, each) for each in (None, {"policy": {Changing}, "mode": mode})
    )

    assert found_counts == counts
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("what", ["buffer in place", "batch norm"])
def test_what_a_compiled_block_changes_is_changed_once(what):
    blocks = {"backend": "aot_eager", "per_block": True}
    (plain, _), (found, _) = (_changed(what, each, compile=blocks) for each in (None, {Changing}))

    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def test_an_argument_that_a_forward_changes_is_named():
    with pytest.raises(ConfigError, match="computed something else in backward than in forward.*use_cache=False"):
        _changed("argument", {Changing})


class Language(sg.Module):
    """A decoder of transformers whose cache is on, on batches that are padded."""

    def __init__(self, kind):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        llama = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        t5 = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        t5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
        self.config = transformers.AutoConfig.for_model(kind, vocab_size=16, **(t5 if kind == "t5" else llama))
        self.used = set()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            by_config = transformers.AutoModelForSeq2SeqLM if kind == "t5" else transformers.AutoModelForCausalLM
            self.model = by_config.from_config(self.config)

    def training_step(self, batch, batch_idx):
        self.used.add(self.config.use_cache)
        return self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llama", {"activation_checkpointing": "blocks"}),
        ("t5", {"activation_checkpointing": {"policy": "blocks", "mode": "selective"}}),
        ("llama", {"strategy": {"name": "fsdp", "activation_checkpointing_policy": {"LlamaDecoderLayer"}}}),
    ],
)
def test_caches_of_keys_are_off_where_blocks_are_computed_again(kind, wanted, capsys):
    words, mask = torch.arange(1, 13).view(3, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    batches = [{"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}] * 2
    models = {}
    for name, arguments in ("plain", {}), ("recomputed", wanted):
        models[name] = Language(kind)
        sg.Trainer(max_epochs=1, devices=1, **(QUIET | arguments)).fit(models[name], batches)

    plain, recomputed = models.values()
    assert (plain.used, recomputed.used, recomputed.config.use_cache) == ({True}, {False}, True)
    assert capsys.readouterr().out.count("Config.use_cache is false during this run") == 1
    found = {name: getattr(each, "_local_tensor", each) for name, each in recomputed.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
