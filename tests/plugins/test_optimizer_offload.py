"""The optimizer's state is kept elsewhere and comes part by part, and training is that without it, to the bit.

On a CPU the callback is refused; here its mover copies between two places in the memory of the host.
"""

from __future__ import annotations

import pytest
import torch

import stratagem as sg
from stratagem.callbacks import OptimizerOffload
from stratagem.errors import ConfigError
from stratagem_callbacks.optimizer_offload import StateMover
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    ByHand,
    Lbfgs,
    Net,
    Tied,
    joined_batches,
    relative_difference,
    train_module_plainly,
    train_plainly,
)
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 16)
#: MiB of the largest layer of `Net`: two parts for one group of parameters.
PART = 32 * 32 * 4 / 2**20


class OnCpu(OptimizerOffload):
    """Moves the state to another place of the CPU."""

    def _mover_for(self, run):
        return StateMover(torch.device("cpu"))


class Adam(Net):
    """Two groups."""

    def configure_optimizers(self):
        groups = [{"params": self.net[:2].parameters(), "lr": 0.03}, {"params": self.net[2:].parameters()}]
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


class Watches(sg.Callback):
    """Notes where the state is when the step begins and after it."""

    def __init__(self):
        self.places, self.norms = [], []

    @sg.hookimpl
    def on_before_optimizer_step(self, optimizer):
        self.norms.append(_norm(optimizer))

    @sg.hookimpl
    def on_before_zero_grad(self, optimizer):
        assert self.norms[-1] == _norm(optimizer) > 0  # gradients are there until they are zeroed
        self.places.append({each["exp_avg"].data_ptr() for each in optimizer.state.values() if "exp_avg" in each})


def _norm(optimizer):
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def fit(module, *callbacks, offloads=True, ckpt_path=None, **options):
    added = [OnCpu(part_mb=PART)] if offloads else []
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1, "callbacks": [*added, *callbacks]} | options))
    trainer.fit(module, share(trainer, BATCHES) if trainer.world_size > 1 else BATCHES, ckpt_path=ckpt_path)
    return trainer


def assert_same_bits(weights, others):
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize("make", [Adam, Net, Tied])
def test_steps_are_those_of_a_plain_loop_to_the_bit(make):
    expected, norms = train_module_plainly(make(), BATCHES)
    watches = Watches()
    trainer = fit(make(), watches)

    assert_same_bits(weights_of(trainer), expected)
    assert max(norms) > 1
    assert watches.norms == pytest.approx(norms)
    assert trainer.global_step == len(BATCHES)
    plain = fit(make(), offloads=False).optimizers[0].state_dict()
    state = trainer.optimizers[0].state_dict()
    assert state["param_groups"] == plain["param_groups"]
    torch.testing.assert_close(state["state"], plain["state"], rtol=0, atol=0)
    assert all(place == watches.places[0] for place in watches.places)  # the host keeps its memory


class Noting(torch.optim.AdamW):
    """Notes where the state is while some parameters are stepped."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.places = []

    def step(self, closure=None):
        stepped = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        self.places.append([self.state[each]["exp_avg"].data_ptr() for each in stepped if self.state[each]])
        super().step(closure)


class Noted(Net):
    def configure_optimizers(self):
        return Noting(self.parameters(), lr=0.01)


def test_parts_are_stepped_with_copies_of_their_state():
    watches = Watches()
    trainer = fit(Noted(), watches, offloads=False, callbacks=[OnCpu(part_mb=PART, any_optimizer=True), watches])

    (optimizer,) = trainer.optimizers
    in_steps = optimizer.places[-3:]
    assert [len(places) for places in in_steps] == [3, 3, 0]  # the last one counts the step
    assert not {place for places in in_steps for place in places} & watches.places[-1]


def test_clipping_accumulation_and_a_module_that_steps_are_as_without_it():
    clipped, _ = train_plainly(BATCHES, accumulate=2, max_norm=0.5)
    by_hand = fit(ByHand(), offloads=False)

    assert_same_bits(weights_of(fit(Net(), accumulate_grad_batches=2, gradient_clip_val=0.5)), clipped)
    assert_same_bits(weights_of(fit(ByHand())), weights_of(by_hand))


def test_parts_are_of_one_group_and_leave_out_parameters_without_gradients():
    module = Adam()
    optimizer = module.configure_optimizers()
    module.net(BATCHES[0][0]).sum().backward()
    module.net[2].bias.grad = None
    callback = OnCpu(part_mb=PART)
    callback._mover = StateMover(torch.device("cpu"))
    callback._step_parts(optimizer)

    assert set(optimizer.state) == {each for each in module.parameters() if each is not module.net[2].bias}


@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_resumes_with_and_without_it(first, tmp_path):
    whole = fit(Adam(), offloads=False, max_epochs=2)
    fit(Adam(), offloads=first).save_checkpoint(tmp_path / "begun.ckpt")
    resumed = fit(Adam(), offloads=not first, max_epochs=2, ckpt_path=tmp_path / "begun.ckpt")

    assert_same_bits(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize(("make", "options", "found"), [
    (Net, {"callbacks": ["optimizer_offload"]}, "optimizer_offload was chosen on cpu; expected a GPU of CUDA"),
    (Lbfgs, {}, "LBFGS evaluates the model itself"),
    (Net, {"precision": "16-mixed"}, "which provides 'loss-scaling'"),
    (Net, {"callbacks": ["optimizer_in_backward", OnCpu()]}, "which provides 'steps-in-backward'"),
])  # fmt: skip
def test_what_cannot_be_offloaded_is_refused(make, options, found):
    with pytest.raises(ConfigError, match=found):
        fit(make(), **options)


@pytest.mark.slow
@pytest.mark.when_changed(
    "plugins/callbacks/",
    cases=(
        "ddp",
        "ddp_sharded",
    ),
)
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "fsdp"])
def test_each_process_offloads_what_its_optimizer_holds(strategy, tmp_path):
    results = run_in_processes(_resumed, 2, strategy, str(tmp_path / "begun.ckpt"))
    expected, norms = train_module_plainly(Adam(), BATCHES)

    assert max(norms) > 1
    for whole, resumed, begun in results:
        assert_same_bits(resumed, whole)
        assert relative_difference(begun, expected) < 1e-5


def _resumed(rank, world_size, strategy, path):
    options = {"strategy": strategy, "devices": world_size}
    whole = fit(Adam(), offloads=False, max_epochs=3, **options)
    begun = fit(Adam(), **options)
    begun.save_checkpoint(path)
    fit(Adam(), offloads=False, max_epochs=2, ckpt_path=path, **options).save_checkpoint(path)
    resumed = fit(Adam(), max_epochs=3, ckpt_path=path, **options)
    return weights_of(whole), weights_of(resumed), weights_of(begun)
