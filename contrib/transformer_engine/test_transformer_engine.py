"""`transformer-engine`: refused without CUDA, its options, and which layers are replaced, by a stand-in."""

import contextlib
import sys
import types

import pytest
import torch
from stratagem_transformer_engine import TransformerEnginePrecision, float16
from torch import nn

import stratagem as sg
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.conformance import Conformance
from stratagem_testing.reference import Net, Tied, joined_batches
from stratagem_testing.training import QUIET

NAMES = ("transformer-engine", "transformer-engine-float16")
CPU = torch.device("cpu")


# --- Without CUDA ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu_it_is_refused_in_one_sentence_that_names_fp8(name):
    trainer = sg.Trainer(**QUIET, accelerator="cpu", devices=1, precision=name)

    with pytest.raises(ConfigError) as refused:
        trainer.fit(Net(), joined_batches(2, 8))

    assert str(refused.value) == (
        "precision is 'transformer-engine', and the device is cpu; expected a CUDA GPU with fp8 matrix products "
        '(compute capability 8.9 or higher); use precision="bf16-mixed", or {"name": "fp8", "emulate": True} '
        "(pip install stratagem-torchao), which runs without CUDA."
    )


def _refusal(rank, world_size, strategy):
    with (
        pytest.raises(ConfigError) as refused,
        sg.Run(accelerator="cpu", strategy=strategy, devices=world_size, precision="transformer-engine") as run,
    ):
        run.setup(Net())
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_ranks_refuse_in_the_same_words(strategy):
    first, second = run_in_processes(_refusal, 2, strategy)

    assert first == second
    assert "the device is cpu" in first


def test_the_engine_is_not_imported_to_choose_it():
    for name in NAMES:
        sg.Run(accelerator="cpu", precision=name)

    assert "transformer_engine" not in sys.modules


def test_without_the_engine_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(
        ConfigError, match=r'cannot be imported.*transformer_engine\[pytorch\]", or use precision="bf16-mixed"'
    ):
        TransformerEnginePrecision().prepare_module(Net(), None)


class TestWithoutAnEngine(Conformance):
    """The checks of the kit that hold for every kind: they start no step."""

    kind = "precision"
    plugin = "transformer-engine"


# --- Options ---------------------------------------------------------------------------------------------------------


def test_its_names_choose_the_dtype_of_weights():
    assert {name for name in NAMES if registry.find("precision", name)} == set(NAMES)
    assert TransformerEnginePrecision().policy().param_dtype is torch.bfloat16
    assert float16().policy().param_dtype is torch.float16


def test_dtypes_may_be_those_of_torch_or_their_names():
    plugin = TransformerEnginePrecision(weights_dtype=torch.float16, fallback_compute_dtype=torch.bfloat16)

    assert (plugin.weights_dtype, plugin.fallback_compute_dtype) == ("float16", "bfloat16")
    assert plugin.policy().compute_dtype is torch.float16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"weights_dtype": "bfloat61"},
            "precision.transformer-engine.weights_dtype is 'bfloat61'; expected 'bfloat16'",
        ),
        ({"weights_dtype": torch.float32}, "weights_dtype is 'float32'; expected 'bfloat16' or 'float16'"),
        ({"fallback_compute_dtype": "fp8"}, "fallback_compute_dtype is 'fp8'"),
        ({"recipe": "HYBRID"}, "recipe is 'HYBRID'; expected a mapping"),
        ({"replace_layer": True}, "did you mean 'replace_layers'"),
    ],
)
def test_wrong_options_are_refused_before_a_process_starts(options, words):
    with pytest.raises(ConfigError) as refused:
        sg.Run(accelerator="cpu", precision={"name": "transformer-engine"} | options)

    assert words in str(refused.value)


# --- With a stand-in for the engine's layers -------------------------------------------------------------------------


class _Layer(nn.Module):
    """A layer of the engine as far as replacing is concerned: its arguments, and state besides its parameters."""

    def get_extra_state(self):
        return torch.zeros(3)

    def set_extra_state(self, state):
        raise AssertionError("it has none")


class _Linear(_Layer):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        made = {"dtype": params_dtype, "device": device}
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, **made))
        self.bias = nn.Parameter(torch.zeros(out_features, **made)) if bias else None

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class _LayerNorm(_Layer):
    def __init__(self, size, *, eps, params_dtype, device):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(size, dtype=params_dtype, device=device))

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class _DelayedScaling:
    def __init__(self, margin=0, fp8_format=None, amax_history_len=1024):
        self.margin, self.fp8_format, self.amax_history_len = margin, fp8_format, amax_history_len


#: The recipes of contexts that are open.
_open = []


@pytest.fixture
def entered(monkeypatch):
    """Register the stand-in; return the recipes of the contexts that were entered."""
    recipes = []

    @contextlib.contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        recipes.append(fp8_recipe)
        _open.append(fp8_recipe)
        yield
        _open.pop()

    layers = {"Linear": _Linear, "LayerNorm": _LayerNorm, "fp8_autocast": fp8_autocast}
    recipe = {"DelayedScaling": _DelayedScaling, "Format": types.SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")}
    for name, content in {
        "transformer_engine": {},
        "transformer_engine.pytorch": layers,
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": recipe,
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    for each in (_Linear, _LayerNorm):
        monkeypatch.setattr(each, "__module__", "transformer_engine.pytorch")
    monkeypatch.delitem(sys.modules, "stratagem_transformer_engine.layers", raising=False)
    return recipes


class _Run:
    device, manual = CPU, False

    def __init__(self):
        self.printed = []

    def print(self, *words):
        self.printed += words


def _block():
    return nn.ModuleDict(
        {
            "norm": nn.LayerNorm(32, eps=1e-3),
            "scale_only": nn.LayerNorm(32, bias=False),
            "two_dimensions": nn.LayerNorm((4, 8)),
            "feed": nn.Linear(32, 64),
            "without_bias": nn.Linear(64, 32, bias=False),
            "head": nn.Linear(32, 10),
            "attention": nn.MultiheadAttention(32, 2),
        }
    )


def test_layers_that_fit_are_replaced_with_their_parameters_and_the_others_are_named(entered):
    module, run = _block(), _Run()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    TransformerEnginePrecision().prepare_module(module, run)
    kinds = {name: type(part).__mro__[1] for name, part in module.items()}

    assert kinds["feed"] is kinds["without_bias"] is _Linear
    assert kinds["norm"] is _LayerNorm
    assert module["norm"].eps == 1e-3
    assert type(module["attention"].out_proj).__name__ == "NonDynamicallyQuantizableLinear"
    assert dict(module.named_parameters()).keys() == before.keys()
    assert all(torch.equal(p, before[name].bfloat16()) for name, p in module.named_parameters())
    (line,) = run.printed
    assert line == (
        "precision 'transformer-engine' replaced 3 layers; kept: scale_only (has no weight or bias), two_dimensions "
        "(normalizes 2 dimensions), head (32 x 10, not multiples of 16)"
    )


def test_state_has_the_names_of_the_plain_module(entered):
    module, plain = _block(), _block()
    TransformerEnginePrecision().prepare_module(module, _Run())

    assert list(module.state_dict()) == list(plain.state_dict())
    module.load_state_dict(plain.state_dict())


def test_preparing_again_replaces_nothing(entered):
    module, run = _block(), _Run()
    precision = TransformerEnginePrecision()
    precision.prepare_module(module, run)
    feed = module["feed"]
    precision.prepare_module(module, run)

    assert module["feed"] is feed
    assert len(run.printed) == 1


def test_shared_layers_stay_shared_and_tied_parameters_tied(entered):
    module = Tied()
    tied = nn.Linear(32, 32)
    module.extra = nn.ModuleList([tied, nn.Linear(32, 32)])
    module.extra[1].weight = tied.weight
    TransformerEnginePrecision().prepare_module(module, _Run())

    assert module.net[2][0] is module.net[4][0]
    assert module.extra[0].weight is module.extra[1].weight


def test_hooks_of_a_replaced_layer_are_kept(entered):
    module, called = _block(), []
    module["feed"].register_forward_hook(lambda *_: called.append(1))
    TransformerEnginePrecision().prepare_module(module, _Run())
    module["feed"](torch.zeros(2, 32, dtype=torch.bfloat16))

    assert called == [1]


def test_replace_layers_must_agree_with_the_module(entered):
    own = nn.Sequential(_Linear(32, 32, bias=True, params_dtype=torch.float32, device=CPU), nn.Linear(32, 32))
    TransformerEnginePrecision().prepare_module(own, _Run())
    with pytest.raises(ConfigError, match="replace_layers is True, and Sequential has layers of the engine"):
        TransformerEnginePrecision(replace_layers=True).prepare_module(own, _Run())
    with pytest.raises(ConfigError, match="replace_layers is False, and ModuleDict has no layers of the engine"):
        TransformerEnginePrecision(replace_layers=False).prepare_module(_block(), _Run())

    assert type(own[1]) is nn.Linear
    assert own[0].weight.dtype is torch.bfloat16


def test_a_module_without_a_layer_that_fits_is_refused(entered):
    with pytest.raises(ConfigError, match=r"Sequential has 0 \(7 x 9, not multiples of 16\)"):
        TransformerEnginePrecision().prepare_module(nn.Sequential(nn.Linear(7, 9)), _Run())


def test_steps_run_in_fp8_autocast_with_the_recipe(entered):
    precision = TransformerEnginePrecision(recipe={"fp8_format": "HYBRID", "amax_history_len": 16})
    with precision.step_context(_Run()):
        inside = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    assert inside == (torch.bfloat16, True, torch.bfloat16)
    assert (entered[0].fp8_format, entered[0].amax_history_len) == ("hybrid", 16)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("manual", "recomputed", "is_open"), [(False, None, 0), (True, None, 1), (False, "selective", 1)]
)
def test_backward_runs_outside_of_the_context_and_of_autocast(entered, manual, recomputed, is_open):
    """A forward may follow in manual optimization, and does within backward under activation checkpointing."""
    run, precision = _Run(), TransformerEnginePrecision()
    run.manual, run.settings = manual, types.SimpleNamespace(activation_checkpointing=recomputed)
    with precision.step_context(run):
        assert len(_open) == 1
        inside = precision.backward(run)
        next(inside)
        assert len(_open) == is_open
        assert not torch.is_autocast_enabled("cpu")
        inside.close()
    assert _open == []


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"amax_histroy_len": 16}, "did you mean 'amax_history_len'"),
        ({"fp8_format": "HYBIRD"}, "did you mean 'HYBRID'"),
    ],
)
def test_a_wrong_recipe_is_refused(entered, recipe, words):
    with pytest.raises(ConfigError, match=words):
        TransformerEnginePrecision(recipe=recipe).step_context(_Run()).__enter__()
