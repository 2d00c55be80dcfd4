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
from stratagem_testing.reference import Net, Tied, data, joined_batches, relative_difference
from stratagem_testing.training import QUIET, train

CPU = {"accelerator": "cpu"}
#: No scale depends on how a batch is divided over processes.
SPLITTABLE = {"name": "fp8", "recipe": "rowwise_with_gw_hp"}


class TestFloat8(PrecisionConformance):
    plugin = "fp8"
    tolerance = 0.03  # rounds to 3 bits of mantissa


class TestFloat8InBF16(PrecisionConformance):
    plugin: ClassVar = {"name": "fp8", "weights_dtype": "bfloat16", "recipe": "rowwise", "emulate": False}
    world_sizes = (1,)


def prepared(module, **options):
    """Return `module` after a run with `options` has prepared it."""
    run = sg.Run(**CPU, devices=1, precision={"name": "fp8"} | options)
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


def _layers(rank, size, strategy, precision):
    run = sg.Run(**CPU, strategy=strategy, devices=size, precision=precision)
    module = Net()
    model, optimizer = run.setup(module, module.configure_optimizers())
    x, y = data(16)
    with run.step():
        run.backward(Net.criterion(model(x), y))
        run.optimizer_step(optimizer)
    return [is_float8(layer) for layer in module.net[::2]], [p.dtype for p in module.parameters()]


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


# --- Checkpoints -----------------------------------------------------------------------------------------------------


def _fit(rank, size, strategy, precision, path, resume=None, epochs=1):
    trainer = sg.Trainer(
        **(QUIET | {"max_epochs": epochs}), **CPU, devices=size, strategy=strategy, precision=precision
    )
    module = Net()
    trainer.fit(module, joined_batches(4, 32), ckpt_path=resume)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_has_plain_parameters_and_moves_to_other_precisions_and_back(tmp_path, strategy):
    first, second, third = (tmp_path / f"{name}.ckpt" for name in "abc")
    run_in_processes(_fit, 2, strategy, "fp8", first)
    _fit(0, 1, "single_device", "32-true", second, first, 2)
    run_in_processes(_fit, 2, strategy, "fp8", third, second, 3)
    states = [torch.load(path, weights_only=True) for path in (first, second, third)]

    for state in states:
        assert list(state["state_dict"]) == list(Net().state_dict())
        assert {type(each) for each in state["state_dict"].values()} == {torch.Tensor}
        assert {each.dtype for each in state["state_dict"].values()} == {torch.float32}
    assert [state["global_step"] for state in states if "global_step" in state] in ([], [4, 8, 12])


# --- Layers ----------------------------------------------------------------------------------------------------------


def test_layers_that_do_not_fit_are_named_once(capsys):
    trainer = sg.Trainer(**QUIET, **CPU, devices=1, precision="fp8")
    module, batches = Net(), joined_batches(2, 16)
    trainer.fit(module, batches, batches)
    trainer.validate(module, batches)

    first, *others = capsys.readouterr().out.splitlines()
    assert first == (
        "precision 'fp8' computes 2 of 3 linear layers in fp8, emulated on the device cpu; in bf16: net.4 (32 x 1), "
        "not multiples of 16"
    )
    assert "fp8" not in "".join(others)


@pytest.mark.parametrize(
    ("options", "fp8"),
    [
        ({}, [True, True, False]),
        ({"modules": ["net.0"]}, [True, False, False]),
        ({"modules": ["net"], "skip": ["net.[2-4]"]}, [True, False, False]),
        ({"skip": ["*.0"]}, [False, True, False]),
    ],
)
def test_patterns_choose_layers(options, fp8):
    module = prepared(Net(), **options)

    assert [is_float8(layer) for layer in module.net[::2]] == fp8


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules": ["nets"]}, "precision.fp8.modules has 'nets', which matches no linear layer; expected one of "),
        ({"modules": ["nets"]}, "net.0, net.2, net.4; did you mean 'net'."),
        ({"skip": ["net.1"]}, "precision.fp8.skip has 'net.1', which matches no linear layer"),
        ({"modules": ["net.4"]}, "Net has net.4 (32 x 1), not multiples of 16; expected a linear layer whose sizes"),
        ({"recipe": "tensorwide"}, "'tensorwise'"),
        ({"recipes": "rowwise"}, "did you mean 'recipe'"),
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
    x = data(24)[0]  # a GPU needs a multiple of 16 rows, and gets it by padding
    found = []
    for emulate in (True, False):
        module = prepared(Net(), recipe=recipe, emulate=emulate)
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
    other = prepared(module, recipe="rowwise", skip=["net.0"])

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
