"""Precision `fp8`: linear layers in 8 bits under every strategy, and checkpoints of plain parameters."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from stratagem_torchao import restore
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import PrecisionConformance, run_in_processes
from stratagem_testing.reference import Net, Tied, data, joined_batches, part, relative_difference
from stratagem_testing.training import QUIET, train, weights_of

CPU = {"accelerator": "cpu"}
EMULATED = {"name": "fp8", "emulate": True}
#: No scale depends on how a batch is divided over processes.
SPLITTABLE = EMULATED | {"recipe_name": "rowwise_with_gw_hp"}
SENT = EMULATED | {"enable_fsdp_float8_all_gather": True}
PRECOMPUTED = SENT | {"precompute_float8_dynamic_scale_for_fsdp": True}


class TestFloat8(PrecisionConformance):
    plugin: ClassVar = EMULATED
    tolerance = 0.03  # rounds to 3 bits of mantissa


class TestFloat8InBF16(PrecisionConformance):
    plugin: ClassVar = EMULATED | {"weights_dtype": "bfloat16", "recipe_name": "rowwise"}
    world_sizes = (1,)


def prepared(module, **options):
    """Return `module` after a run with `options` has prepared it."""
    run = sg.Run(**CPU, devices=1, precision=EMULATED | options)
    run.setup(module)
    return module


def is_float8(layer):
    from torchao.float8.float8_linear import Float8Linear

    return isinstance(layer, Float8Linear)


# --- Strategies ------------------------------------------------------------------------------------------------------


def _trained(rank, size, strategy, precision, batches, arguments):
    chosen = QUIET | CPU | {"devices": size, "strategy": strategy, "precision": precision} | arguments
    return train(rank, size, Net, batches, chosen)["weights"]


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}])
def test_two_processes_train_as_one_does(arguments):
    batches = joined_batches(6, 32)
    alone = _trained(0, 1, "single_device", SPLITTABLE, batches, arguments)
    plain = _trained(0, 1, "single_device", "32-true", batches, arguments)
    ddp = run_in_processes(_trained, 2, "ddp", SPLITTABLE, batches, arguments)
    fsdp = run_in_processes(_trained, 2, "fsdp", SPLITTABLE, batches, arguments)

    assert relative_difference(ddp[0], ddp[1]) == 0
    assert relative_difference(fsdp[0], ddp[0]) < 1e-5
    assert relative_difference(ddp[0], alone) < 2e-3  # sums in bf16, in another order
    assert relative_difference(plain, alone) > 5e-4  # it is in fp8; clipping makes steps small


@pytest.mark.parametrize("absorbs", ["fsdp", "fsdp with mixed_precision"])
def test_a_strategy_with_its_own_mixed_precision_does_not_drop_fp8(absorbs):
    strategy = "fsdp"
    if absorbs != "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        strategy = {"name": "fsdp", "mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    batches = joined_batches(6, 32)
    got, _ = run_in_processes(_trained, 2, strategy, SPLITTABLE, batches, {})
    bf16, _ = run_in_processes(_trained, 2, strategy, "bf16-mixed", batches, {})
    alone = _trained(0, 1, "single_device", SPLITTABLE, batches, {})

    assert relative_difference(got, bf16) > 2e-3
    assert relative_difference(got, alone) < 1e-2


# --- FSDP sends float8 -----------------------------------------------------------------------------------------------


class Recorded(Net):
    """Keeps its losses, and the traffic of a fit."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def on_train_end(self):
        counts = self.trainer.run.collectives.traffic.counts
        self.sent = {sender or name: (count.calls, count.payload) for (name, sender), count in counts.items()}


def _recorded(rank, size, precisions, batches):
    """Return losses, weights, the traffic and how many scales were computed in gathers, for each of `precisions`."""
    from torchao.float8 import fsdp_utils

    found, compute, computed = [], fsdp_utils.hp_tensor_to_float8_dynamic, []
    fsdp_utils.hp_tensor_to_float8_dynamic = lambda *given, **options: computed.append(1) or compute(*given, **options)
    for precision in precisions:
        computed.clear()
        trainer = sg.Trainer(**QUIET, **CPU, devices=size, strategy="fsdp", precision=precision)
        module, mine = Recorded(), part(batches, rank, size)
        trainer.fit(module, mine, mine)
        losses = [*module.losses, float(trainer.callback_metrics["val_loss"])]
        found.append((torch.tensor(losses), weights_of(trainer), module.sent, len(computed)))
    return found


def _trained_with_torchao(batches, size):
    """Train in one process as `size` ranks do, with torch and torchao alone; return rank 0's losses, and the weights.

    Activations of each rank's part of a batch have scales of their own, as they have there.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    module, losses = Net(), []
    config = Float8LinearConfig(emulate=True)
    convert_to_float8_training(module.net, config=config, module_filter_fn=lambda _, name: name != "4")
    for layer in module.net:
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    optimizer = module.configure_optimizers()
    for batch in batches:
        for rank in range(size):
            (x, y), *_ = part([batch], rank, size)
            with torch.autocast("cpu", torch.bfloat16):
                loss = Net.criterion(module.net(x), y)
            (loss / size).backward()
            losses += [float(loss)] if rank == 0 else []
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(losses), module.state_dict()


STEPS = 6


@pytest.fixture(scope="module")
def recorded():
    """What `_recorded` returns with weights sent as they are, as float8, and as float8 with precomputed scales."""
    return run_in_processes(_recorded, 2, [EMULATED, SENT, PRECOMPUTED], joined_batches(STEPS, 32))[0]


def test_weights_sent_as_float8_train_as_others_do(recorded):
    whole, sent, precomputed = recorded
    losses, weights = _trained_with_torchao(joined_batches(STEPS, 32), 2)

    for each in (sent, precomputed):
        assert torch.equal(each[0], whole[0])
        assert relative_difference(each[1], whole[1]) == 0
    assert torch.allclose(sent[0][:-1], losses, rtol=2e-3)
    assert relative_difference(sent[1], weights) < 2e-3


def test_float8_is_a_quarter_of_the_bytes_and_scales_are_computed_once_in_a_step(recorded):
    whole, sent, precomputed = recorded
    in_float8 = 16 * 32 + 32 * 32
    gathers, _ = whole[2]["parameters"]

    assert whole[2]["parameters"][1] - sent[2]["parameters"][1] == gathers * in_float8 // 2 * 3
    assert sent[2]["gradients"] == whole[2]["gradients"]
    # Before the first step each gather computes them: one in the sanity check, one in training.
    assert [each[3] for each in (whole, sent, precomputed)] == [0, 2 * gathers, 2 * 2]
    assert precomputed[2]["all_reduce"][0] - whole[2]["all_reduce"][0] == STEPS


class Uneven(nn.Module):
    """Ranks of three have different numbers of rows, a unit is all in fp8, and a weight is an embedding's, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 16, bias=False)
        self.inner = nn.Sequential(nn.Linear(32, 32, bias=False))
        self.embed = nn.Embedding(16, 32)
        self.embed.weight = self.head.weight

    def forward(self, numbers):
        return self.head(self.inner(self.embed(numbers)))


def _trained_uneven(rank, size, precisions):
    found = []
    for precision in precisions:
        torch.manual_seed(0)
        module = Uneven()
        strategy = {"name": "fsdp", "auto_wrap_policy": {nn.Sequential}}
        run = sg.Run(**CPU, devices=size, strategy=strategy, precision=precision)
        model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(3):
            loss = model(torch.arange(16).roll(rank)).float().square().mean()
            run.backward(loss)
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
            if step == 1:
                with torch.no_grad():
                    module.inner[0].weight.mul_(100)  # what was precomputed is too large now
        found.append((float(loss), {name: p.full_tensor() for name, p in module.named_parameters()}))
    return found


def test_uneven_shards_tied_weights_and_weights_that_were_written_to():
    whole, precomputed = run_in_processes(_trained_uneven, 3, [EMULATED, PRECOMPUTED])[0]

    assert precomputed[0] == whole[0]
    assert relative_difference(precomputed[1], whole[1]) == 0


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def _fit(rank, size, strategy, precision, path, resume=None, epochs=1):
    trainer = sg.Trainer(
        **(QUIET | {"max_epochs": epochs}), **CPU, devices=size, strategy=strategy, precision=precision
    )
    module = Net()
    trainer.fit(module, joined_batches(4, 32), ckpt_path=resume)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", EMULATED), ("fsdp", EMULATED), ("fsdp", PRECOMPUTED)])
def test_a_checkpoint_has_plain_parameters_and_moves_to_other_precisions_and_back(tmp_path, strategy, precision):
    first, second, third = (tmp_path / f"{name}.ckpt" for name in "abc")
    run_in_processes(_fit, 2, strategy, precision, first)
    _fit(0, 1, "single_device", "32-true", second, first, 2)
    run_in_processes(_fit, 2, strategy, precision, third, second, 3)
    states = [torch.load(path, weights_only=True) for path in (first, second, third)]

    for state in states:
        assert list(state["state_dict"]) == list(Net().state_dict())
        assert {type(each) for each in state["state_dict"].values()} == {torch.Tensor}
        assert {each.dtype for each in state["state_dict"].values()} == {torch.float32}
    assert [state["global_step"] for state in states if "global_step" in state] in ([], [4, 8, 12])


# --- Layers ----------------------------------------------------------------------------------------------------------


def test_layers_that_do_not_fit_are_named_once(capsys):
    trainer = sg.Trainer(**QUIET, **CPU, devices=1, precision=EMULATED)
    module, batches = Net(), joined_batches(2, 16)
    trainer.fit(module, batches, batches)
    trainer.validate(module, batches)

    first, *others = capsys.readouterr().out.splitlines()
    assert first == (
        "precision 'fp8' computes 2 of 3 linear layers in fp8; in bf16: net.4 (32 x 1), not multiples of 16"
    )
    assert "fp8" not in "".join(others)


@pytest.mark.parametrize(
    ("options", "fp8"),
    [
        ({}, [True, True, False]),
        ({"modules": ["net.0"]}, [True, False, False]),
        ({"modules": ["net"], "filter_fqns": ["net.[2-4]"]}, [True, False, False]),
        ({"filter_fqns": ["t.0"]}, [False, True, False]),
    ],
)
def test_patterns_choose_layers(options, fp8):
    module = prepared(Net(), **options)

    assert [is_float8(layer) for layer in module.net[::2]] == fp8


def test_layers_that_torchao_takes_for_too_small_stay_in_bf16():
    module = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1040), nn.Linear(1040, 1040))
    prepared(module, filter_fqns=["2", "auto_filter_small_kn"])

    assert [is_float8(layer) for layer in module] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules": ["nets"]}, "precision.fp8.modules has 'nets', which matches no linear layer; expected one of "),
        ({"modules": ["nets"]}, "net.0, net.2, net.4; did you mean 'net'."),
        ({"filter_fqns": ["net.1"]}, "precision.fp8.filter_fqns has 'net.1', which matches no linear layer"),
        ({"filter_fqns": ["auto_filter_small_kn"]}, "of 16, and large enough for 'auto_filter_small_kn'; change"),
        (
            {"filter_fqns": ["auto_filter_small_kn"], "recipe_name": "rowwise_with_gw_hp"},
            "precision.fp8.filter_fqns has 'auto_filter_small_kn', and recipe_name is 'rowwise_with_gw_hp'",
        ),
        ({"modules": ["net.4"]}, "Net has net.4 (32 x 1), not multiples of 16; expected a linear layer whose sizes"),
        ({"recipe_name": "tensorwide"}, "'tensorwise'"),
        ({"recipe_names": "rowwise"}, "did you mean 'recipe_name'"),
        (SENT | {"recipe_name": "rowwise"}, "enable_fsdp_float8_all_gather is True, and recipe_name is 'rowwise'"),
        (PRECOMPUTED | {"enable_fsdp_float8_all_gather": False}, "and enable_fsdp_float8_all_gather is False"),
        (SENT, 'and FSDP gathers no weight in fp8; expected strategy="fsdp", without cpu_offload; drop it.'),
        (
            {"emulate": False, "recipe_name": "rowwise"},
            "the device is cpu; expected a GPU that multiplies fp8 matrices of recipe 'rowwise' (compute capability 9",
        ),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError) as refused:
        prepared(Net(), **options)

    assert words in str(refused.value)


def test_a_layer_stays_the_same_object_with_its_hooks_and_ties():
    module = Tied()
    kept, called = module.net[0], []
    kept.register_forward_hook(lambda *_: called.append(1))
    parameters = list(module.parameters())
    prepared(module)
    module(data(16)[0])

    assert module.net[0] is kept
    assert is_float8(kept)
    assert called == [1]
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert is_float8(module.net[2][0])
    assert module.net[2] is module.net[4]


def test_a_subclass_of_linear_keeps_its_forward():
    class Own(nn.Linear):
        def forward(self, x):
            return torch.zeros(len(x), self.out_features)

    module = prepared(nn.Sequential(nn.Linear(16, 16), Own(16, 16), nn.MultiheadAttention(16, 2)))

    assert [is_float8(part) for part in (module[0], module[1], module[2].out_proj)] == [True, False, False]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_products_are_those_of_the_device(recipe):
    from stratagem_torchao.float8_linear import converted

    x = data(24)[0]  # a GPU needs a multiple of 16 rows, and gets it by padding
    found = []
    for emulate in (True, False):
        module = Net()
        for name in ("0", "2"):
            module.net.set_submodule(name, converted(module.net.get_submodule(name), recipe, emulate=emulate))
        module(x).sum().backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    plain = Net()
    plain(x).sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}

    assert relative_difference(found[0], found[1]) < 0.03  # rows are multiplied into bf16
    assert 0.001 < relative_difference(found[0], expected) < 0.15


def test_another_run_may_have_other_options():
    module = prepared(Net())
    x = data(16)[0]
    first = module(x)
    other = prepared(module, recipe_name="rowwise", filter_fqns=["net.0"])

    assert [is_float8(layer) for layer in other.net[::2]] == [False, True, False]
    assert not torch.equal(other(x), first)


def test_restore_makes_layers_plain_again():
    module, x = Net(), data(16)[0]
    expected, attributes = module(x), [set(layer.__dict__) for layer in module.net]
    prepared(module)
    rounded = module(x)
    restore(module)

    assert not torch.equal(rounded, expected)
    assert torch.equal(module(x), expected)
    assert [set(layer.__dict__) for layer in module.net] == attributes


def test_a_prepared_module_can_be_copied_and_pickled():
    module, x = prepared(Net()), data(16)[0]

    assert torch.equal(copy.deepcopy(module)(x), module(x))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


def test_preparing_changes_no_random_numbers():
    module = Net()
    state = torch.get_rng_state()
    prepared(module)

    assert torch.equal(torch.get_rng_state(), state)
