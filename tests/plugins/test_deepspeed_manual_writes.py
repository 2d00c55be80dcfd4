"""Writes of user code to weights and gradients under DeepSpeed are copied to the masters, or refused."""

from __future__ import annotations

import copy

import pytest
import torch

import stratagem as sg
from stratagem.strategies import DeepSpeedStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(6, 24)
LIMIT = 0.12
STAGES = (1, 2, 3)


def gathering():
    """Stage 3, at which even small parameters are gathered."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return DeepSpeedStrategy(config={"zero_optimization": zero, "zero_allow_untested_optimizer": True})


def of_stage(stage):
    return DeepSpeedStrategy(stage=stage)


def train(world_size, make_strategy, callback, make=Net, **arguments):
    trainer = sg.Trainer(strategy=make_strategy(), devices=world_size, callbacks=[callback], **QUIET | arguments)
    try:
        trainer.fit(make(), share(trainer, BATCHES))
        return weights_of(trainer)
    finally:
        trainer.close()


class Writes(sg.Callback):
    """Calls a function with the module after each batch."""

    def __init__(self, write):
        self.write = write

    @sg.hookimpl
    def on_train_batch_end(self, trainer, module):
        if trainer.global_step > 0:
            self.write(module, trainer.global_rank)


@torch.no_grad()
def clamp(module, rank=0):
    for parameter in module.parameters():
        parameter.clamp_(-LIMIT, LIMIT)


@torch.no_grad()
def load(module, rank=0):
    module.load_state_dict({name: value.clamp(-LIMIT, LIMIT) for name, value in module.state_dict().items()})


@torch.no_grad()
def clamp_gathered(module, rank):
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        if rank == 0:
            for parameter in module.parameters():
                parameter.data.clamp_(-LIMIT, LIMIT)


def plainly():
    module = Net()
    optimizer = module.configure_optimizers()
    norms = []
    for x, y in BATCHES:
        loss_of(module(x), y).backward()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
        clamp(module)
    assert max(norms) > 1
    return module.state_dict()


def _written(rank, world_size, write, make_strategy):
    return train(world_size, make_strategy, Writes(write))


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_writing_the_same_values_changes_no_master",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "make_strategy"),
    [
        (clamp, lambda: of_stage(1)), (load, lambda: of_stage(2)), (clamp, lambda: of_stage(3)),
        (clamp_gathered, gathering), (clamp, lambda: DeepSpeedStrategy(stage=2, offload_optimizer=True)),
    ],
)  # fmt: skip
def test_weights_written_by_hand_are_stepped_from(write, make_strategy):
    for weights in run_in_processes(_written, 2, write, make_strategy):
        assert relative_difference(weights, plainly()) < 1e-6


def _in_16_bits(rank, world_size, write):
    """Weights that are written are rounded; those that are not keep their masters."""
    return [train(world_size, lambda: of_stage(2), Writes(each), precision="bf16-mixed") for each in (write, _nothing)]


def _nothing(module, rank):
    pass


@torch.no_grad()
def touch(module, rank):
    for parameter in module.parameters():
        parameter.mul_(1.0)


@pytest.mark.slow
def test_writing_the_same_values_changes_no_master():
    for written, left in run_in_processes(_in_16_bits, 2, touch):
        assert relative_difference(written, left) == 0


def _refused(rank, world_size, write, make_strategy, make=Net):
    return outcome(lambda: train(world_size, make_strategy, Writes(write), make))


def write_data(module, rank):
    for parameter in module.parameters():
        parameter.data.clamp_(-LIMIT, LIMIT)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_writing_the_same_values_changes_no_master",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "make_strategy", "sentence"),
    [
        (write_data, lambda: of_stage(2), "'net.0.weight' was written to through .data between steps"),
        (write_data, lambda: of_stage(3), "'net.0.weight' was written to through .data between steps"),
        (clamp, gathering, "write inside deepspeed.zero.GatheredParameters"),
    ],
)
def test_what_is_written_where_it_would_be_lost_is_refused(write, make_strategy, sentence):
    for said in run_in_processes(_refused, 2, write, make_strategy):
        assert said.startswith("refused: "), said
        assert sentence in said


class Clips(sg.Callback):
    """Changes gradients where it finds them, as many programs do."""

    @sg.hookimpl
    def on_before_optimizer_step(self, module):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)


class ClipsItself(Net):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class Measures(sg.Callback):
    """Asks for the norm as callbacks are meant to, and counts parameters."""

    @sg.hookimpl
    def on_before_optimizer_step(self, module, optimizer, run):
        self.seen = float(run.clip_gradients(optimizer, max_norm=1e9)), sum(1 for _ in module.parameters())


class OfGroups(sg.Callback):
    """Changes gradients of what the optimizer's groups hold: partitions, whose gradients are elsewhere."""

    @sg.hookimpl
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_value_([each for group in optimizer.param_groups for each in group["params"]], 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_changed_through_the_groups_of_the_optimizer_are_refused(stage):
    said = outcome(lambda: train(1, lambda: of_stage(stage), OfGroups(), Net))
    assert said.startswith("refused: "), said
    assert "something reads or changes .grad of what optimizer.param_groups holds, and at stage" in said


def _clipped(rank, world_size, stage, callback, make=Net):
    return outcome(lambda: train(world_size, lambda: of_stage(stage), callback(), make))


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_writing_the_same_values_changes_no_master",
)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("callback", "make"), [(Clips, Net), (lambda: Writes(_nothing), ClipsItself)])
def test_gradients_changed_at_parameters_are_refused(stage, callback, make):
    for said in run_in_processes(_clipped, 2, stage, callback, make):
        assert said.startswith("refused: "), said
        assert "something reads or changes .grad of 'net." in said
        assert f"at stage {stage}" in said


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_writing_the_same_values_changes_no_master",
)
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_norm_may_be_asked_for(stage):
    for said in run_in_processes(_clipped, 2, stage, Measures):
        assert said == "nothing"


def shapes(parameters):
    return [
        (
            p.numel(), list(p.shape), p.dim(), p.size(0), len(p), p.dtype, p.requires_grad, p.nbytes, p.element_size(),
            p.stride(), p.is_contiguous(), p.get_device(),
        )
        for p in parameters
    ]  # fmt: skip


COMPUTATIONS = (
    lambda parameters: parameters[0].norm(),
    lambda parameters: parameters[0].data.norm(),
    lambda parameters: parameters[0].detach().abs().max(),
    lambda parameters: torch.norm(input=parameters[0]),
    lambda parameters: torch.ones(8, 16).lerp_(parameters[0], 0.1),
    torch.nn.utils.parameters_to_vector,
    torch._foreach_norm,
)


class Asks(sg.Callback):
    """Asks parameters for their shapes, computes with them, and computes with them gathered."""

    @sg.hookimpl
    def on_train_batch_end(self, module):
        import deepspeed

        parameters = list(module.parameters())
        self.refused = [outcome(lambda: compute(parameters)) for compute in COMPUTATIONS]  # noqa: B023 - called here
        self.shapes = shapes(parameters)
        module.state_dict()
        with deepspeed.zero.GatheredParameters(parameters):
            self.norms = [float(parameter.norm()) for parameter in parameters]


class Teacher(Net):
    """Its steps write into weights and read those of all layers: an average, clamped weights, a penalty, other weights."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def write(self, x):
        for kept, trained in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            kept.lerp_(trained, 0.3)
            trained.data.clamp_(-LIMIT, LIMIT)
        self.teacher.load_state_dict({name: 1.1 * value for name, value in self.teacher.state_dict().items()})

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.write(x)
        doubled = {name: 2 * weight for name, weight in self.net.named_parameters()}
        other = torch.func.functional_call(self.net, doubled, (x,))
        penalty = sum(parameter.square().sum() for parameter in self.net.parameters())
        return loss_of(self.net(x), y) + 0.1 * loss_of(other, self.teacher(x)) + 0.01 * penalty


class OfItsBatch(Teacher):
    @torch.no_grad()
    def write(self, x):
        for kept in self.teacher.parameters():
            kept.add_(x.mean())


class OnOneRank(Teacher):
    def write(self, x):
        if self.global_rank == 0:
            super().write(x)


@torch.no_grad()
def average(module, rank):
    for kept, trained in zip(module.teacher.parameters(), module.net.parameters(), strict=True):
        kept.lerp_(trained, 0.3)


def _taught():
    module = Teacher()
    optimizer = module.configure_optimizers()
    for batch in BATCHES:
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def _read_and_written(rank, world_size):
    asks = Asks()
    train(world_size, gathering, asks)
    stepped = [train(world_size, each, Writes(_nothing), Teacher) for each in (gathering, lambda: of_stage(3))]
    said = [_refused(rank, world_size, _nothing, gathering, each) for each in (OfItsBatch, OnOneRank)]
    said.append(_refused(rank, world_size, average, gathering, Teacher))
    return (asks.refused, asks.shapes, asks.norms), stepped, said


@pytest.fixture(scope="module")
def read_and_written(deepspeed_preloaded):
    return run_in_processes(_read_and_written, 2)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_gradients_set_in_a_loop_of_ones_own_are_refused",
)
@pytest.mark.slow
def test_a_step_reads_and_writes_what_it_lists_of_partitioned_parameters(read_and_written):
    for _, stepped, said in read_and_written:
        for weights in stepped:
            assert relative_difference(weights, _taught()) < 1e-5
        of_its_batch, on_one_rank, in_a_hook = said
        assert of_its_batch.startswith("refused: training_step wrote into 'teacher.0.bias', 'teacher.0.weight'")
        assert on_one_rank.startswith("refused: ranks went through different layers: rank 0 reached a parameter of")
        assert in_a_hook.startswith(
            "refused: 'teacher.0.weight' was written to between steps, while it was partitioned"
        )


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/plugins/test_deepspeed_manual_writes.py::test_gradients_set_in_a_loop_of_ones_own_are_refused",
)
@pytest.mark.slow
def test_a_hook_reads_the_shape_of_a_partitioned_parameter_and_not_its_values(read_and_written):
    for (refused, found, norms), *_ in read_and_written:
        assert len(refused) == len(COMPUTATIONS)
        for said in refused:
            assert said.startswith("refused: a hook computes with a parameter of shape [")
            assert "deepspeed.zero.GatheredParameters" in said
        assert found == shapes(Net().parameters())
        assert min(norms) > 0


def _own_loop(rank, world_size, stage):
    run = sg.Run(strategy=of_stage(stage), devices=world_size, accelerator="cpu")
    module = Net()
    model, optimizer = run.setup(module, module.configure_optimizers())
    x, y = BATCHES[0]
    run.backward(loss_of(model(x), y))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    said = outcome(lambda: run.optimizer_step(optimizer))
    run.close()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.when_changed("plugins/deepspeed/")), 3])
def test_gradients_set_in_a_loop_of_ones_own_are_refused(stage):
    for said in run_in_processes(_own_loop, 2, stage):
        assert said.startswith("refused: something reads or changes .grad of 'net.0.weight'"), said
