"""XLA on the CPU, in one device and in two: parity with plain PyTorch, state, programs per step, refusals."""

from __future__ import annotations

import os

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")

import sys

import pytest
import torch
import torch_xla  # once, before processes are forked
import torch_xla.debug.metrics as met
from stratagem_xla.accelerator import XLAAccelerator, tpu
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import AcceleratorConformance, StrategyConformance, run_in_processes
from stratagem_testing.reference import (
    Batch,
    Dropped,
    Net,
    joined_batches,
    net,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import QUIET

#: Each strategy with all devices that it uses.
STRATEGIES = [("single_xla", 1), ("xla", 2), ("xla_fsdp", 2)]
#: Seconds for one process: programs are compiled.
LIMIT_S = 240


# --- References in processes of their own: after a backward, a process can use no device of XLA ------------------


def apart(function):
    """Return `function`, called in a process of its own; the first argument or the result has the weights."""

    def call(*arguments, **options):
        [result] = run_in_processes(lambda rank, size: function(*arguments, **options), 1)
        if isinstance(arguments[0], nn.Module):
            arguments[0].load_state_dict(result[0])
        return result

    return call


@pytest.fixture(autouse=True)
def references_apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ("train_module_plainly", "train_branching_plainly", "train_lbfgs_plainly", "train_gan_plainly")
    for module in [each for name, each in sys.modules.items() if name.startswith("stratagem_testing.")]:
        for name in names:
            if hasattr(module, name) and module.__name__ != "stratagem_testing.reference":
                monkeypatch.setattr(module, name, apart(getattr(module, name)))


# --- The kit -----------------------------------------------------------------------------------------------------


def _single_device_on_cpu(argument):
    is_it = isinstance(argument, dict) and argument.get("strategy") == "single_device"
    return argument | {"accelerator": "cpu"} if is_it else argument


class XLAConformance(StrategyConformance):
    """The checks of a strategy, in one process."""

    accelerator = "xla"
    world_sizes = (1,)
    limit_s = LIMIT_S
    unplannable = "cannot register a type of device from Python"  # torch 2.9

    test_random_numbers_are_left_alone = None  # XLA draws random numbers with an algorithm of its own

    def run_in(self, function, world_size, *arguments):
        """Let `single_device` train on the CPU, which XLA's accelerator does not let it."""
        return super().run_in(function, world_size, *map(_single_device_on_cpu, arguments))


class TestSingleXLA(XLAConformance):
    plugin = "single_xla"

    def choose(self, **arguments):
        return super().choose(**({"devices": 1} | arguments))


class TestXLA(XLAConformance):
    plugin = "xla"

    def choose(self, **arguments):
        return super().choose(**(arguments | {"devices": 2}))


class TestXLAFSDP(TestXLA):
    plugin = "xla_fsdp"


class TestAccelerator(AcceleratorConformance):
    plugin = "xla"
    limit_s = LIMIT_S
    tolerance = 1e-6


# --- Parity ------------------------------------------------------------------------------------------------------

VARIANTS = [{"accumulate_grad_batches": count, "gradient_clip_val": clip} for count in (1, 3) for clip in (None, 0.5)]


def trainer_for(strategy, devices, **arguments):
    return sg.Trainer(**(QUIET | {"accelerator": "tpu", "strategy": strategy, "devices": devices} | arguments))


def weights(module):
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def in_a_process(function, *arguments):
    [result] = run_in_processes(lambda rank, size: function(*arguments), 1, limit_s=LIMIT_S)
    return result


def _fit(strategy, devices, batches, make=Net, **arguments):
    module = make()
    trainer_for(strategy, devices, **arguments).fit(module, batches)
    return weights(module)


def _fit_variants(strategy, devices, batches):
    return [_fit(strategy, devices, batches, **variant) for variant in VARIANTS]


@apart
def _references(batches):
    trained = [
        train_module_plainly(Net(), batches, each["accumulate_grad_batches"], each["gradient_clip_val"])
        for each in VARIANTS
    ]
    assert min(min(norms) for _, norms in trained) > 0.5
    assert max(max(norms) for _, norms in trained) > 1
    return [found for found, _ in trained]


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_weights_equal_those_of_plain_pytorch(strategy, devices):
    batches = joined_batches(8, 24)
    found = in_a_process(_fit_variants, strategy, devices, batches)

    differences = [relative_difference(*pair) for pair in zip(found, _references(batches), strict=True)]
    print(strategy, differences)
    assert max(differences) < 1e-6
    assert relative_difference(found[0], found[1]) > 1e-3, "clipping had no effect"


@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp"])
def test_a_batch_that_the_devices_do_not_divide(strategy):
    [(x, y)] = joined_batches(1, 31)
    batches = [(x[:12], y[:12]), (x[12:23], y[12:23]), (x[23:], y[23:])]

    reference, _ = apart(train_module_plainly)(Net(), batches)
    assert relative_difference(in_a_process(_fit, strategy, 2, batches), reference) < 1e-6


def test_the_second_device_alone():
    batches = joined_batches(3, 24)
    found, device = in_a_process(_fit_and_tell_device, [1], batches)

    assert device == "xla:1"
    assert relative_difference(found, apart(train_module_plainly)(Net(), batches)[0]) < 1e-6


def _fit_and_tell_device(devices, batches):
    module = Net()
    trainer_for("single_xla", devices).fit(module, batches)
    return weights(module), str(next(module.parameters()).device)


class Shared(Net):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, net(3)[2])
        self.net.insert(2, net(3)[2])
        self.net[3].weight = self.net[2].weight


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_shared_parameters_stay_shared(strategy, devices):
    batches = joined_batches(4, 24)
    found = in_a_process(_fit, strategy, devices, batches, Shared)

    assert torch.equal(found["net.2.weight"], found["net.3.weight"])
    assert relative_difference(found, apart(train_module_plainly)(Shared(), batches)[0]) < 1e-6


# --- What is cut -------------------------------------------------------------------------------------------------


def specification(tensor):
    """Return how XLA cuts `tensor`, such as ``{devices=[2,1]0,1}``; nothing for one that it does not cut."""
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


class Cut(Net):
    """Records how batches, parameters and momenta are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int):
        self.seen.append(specification(batch[0]))
        return super().training_step(batch, batch_idx)


def _how_it_is_cut(strategy, path):
    module = Cut()
    trainer = trainer_for(strategy, 2)
    trainer.fit(module, joined_batches(3, 24))
    trainer.save_checkpoint(path)
    found = [_specifications(module, trainer)]
    again = Cut()
    resumed = trainer_for(strategy, 2, max_epochs=2)
    resumed.fit(again, joined_batches(3, 24), ckpt_path=path)
    return [*found, _specifications(again, resumed)]


def _specifications(module, trainer):
    weight = module.net[2].weight
    momentum = trainer.optimizers[0].state[weight]["momentum_buffer"]
    return set(module.seen), specification(weight), specification(momentum)


def test_xla_cuts_batches(tmp_path):
    for batches, weight, momentum in in_a_process(_how_it_is_cut, "xla", tmp_path / "x.ckpt"):
        assert batches == {"{devices=[2,1]0,1}"}
        assert {weight, momentum} <= {"", "{replicated}"}


def test_xla_fsdp_cuts_batches_parameters_and_optimizer_state(tmp_path):
    for batches, weight, momentum in in_a_process(_how_it_is_cut, "xla_fsdp", tmp_path / "x.ckpt"):
        assert batches == {"{devices=[2,1]0,1}"}
        assert weight == "{devices=[2,1]0,1}"
        assert momentum == "{devices=[2,1]0,1}"


class Block(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = Block(self.net[2])


def _fit_units(batches):
    from stratagem_xla.strategies import XLAFSDPStrategy

    module = Blocks()
    trainer = trainer_for(XLAFSDPStrategy(auto_wrap_policy={Block}), 2)
    trainer.fit(module, batches)
    during = len(module.net[2]._forward_hooks), len(module.net[2]._backward_hooks)
    trainer.close()
    after = len(module.net[2]._forward_hooks), len(module.net[2]._backward_hooks)
    return weights(module), during, after


def test_units_of_fsdp_keep_the_names_of_the_module():
    batches = joined_batches(4, 24)
    found, during, after = in_a_process(_fit_units, batches)

    assert during == (1, 1)
    assert after == (0, 0)
    assert relative_difference(found, apart(train_module_plainly)(Blocks(), batches)[0]) < 1e-6


# --- Programs ----------------------------------------------------------------------------------------------------


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CountPrograms(sg.Callback):
    """Records after each batch how many programs were compiled and run, and how many tensors were read back."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, ...]] = []

    @sg.hookimpl
    def on_train_batch_end(self):
        torch_xla._XLAC._xla_wait_device_ops([])
        names = ("CompileTime", "TransferFromDeviceTime")
        self.counts.append(tuple((met.metric_data(name) or [0])[0] for name in names))


def _count_programs(strategy, devices, accumulate):
    counter = CountPrograms()
    trainer = trainer_for(strategy, devices, accumulate_grad_batches=accumulate, callbacks=[counter])
    trainer.fit(Adam(), joined_batches(12, 24))
    return counter.counts


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_no_batch_compiles_or_reads_back_after_the_first_steps(strategy, devices, accumulate):
    """A number in a graph that changes with each step, as of a schedule, or a metric that is read, would show."""
    counts = in_a_process(_count_programs, strategy, devices, accumulate)

    assert counts[-1][0] >= 1, "nothing was compiled"
    assert counts[2 * accumulate] == counts[-1], counts


# --- State -------------------------------------------------------------------------------------------------------


def _fit_part(strategy, devices, batches, into, start=None, accelerator="tpu", make=Net, seed=3):
    torch.manual_seed(seed)
    module, epochs = make(), 1 if start is None else 2
    trainer = trainer_for(strategy, devices, accelerator=accelerator, max_epochs=epochs)
    trainer.fit(module, batches, ckpt_path=start)
    trainer.save_checkpoint(into)
    return weights(module)


def _fit_part_in_ddp(rank, size, batches, into, start):
    shares = [tuple(tensor.chunk(size)[rank] for tensor in batch) for batch in batches]
    torch.manual_seed(3)
    module = Net()
    trainer = trainer_for("ddp", size, accelerator="cpu", max_epochs=1 if start is None else 2,
                          use_distributed_sampler=False)  # fmt: skip
    trainer.fit(module, shares, ckpt_path=start)
    trainer.save_checkpoint(into)
    return weights(module)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_checkpoints_move_to_ddp_and_back(strategy, devices, tmp_path):
    batches = joined_batches(4, 24)
    reference, _ = apart(train_module_plainly)(Net(), batches * 2)

    in_a_process(_fit_part, strategy, devices, batches, tmp_path / "xla.ckpt")
    on_ddp = run_in_processes(_fit_part_in_ddp, 2, batches, tmp_path / "moved.ckpt", tmp_path / "xla.ckpt")
    assert relative_difference(on_ddp[0], reference) < 1e-6

    run_in_processes(_fit_part_in_ddp, 2, batches, tmp_path / "ddp.ckpt", None)
    back = in_a_process(_fit_part, strategy, devices, batches, tmp_path / "back.ckpt", tmp_path / "ddp.ckpt")
    assert relative_difference(back, reference) < 1e-6

    saved = torch.load(tmp_path / "xla.ckpt", weights_only=True)
    assert {tensor.device.type for tensor in saved["state_dict"].values()} == {"cpu"}
    assert set(saved["optimizers"][0]["state"]) == set(Net().state_dict())


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_random_numbers_go_on_from_a_checkpoint(strategy, devices, tmp_path):
    batches = joined_batches(3, 24)
    whole = in_a_process(_fit_whole, strategy, devices, batches, 3)
    other = in_a_process(_fit_whole, strategy, devices, batches, 4)
    in_a_process(_fit_part, strategy, devices, batches, tmp_path / "half.ckpt", None, "tpu", Dropped, 3)
    both = in_a_process(
        _fit_part, strategy, devices, batches, tmp_path / "end.ckpt", tmp_path / "half.ckpt", "tpu", Dropped, 5
    )

    assert relative_difference(both, whole) < 1e-6
    assert relative_difference(other, whole) > 1e-4, "another seed draws the same numbers"


def _fit_whole(strategy, devices, batches, seed):
    torch.manual_seed(seed)
    return _fit(strategy, devices, batches, Dropped, max_epochs=2)


# --- Choices and refusals ----------------------------------------------------------------------------------------


def strategy_of(**arguments):
    return sg.Run(**arguments).stack.strategies[0].name


def test_the_accelerator_chooses_the_strategy():
    assert strategy_of(accelerator="tpu", devices=1) == "single_xla"
    assert strategy_of(accelerator="tpu", devices=[1]) == "single_xla"
    assert strategy_of(accelerator="tpu", devices=2) == "xla"
    assert strategy_of(accelerator="xla") == "xla"


def test_auto_takes_a_cpu_without_xla():
    assert sg.Run().stack.accelerator.name != "xla"
    assert XLAAccelerator().precedence < 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"accelerator": "tpu", "devices": 3}, "devices is 3 and there are 2; expected at most 2"),
        ({"accelerator": "tpu", "devices": 2, "strategy": "ddp"}, "'tpu' needs 'xla-steps', which strategy 'ddp' does"),
        ({"accelerator": "tpu", "devices": 2, "strategy": "single_xla"}, 'choose strategy="xla" for several devices'),
        ({"accelerator": "tpu", "precision": "16-mixed"}, "'tpu' cannot be used with precision '16-mixed'"),
        ({"accelerator": "tpu", "num_nodes": 2}, "needs 'multi-process', which strategy 'xla' does not provide"),
        ({"accelerator": "cpu", "strategy": "xla"}, 'set accelerator="tpu"'),
        (
            {"accelerator": "tpu", "strategy": {"name": "xla_fsdp", "auto_wrap": {nn.Linear}}},
            "did you mean 'auto_wrap_policy'",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(arguments, words):
    with pytest.raises(ConfigError) as caught:
        sg.Run(**arguments)
    assert words in str(caught.value)


@pytest.mark.parametrize("setting", [None, "TPU", "NEURON"])
def test_a_machine_without_a_tpu_is_refused(setting, monkeypatch):
    if setting is None:
        monkeypatch.delenv("PJRT_DEVICE")
    else:
        monkeypatch.setenv("PJRT_DEVICE", setting)
    with pytest.raises(ConfigError) as caught:
        sg.Trainer(accelerator="tpu", devices=8)

    shown = "is not set" if setting is None else f"is {setting!r}"
    assert str(caught.value) == (
        f"accelerator is 'tpu', this machine has no TPU, and PJRT_DEVICE {shown}; expected a TPU, or PJRT_DEVICE=CPU "
        'to run XLA on the CPU; use accelerator="auto" for another device.'
    )
    assert XLAAccelerator().count() == 0


def test_a_wrong_number_of_devices_of_the_cpu(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "two")
    with pytest.raises(ConfigError, match="CPU_NUM_DEVICES is 'two'"):
        tpu()


def outcome(function, *arguments):
    def call():
        try:
            function(*arguments)
        except ConfigError as error:
            return str(error)
        return "trained"

    return in_a_process(call)


def test_a_part_of_the_devices_is_refused_by_strategies_that_use_all():
    said = outcome(_fit, "xla", [1], joined_batches(2, 24))
    assert "devices selects 1 of 2, and a program of strategy 'xla' runs on all of them" in said


def test_a_backward_before_the_first_use_of_a_device_is_refused():
    assert "this process called backward before it used a device of XLA" in outcome(_fit_after_a_backward)


def _fit_after_a_backward():
    torch.ones(2, requires_grad=True).sum().backward()
    _fit("single_xla", 1, joined_batches(2, 24))


def test_several_devices_after_one_are_refused():
    assert "this process used one device of XLA before it trains on several" in outcome(_fit_on_one_then_all)


def _fit_on_one_then_all():
    _fit("single_xla", 1, joined_batches(2, 24))
    _fit("xla", 2, joined_batches(2, 24))


def test_a_policy_that_matches_nothing_is_refused():
    said = outcome(_fit, {"name": "xla_fsdp", "auto_wrap_policy": {nn.Conv2d}}, 2, joined_batches(2, 24))
    assert "strategy.xla_fsdp.auto_wrap_policy is {Conv2d}, and the module has no such part" in said
