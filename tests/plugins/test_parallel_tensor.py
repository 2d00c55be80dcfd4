"""Plans of tensor parallelism, what they refuse, and what cut layers do beside training."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from parallel_models import GPT, VOCABULARY, texts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stratagem as sg
from garbage import still_there
from stratagem.errors import ConfigError
from stratagem_parallel.derived_plan import derived
from stratagem_parallel.description import short_names
from stratagem_parallel.plan import plan_of
from stratagem_parallel_unchanged.tensor import described
from stratagem_parallel_unchanged.tensor.loss import _check_in_range
from stratagem_parallel_unchanged.tensor.slices import Slice
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, outcome, share, weights_of

LAYERS = {
    "layers.*.attention.[qkv]": "colwise", "layers.*.attention.out": "rowwise",
    "layers.*.up": "colwise", "layers.*.down": "rowwise",
}  # fmt: skip
VOCAB = {"tokens": "vocab", "head": "vocab"}
NORMS = {"layers.*.norm_?": "sequence", "norm": "sequence"}
PLAIN = {"net.0": "colwise", "net.2": "rowwise"}


def _trainer(world_size, plan, **arguments):
    strategy = {"name": "parallel", "tensor": world_size, "plan": plan}
    return sg.Trainer(strategy=strategy, devices=world_size, accelerator="cpu", **QUIET | arguments)


# --- Plans -------------------------------------------------------------------------------------------------------


def test_a_plan_is_derived_for_blocks_whose_shapes_match():
    plan = derived(GPT(), 2)

    assert {name: style for name, style in plan.items() if not name.startswith("layers.1")} == {
        "tokens": "vocab", "head": "vocab", "layers.0.up": "colwise", "layers.0.down": "rowwise",
        "layers.0.attention.q": "colwise", "layers.0.attention.k": "colwise", "layers.0.attention.v": "colwise",
        "layers.0.attention.out": "rowwise",
    }  # fmt: skip


def test_what_is_cut_is_told_by_patterns_that_match_nothing_else():
    blocks, chain = GPT(), Net()

    assert described(derived(blocks, 2), blocks, 2) == (
        "tensor parallelism of 97% of the parameters over 2 ranks: layers.*.attention.q colwise, "
        "layers.*.attention.k colwise, layers.*.attention.v colwise, layers.*.up colwise, "
        "layers.*.attention.out rowwise, layers.*.down rowwise, tokens vocab, head vocab"
    )
    assert described(derived(chain, 2), chain, 2).endswith("over 2 ranks: net.0 colwise, net.2 rowwise")
    names = [f"layers.{layer}.w{number}" for layer in (0, 1) for number in (1, 2, 3)]
    assert short_names([name for name in names if name[-1] != "2"], names) == ["layers.*.w1", "layers.*.w3"]


def test_attention_is_left_whole_where_heads_do_not_divide():
    plan = derived(GPT(heads=1), 2)

    assert "layers.0.attention.q" not in plan
    assert plan["layers.0.down"] == "rowwise"


class Within(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class Conv1D(nn.Module):
    """As transformers has it: with a weight (inputs, outputs)."""

    def __init__(self, takes, gives):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(takes, gives)), nn.Parameter(torch.zeros(gives))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(3, *size)) for size in ((16, 4), (4, 8)))


def _lora(takes, gives):
    return Within(base_layer=nn.Linear(takes, gives), lora_A=nn.Linear(takes, 2), lora_B=nn.Linear(2, gives))


def _three():
    return {name: nn.Linear(8, 8) for name in ("query", "key", "value")}


FOUND = {
    "layers of neighbouring modules": (
        lambda: Within(own=Within(**_three()), output=Within(dense=nn.Linear(8, 8), norm=nn.LayerNorm(8))),
        {"own.query": "colwise", "own.key": "colwise", "own.value": "colwise", "output.dense": "rowwise"},
    ),
    "three in one": (
        lambda: Within(attn=Within(c_attn=Conv1D(8, 24), c_proj=Conv1D(8, 8))),
        {"attn.c_attn": "colwise", "attn.c_proj": "rowwise"},
    ),
    "a gate in one": (
        lambda: Within(net=nn.ModuleList([Within(proj=nn.Linear(8, 64)), nn.Dropout(), nn.Linear(32, 8)])),
        {"net.0.proj": "colwise", "net.2": "rowwise"},
    ),
    "a list of layers": (
        lambda: Within(lins=nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 4)])),
        {"lins.0": "colwise", "lins.1": "rowwise"},
    ),
    "layers with adapters": (
        lambda: Within(up=_lora(8, 16), down=_lora(16, 8)),
        {"up.base_layer": "colwise", "down.base_layer": "rowwise"},
    ),
    "fewer keys than ranks": (
        lambda: _with_heads(q_proj=nn.Linear(8, 8), k_proj=nn.Linear(8, 2), v_proj=nn.Linear(8, 2), o_proj=nn.Linear(8, 8)),
        {"q_proj": "colwise", "o_proj": "rowwise"},
    ),
    "experts": (lambda: Within(experts=Experts()), {"experts": "experts_by_features"}),
    "a vocabulary alone": (lambda: Within(tokens=nn.Embedding(9, 4), head=nn.Linear(4, 9)), VOCAB),
    "an embedding that only has the shape": (
        lambda: Within(queries=nn.Embedding(9, 4), head=nn.Linear(4, 9), up=nn.Linear(4, 8), down=nn.Linear(8, 4)),
        {"up": "colwise", "down": "rowwise"},
    ),
    "layers that share a bias": (lambda: _with_one_bias(up=nn.Linear(4, 4), down=nn.Linear(4, 4), head=nn.Linear(4, 2)), None),
    "layers of two blocks": (
        lambda: Within(blocks=nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)]), out=nn.Linear(4, 6)), None,
    ),
    "no layers that fit": (lambda: Within(layer=nn.Linear(6, 4), tokens=nn.Embedding(9, 4)), None),
}  # fmt: skip


def _with_heads(**layers):
    made = Within(**layers)
    made.num_heads, made.num_key_value_heads = 4, 1
    return made


def _with_one_bias(**layers):
    layers["up"].bias = layers["down"].bias
    return Within(**layers)


@pytest.mark.parametrize("case", FOUND)
def test_layers_that_others_wrote_are_found(case):
    make, wanted = FOUND[case]

    if wanted is None:
        with pytest.raises(ConfigError, match="plan is 'auto', and Within has no linear layers that can be cut"):
            plan_of(make(), None, 2)
    else:
        assert plan_of(make(), None, 2)[0] == wanted


class Planned(Net):
    def parallel_plan(self):
        return {"net.0": "colwise", "net.2": "rowwise"}


def test_a_module_states_its_plan_and_the_option_comes_first():
    assert plan_of(Planned(), None, 2)[0] == PLAIN
    assert plan_of(Planned(), {"net.2": "colwise", "net.4": "rowwise"}, 2)[0] == {
        "net.2": "colwise",
        "net.4": "rowwise",
    }


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.atention.q": "colwise"}, r"names 'layers\.\*\.atention\.q', and GPT has no such layer.*did you mean 'layers\.\*\.attention\.q'"),
        ({"head": "vocabulary"}, r"plan\['head'\] is 'vocabulary'; expected colwise.*did you mean 'vocab'"),
        ({"head": 3}, r"plan\['head'\] is 3; expected colwise"),
        ({"*.up": "colwise", "layers.0.*": "rowwise"}, r"names the layer 'layers\.0\.up' twice: by '\*\.up' and by"),
        ({}, r"strategy.parallel.plan is \{\}; expected names of layers"),
        ("colwise", r"strategy.parallel.plan is 'colwise'; expected names of layers"),
    ],
)  # fmt: skip
def test_a_plan_with_a_mistake_is_refused(plan, said):
    with pytest.raises(ConfigError, match=said):
        plan_of(GPT(), plan, 2)


class Renormed(GPT):
    def __init__(self):
        super().__init__(tied=False)
        self.tokens.max_norm = 1.0


class Normed(GPT):
    """A layer whose weight is computed from others, in the current way of torch or the one before."""

    current = True

    def __init__(self):
        super().__init__(tied=False)
        norm = nn.utils.parametrizations.weight_norm if self.current else nn.utils.weight_norm
        norm(self.layers[0].up)


class NormedBefore(Normed):
    current = False


class Hooked(GPT):
    def __init__(self):
        super().__init__()
        self.layers[0].up.weight.register_hook(lambda gradient: gradient * 2)


class ThreeInputs(sg.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 9), nn.Linear(9, 4)

    def training_step(self, batch, batch_idx):
        return self.down(self.up(batch)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --- Dropout -----------------------------------------------------------------------------------------------------


def _dropout(rank, world_size, plan, checkpointing):
    torch.manual_seed(rank)  # ranks that differ before
    trainer = _trainer(world_size, plan, activation_checkpointing={type(GPT().layers[0])} if checkpointing else None)
    module = GPT(dropout=0.3)
    masks = {"inner": [], "residual": []}
    for name in masks:
        layer = module.layers[0].get_submodule(name)

        def keep(module, args, output, name=name):
            part = output.to_local() if isinstance(output, Slice) else output
            masks[name].append((part.detach() == 0).clone())

        layer.register_forward_hook(keep)
    trainer.fit(module, share(trainer, texts(6, 4)))
    whole = weights_of(trainer)
    own = {name: p.detach().clone() for name, p in module.named_parameters() if not isinstance(p, DTensor)}
    return masks, own, whole


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_parallel_context.py::test_ranks_draw_different_dropout_and_hold_equal_weights",
)
@pytest.mark.every_push("layers")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["layers", "sequence"])
def test_dropout_differs_between_parts_and_agrees_between_replicas(plan):
    chosen = LAYERS | VOCAB | (NORMS if plan == "sequence" else {})

    (masks, own, whole), (other_masks, other_own, _) = run_in_processes(_dropout, 2, chosen, False)

    assert all(not torch.equal(a, b) for a, b in zip(masks["inner"], other_masks["inner"], strict=True))
    replicated = [torch.equal(a, b) for a, b in zip(masks["residual"], other_masks["residual"], strict=True)]
    assert replicated == [plan == "layers"] * len(replicated)
    assert own
    assert all(torch.equal(own[name], other_own[name]) for name in own)
    dropped = torch.cat([mask.flatten() for mask in masks["inner"]]).float().mean()
    assert 0.25 < dropped < 0.35
    (_, _, recomputed), _ = run_in_processes(_dropout, 2, chosen, True)
    assert relative_difference(recomputed, whole) < 1e-6


# --- Other ways to cut -------------------------------------------------------------------------------------------


class CutsLayers(Net):
    """Builds its layers in `configure_model` and cuts them with torch's functions."""

    made, parallel_plan = False, None

    def configure_model(self):
        if not self.made:
            mesh = self.device_mesh["tensor"]
            parallelize_module(self.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            self.made = True


class Derived(Net):
    parallel_plan = None


class CutTwice(CutsLayers):
    def parallel_plan(self):
        return PLAIN


def _own_cut(rank, world_size, make, plan, batches):
    trainer = _trainer(world_size, plan)
    trainer.fit(make(), share(trainer, batches))
    return weights_of(trainer)


@pytest.mark.every_push("option", "derived")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "plan"),
    [(CutsLayers, None), (Net, {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}), (Planned, None), (Derived, "auto")],
    ids=["cuts itself", "option", "method", "derived"],
)  # fmt: skip
def test_every_source_of_a_plan_trains_as_one_process(make, plan):
    batches = joined_batches(6, 8)
    plain, _ = train_module_plainly(Net(), batches)

    for weights in run_in_processes(_own_cut, 2, make, plan, batches):
        assert relative_difference(weights, plain) < 1e-6


def test_a_mesh_is_refused_where_the_strategy_has_none():
    trainer = sg.Trainer(accelerator="cpu", devices=1, **QUIET)

    with pytest.raises(
        ConfigError, match="CutsLayers.device_mesh was read under strategy 'single_device', which has no"
    ):
        trainer.fit(CutsLayers(), joined_batches(1, 4))


class TiedByHand(GPT):
    def forward(self, ids):
        return nn.functional.linear(self.norm(self.tokens(ids)), self.tokens.weight)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).sum()


# --- Optimizers --------------------------------------------------------------------------------------------------


class Together(Net):
    """With an optimizer that updates many parameters in one call."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, **self.options)


def _stepped(rank, world_size, plan, batches):
    found = []
    for options in ({}, {"foreach": True}, {"fused": True}):
        trainer = _trainer(world_size, plan)
        module = Together(**options)
        trainer.fit(module, share(trainer, batches))
        groups = trainer.optimizers[0].param_groups
        own = [id(parameter) for parameter in module.parameters()]
        found.append((weights_of(trainer), [[id(each) for each in group["params"]] for group in groups] == [own]))
    return found


@pytest.mark.slow
def test_optimizers_that_update_many_parameters_in_one_call_step_what_is_cut_and_what_is_not():
    batches = joined_batches(6, 8)
    plan = {"net.2": "colwise"}

    for (reference, _), *others in run_in_processes(_stepped, 2, plan, batches):
        for weights, whole_group in others:
            assert whole_group
            assert relative_difference(weights, reference) < 1e-6


# --- Code of a model's own ---------------------------------------------------------------------------------------


class Standardized(nn.Linear):
    """A linear layer with a forward of the program's own: other weights, and more than a product."""

    def forward(self, x):
        weight = (self.weight - self.weight.mean(1, keepdim=True)) / self.weight.abs().max()
        return nn.functional.linear(x, weight, self.bias).relu()


class Offset(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids + 2) * self.embedding_dim**0.5


class OwnForwards(sg.Module):
    """Keeps a buffer of an activation that is cut, and has layers that compute what no style knows."""

    def __init__(self):
        super().__init__()
        self.places = Offset(18, 8, padding_idx=2)
        self.up, self.down, self.out = Standardized(16, 64), Standardized(64, 32), nn.Linear(32, 4)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        x = self.up(x + self.places(torch.arange(16)).sum(1) / 30)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.down(x * self.scale.to(x) + self.mean)
        return self.out(self.layer(x[:, None])[:, 0])

    def training_step(self, batch, batch_idx):
        return loss_of(self(batch[0]), batch[1].expand(-1, 4))

    def validation_step(self, batch, batch_idx):
        self.log("val", loss_of(self(batch[0]), batch[1].expand(-1, 4)), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


OWN_PLAN = {
    "places": "vocab",
    "up": "colwise",
    "down": "rowwise",
    "layer.linear1": "colwise",
    "layer.linear2": "rowwise",
}


def _own_forwards(rank, world_size, strategy, folder, batches):
    torch.manual_seed(0)
    module = OwnForwards()
    trainer = sg.Trainer(
        max_epochs=1, strategy=strategy, devices=world_size, accelerator="cpu", default_root_dir=folder, logger=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, share(trainer, batches), share(trainer, batches[:1]))
    return weights_of(trainer) | {"mean": module.mean}, float(trainer.callback_metrics["val"])


@pytest.mark.slow
def test_layers_with_forwards_of_their_own_and_buffers_are_right_and_saved(tmp_path):
    batches = joined_batches(6, 8)
    ((plain, expected),) = run_in_processes(_own_forwards, 1, "auto", str(tmp_path / "1"), batches)
    strategy = {"name": "parallel", "tensor": 2, "plan": OWN_PLAN}

    for weights, loss in run_in_processes(_own_forwards, 2, strategy, str(tmp_path / "2"), batches, limit_s=120):
        assert relative_difference(weights, plain) < 1e-5
        assert loss == pytest.approx(expected, rel=1e-5)


# --- What layers share -------------------------------------------------------------------------------------------


class AddsInPlace(Net):
    """Changes in place what two frozen layers take, and keeps weak references to it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 8), nn.Linear(8, 32)
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)
        self.taken = []

    def forward(self, x):
        x = self.net[0](x)
        for _ in range(2):
            x += 0.5 * self.down(self.up(x).sin())
        self.taken.append(weakref.ref(x))
        return self.net[1:](x)

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=self.lr, momentum=0.9)


def _added_in_place(rank, world_size, strategy, batches):
    torch.manual_seed(3)
    module = AddsInPlace()
    trainer = sg.Trainer(strategy=strategy, devices=world_size, accelerator="cpu", **QUIET)
    trainer.fit(module, share(trainer, batches))
    return weights_of(trainer), len(module.taken), still_there(module.taken)


@pytest.mark.slow
def test_an_activation_that_changes_in_place_is_shared_again_and_none_outlives_its_step():
    batches = joined_batches(6, 8)
    ((plain, *_),) = run_in_processes(_added_in_place, 1, "auto", batches)
    strategy = {"name": "parallel", "tensor": 2, "plan": {"up": "colwise", "down": "rowwise", "net.2": "colwise"}}

    for weights, taken, remain in run_in_processes(_added_in_place, 2, strategy, batches):
        assert relative_difference(weights, plain) < 1e-6
        assert (taken, remain) == (6, 0)


class Unlike(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.tokens = nn.Linear(6, 4), nn.Embedding(9, 4)

    def training_step(self, batch, batch_idx):
        return self.layer.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class WritesRows(GPT):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.tokens.weight[:2].zero_()
        return super().training_step(batch, batch_idx)


REFUSED = [
    (WritesRows, VOCAB, "training_step wrote into a part of a sharded weight, which would be lost; expected"),
    (TiedByHand, VOCAB, "'tokens.weight', which is cut over strategy.parallel.tensor, was used outside of its layer's"),
    (GPT, {"norm": "colwise"}, "gives norm the style 'colwise', and it is a LayerNorm; expected a Linear or an Embedding"),
    (GPT, {"tokens": "vocab"}, "cuts tokens.weight, and head.weight is the same parameter, which it does not cut"),
    (GPT, {"tokens": "vocab", "head": "rowwise"}, "is the same parameter, which it cuts otherwise"),
    (ThreeInputs, {"up": "colwise"}, "gives up the style 'colwise', which cuts 9 outputs over strategy.parallel.tensor=2"),
    (ThreeInputs, {"down": "rowwise"}, "which cuts 9 inputs over strategy.parallel.tensor=2; expected a multiple of 2"),
    (Renormed, {"tokens": "vocab"}, "cuts tokens, an Embedding with max_norm=1.0"),
    (Normed, LAYERS, "gives layers.0.up the style 'colwise', and its weight is computed from other parameters"),
    (NormedBefore, LAYERS, "gives layers.0.up the style 'colwise', and its weight is computed from other parameters"),
    (Hooked, LAYERS, "layers.0.up.weight, which strategy.parallel.tensor cuts, has a hook on its gradient"),
    (CutTwice, None, "CutTwice.parallel_plan() names net.0, of which weight is cut already"),
    (Unlike, None, "and Unlike has no linear layers that can be cut together over 2 ranks"),
]  # fmt: skip


def _refused(rank, world_size, cases):
    found = []
    for make, plan in cases:
        trainer = _trainer(world_size, plan)
        found.append(outcome(lambda trainer=trainer, make=make: trainer.fit(make(), texts(1, 2))))
    return found


@pytest.mark.slow
def test_all_ranks_refuse_a_plan_with_the_same_sentence():
    results = run_in_processes(_refused, 2, [case[:2] for case in REFUSED])

    assert results[0] == results[1]
    for found, (_, _, said) in zip(results[0], REFUSED, strict=True):
        assert found.startswith("refused: ")
        assert said in found


# --- Models without values ---------------------------------------------------------------------------------------


class Late(GPT):
    """Built in configure_model: without values where parameters are cut."""

    def __init__(self, own_cut=False):
        sg.Module.__init__(self)
        self.own_cut, self.tokens, self.parts = own_cut, None, None

    def configure_model(self):
        if self.tokens is not None:
            return
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.was_empty = self.up.weight.is_meta
        if self.own_cut:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, self.device_mesh["tensor"], plan)

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def _late(rank, world_size, strategy, plan, own_cut):
    torch.manual_seed(21)
    largest = [0]
    from stratagem_deferred_init import Materializer

    def fill(self, part, fill=Materializer.fill):
        fill(self, part)
        module = part
        if isinstance(module, Late):
            return
        whole = [p for p in trainer.module.parameters() if not p.is_meta and not isinstance(p, DTensor)]
        largest[0] = max(largest[0], sum(p.numel() for p in whole))

    trainer = _trainer(world_size, plan) if world_size > 1 else sg.Trainer(accelerator="cpu", devices=1, **QUIET)
    module = Late(own_cut)
    Materializer.fill = fill
    if world_size == 1:
        with trainer.init_module(empty_init=True):
            module.configure_model()
    trainer.fit(module, share(trainer, texts(4, 4)))
    return weights_of(trainer), module.was_empty, largest[0]


@pytest.mark.slow
@pytest.mark.parametrize("own_cut", [False, True])
def test_a_model_without_values_is_filled_and_cut_layer_by_layer(own_cut):
    plan = None if own_cut else {"up": "colwise", "down": "rowwise"} | VOCAB
    reference, _, _ = run_in_processes(_late, 1, "single_device", None, False)[0]

    for weights, was_empty, largest in run_in_processes(_late, 2, None, plan, own_cut):
        assert was_empty
        assert relative_difference(weights, reference) < 1e-6
        assert largest <= 64 * 32 + 64  # one whole layer at a time


# --- Evaluation and state ----------------------------------------------------------------------------------------


def _predicted(rank, world_size, plan, folder):
    trainer = _trainer(world_size, plan, default_root_dir=folder)
    module = GPT()
    untouched = copy.deepcopy(module)
    batches = texts(2, 4)
    before = trainer.predict(module, share(trainer, batches))
    trainer.fit(module, share(trainer, batches))
    trainer.save_checkpoint(f"{folder}/whole.ckpt")
    after = trainer.predict(module, share(trainer, batches))
    with torch.no_grad():
        expected = [untouched.eval()(ids) for ids, _ in batches]
    again = _trainer(world_size, plan)
    again.fit(GPT(), share(again, batches), ckpt_path=f"{folder}/whole.ckpt")
    return [type(each) for each in before], before, expected, after, weights_of(again), weights_of(trainer)


@pytest.mark.slow
def test_predictions_are_whole_and_checkpoints_load_into_one_process(tmp_path):
    results = run_in_processes(_predicted, 2, LAYERS | VOCAB | NORMS, str(tmp_path))

    for types, before, expected, after, again, own in results:
        assert types == [torch.Tensor] * 2
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(before, expected, strict=True))
        assert relative_difference(again, own) == 0
        single = GPT()
        trainer = sg.Trainer(accelerator="cpu", devices=1, **QUIET)
        alone = trainer.predict(single, texts(2, 4), ckpt_path=str(tmp_path / "whole.ckpt"))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(alone, after, strict=True))
        assert after[0].shape[-1] == VOCABULARY


# --- Labels ------------------------------------------------------------------------------------------------------


def test_a_label_out_of_range_fails_on_a_gpu_too_and_the_host_does_not_wait(monkeypatch):
    """On tensors without values: asking for one is an error."""
    asserted, check = [], torch._assert_async
    monkeypatch.setattr(torch, "_assert_async", lambda *arguments: asserted.append(arguments) or check(*arguments))
    with FakeTensorMode():
        target = torch.empty(3, dtype=torch.long, device="cuda")
        _check_in_range(target, target > 1)
    with pytest.raises(IndexError, match="Target 9 is out of bounds"):
        _check_in_range(torch.tensor([1, 9]), torch.tensor([False, True]))

    ((holds, message),) = asserted
    assert holds.device.type == "cuda"
    assert "a target is out of bounds" in message
