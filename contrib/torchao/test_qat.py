"""Callback `int8_qat`: the converted module computes what was trained, under every strategy and precision."""

import copy

import pytest
import torch
from stratagem_torchao import Int8QAT, restore
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import CallbackConformance, run_in_processes
from stratagem_testing.reference import Net, data, joined_batches, relative_difference
from stratagem_testing.training import QUIET, train

CPU = {"accelerator": "cpu"}


class TestInt8QAT(CallbackConformance):
    plugin = "int8_qat"
    changes_training = True


def fit(callback, **arguments):
    trainer = sg.Trainer(**(QUIET | CPU | {"devices": 1, "callbacks": [callback]} | arguments))
    module = Net()
    trainer.fit(module, joined_batches(8, 24))
    return trainer, module.eval()


@pytest.mark.parametrize("group_size", [None, 8])
@pytest.mark.parametrize("activations", [True, False])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_converted_module_computes_what_the_rounded_one_did(bits, activations, group_size):
    callback = Int8QAT(weight_bits=bits, activations=activations, group_size=group_size)
    _, module = fit(callback)
    x = data(16, seed=4)[0]
    with torch.no_grad():
        rounded = module(x)
        plain = restore(copy.deepcopy(module))(x)
        converted = callback.convert(module)(x)

    assert torch.equal(converted, rounded)
    assert (plain - rounded).norm() / rounded.norm() > 1e-4
    assert type(module.net[0].weight).__name__ == "IntxUnpackedToInt8Tensor"


def _train(rank, size, strategy, arguments):
    chosen = QUIET | CPU | {"devices": size, "strategy": strategy, "callbacks": ["int8_qat"]} | arguments
    return train(rank, size, Net, joined_batches(6, 24), chosen)["weights"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}])
def test_two_processes_train_as_one_does(strategy, arguments):
    alone = _train(0, 1, "single_device", arguments)
    first, second = run_in_processes(_train, 2, strategy, arguments)

    assert relative_difference(first, second) == 0
    assert relative_difference(first, alone) < 1e-3  # a value that differs in its last bit may round to another integer


def test_a_checkpoint_has_plain_parameters_and_can_be_converted_in_a_new_module(tmp_path):
    callback = Int8QAT(skip=["net.4"])
    trainer, module = fit(callback)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    new = Net(seed=3).eval()
    new.load_state_dict(state)
    x = data(16, seed=4)[0]
    with torch.no_grad():
        rounded = module(x)
        converted = callback.convert(new)(x)

    assert list(state) == list(Net().state_dict())
    assert torch.equal(converted, rounded)
    assert type(new.net[4].weight) is nn.Parameter


def test_with_another_precision():
    _, module = fit(Int8QAT(), precision="bf16-mixed")
    _, plain = fit(Int8QAT())

    assert 1e-6 < relative_difference(module.state_dict(), plain.state_dict()) < 0.02


@pytest.mark.parametrize("precision", ["fp8", {"name": "fp8", "filter_fqns": ["net.4"]}])
def test_with_fp8_it_is_refused(precision):
    with pytest.raises(ConfigError, match="'int8_qat' cannot be used with precision 'fp8': both replace layers"):
        fit(Int8QAT(), precision=precision)


def test_two_of_them_are_refused():
    with pytest.raises(ConfigError, match="'int8_qat' cannot be used with callback 'int8_qat': both replace layers"):
        fit(None, callbacks=[Int8QAT(modules=["net.0"]), Int8QAT(modules=["net.2"], weight_bits=4)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modules": ["net.7"]}, "callbacks.int8_qat.modules has 'net.7', which matches no linear layer"),
        ({"group_size": 12}, "group_size is 12, and net.0 has 16 inputs; expected a divisor"),
        ({"group_size": 0}, "group_size is 0"),
        ({"weight_bits": 3}, "weight_bits"),
        ({"weight_bit": 8}, "did you mean 'weight_bits'"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError) as refused:
        fit({"name": "int8_qat"} | options)

    assert words in str(refused.value)


def test_preparing_changes_no_random_numbers():
    module, state = Net(), torch.get_rng_state()
    Int8QAT().prepare_module(module, None)

    assert torch.equal(torch.get_rng_state(), state)


def _convert_shards(rank, size):
    trainer = sg.Trainer(**(QUIET | CPU | {"devices": size, "strategy": "fsdp", "callbacks": ["int8_qat"]}))
    module = Net()
    trainer.fit(module, joined_batches(2, 24))
    with pytest.raises(ConfigError, match="is sharded over processes"):
        Int8QAT().convert(module)


def test_sharded_weights_are_not_converted():
    run_in_processes(_convert_shards, 2)


def test_a_later_run_rounds_what_it_chooses_with_its_own_bits():
    module, batches = Net(), joined_batches(1, 8)
    for options in ({}, {"weight_bits": 4, "skip": ["net.0"]}):
        callback = Int8QAT(**options)
        sg.Trainer(**(QUIET | CPU | {"devices": 1, "callbacks": [callback]})).fit(module, batches)

    assert type(module.net[0]) is nn.Linear
    assert module.net[2].weight_fake_quantizer.config.dtype is torch.int4


def test_a_later_run_without_it_is_refused_unless_the_layers_are_plain():
    _, module = fit(Int8QAT())
    with pytest.raises(ConfigError, match="callback 'int8_qat' replaced layers of this Net in an earlier run"):
        sg.Trainer(**(QUIET | CPU | {"devices": 1})).fit(module, joined_batches(1, 8))

    sg.Trainer(**(QUIET | CPU | {"devices": 1})).fit(restore(module), joined_batches(1, 8))


def test_a_converted_module_is_not_converted_or_trained_again():
    callback = Int8QAT(skip=["net.4"])
    trainer, module = fit(callback)
    callback.convert(module)
    told = "'int8_qat' found that net.0 of this Net is converted to integers; expected layers whose weights"

    with pytest.raises(ConfigError, match=told):
        callback.convert(module)
    with pytest.raises(ConfigError, match=told):
        trainer.fit(module, joined_batches(1, 8))
    sg.Trainer(**(QUIET | CPU | {"devices": 1})).predict(module, joined_batches(1, 8))
