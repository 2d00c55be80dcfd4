"""DeepSpeed at every stage trains as one process does, and as DDP does."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_module_plainly
from stratagem_testing.training import outcome, share, weights_of

pytestmark = pytest.mark.usefixtures("deepspeed_preloaded")

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
STAGES = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")
OFFLOADS = ("deepspeed_stage_1_offload", "deepspeed_stage_2_offload", "deepspeed_stage_3_offload")
ACCUMULATE = (1, 3)
MAX_NORM = (None, 0.5)
BATCHES = joined_batches(10, 24)
#: Cases beside the most telling one.
WHERE_IT_CHANGED = pytest.mark.when_changed("plugins/deepspeed/")


class AdamW(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, eps=1e-3)


class CPUAdam(Net):
    """AdamW by DeepSpeed's vectorized implementation."""

    def configure_optimizers(self):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=3e-3, eps=1e-3, weight_decay=1e-2)


def _train(make, world_size, strategy, accumulate, max_norm, **arguments):
    trainer = sg.Trainer(
        strategy=strategy, devices=world_size, accumulate_grad_batches=accumulate, gradient_clip_val=max_norm,
        **QUIET | arguments,
    )  # fmt: skip
    trainer.fit(make(), share(trainer, BATCHES))
    weights, policy = weights_of(trainer), trainer.run.policy
    trainer.run.close()
    return weights, policy


def _compare(rank, world_size, strategies, pairs, limit):
    """Train each of `strategies`; return what missed its limits, and how much was compared."""
    missed, compared = [], 0
    for (make, plain), accumulate, max_norm in itertools.product(pairs, ACCUMULATE, MAX_NORM):
        reference, norms = train_module_plainly(plain(), BATCHES, accumulate, max_norm)
        assert max(norms) > 1
        ddp, _ = _train(plain, world_size, "ddp", accumulate, max_norm)
        for strategy in strategies:
            weights, _ = _train(make, world_size, strategy, accumulate, max_norm)
            for other, expected in (("one process", reference), ("ddp", ddp)):
                distance = relative_difference(weights, expected)
                compared += 1
                if not distance < limit:
                    missed.append(
                        f"{strategy}, {make.__name__}, {accumulate=}, {max_norm=}: {distance:.1e} from {other}"
                    )
    return missed, compared


@pytest.mark.when_changed("plugins/deepspeed/", cases=("deepspeed_stage_3",))
@pytest.mark.every_push("deepspeed_stage_1", "deepspeed_stage_3")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["deepspeed", *STAGES])
def test_every_stage_trains_as_one_process_and_as_ddp(strategy):
    pairs = ((Net, Net), (AdamW, AdamW))
    for missed, compared in run_in_processes(_compare, 2, [strategy], pairs, 1e-6, limit_s=900):
        assert missed == []
        assert compared == 16


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/parity/test_deepspeed.py::test_every_stage_trains_as_one_process_and_as_ddp",
)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", OFFLOADS)
def test_what_is_offloaded_to_the_cpu_trains_the_same(strategy):
    pairs = ((Net, Net), (AdamW, AdamW), (CPUAdam, AdamW))
    for missed, compared in run_in_processes(_compare, 2, [strategy], pairs, 1e-6, limit_s=900):
        assert missed == []
        assert compared == 24


class Normalized(Net):
    """Running statistics have 32 bits, whatever the weights have."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(32))
        self.net.insert(4, torch.nn.LayerNorm(32))


def _in_16_bits(rank, world_size, strategy, precision, make=AdamW):
    expected, _ = _train(make, world_size, "ddp", 1, None)
    options = {"name": strategy, "initial_scale_power": 6} if precision == "16-mixed" else strategy
    weights, policy = _train(make, world_size, options, 1, None, precision=precision)
    return relative_difference(weights, expected), tolerance_of(policy)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/parity/test_deepspeed.py::test_every_stage_trains_as_one_process_and_as_ddp",
)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("strategy", STAGES)
def test_sixteen_bits_stay_close(strategy, precision):
    for distance, tolerance in run_in_processes(_in_16_bits, 2, strategy, precision, limit_s=360):
        assert 0 < distance < tolerance


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/parity/test_deepspeed.py::test_every_stage_trains_as_one_process_and_as_ddp",
)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3"])
def test_normalizing_layers_take_sixteen_bits(strategy, precision):
    # Of rank 0 alone, as in a checkpoint: each rank has statistics of its own.
    distance, tolerance = run_in_processes(_in_16_bits, 2, strategy, precision, Normalized, limit_s=360)[0]
    assert 0 < distance < tolerance


class Sometimes(Net):
    """A layer that only some steps use, and on `ranks` alone."""

    def __init__(self, use=lambda step: step == 0, ranks=(0, 1)):
        super().__init__()
        self.use, self.ranks, self.extra = use, ranks, torch.nn.Linear(16, 1)
        torch.nn.init.constant_(self.extra.weight, 0.1)
        torch.nn.init.zeros_(self.extra.bias)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        used = self.use(batch_idx) and self.global_rank in self.ranks
        return loss + self.extra(batch[0]).square().mean() if used else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=5e-3)


def _sometimes(rank, world_size, strategy, accumulate):
    make = functools.partial(Sometimes, lambda step: step % 4 == 1)
    expected, _ = _train(make, world_size, "ddp_find_unused_parameters_true", accumulate, None)
    return relative_difference(_train(make, world_size, strategy, accumulate, None)[0], expected)


@pytest.mark.when_changed(
    "plugins/deepspeed/",
    guard="tests/parity/test_deepspeed.py::test_every_stage_trains_as_one_process_and_as_ddp",
)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("strategy", [*STAGES, "deepspeed_stage_2_offload", "deepspeed_stage_3_offload"])
def test_a_parameter_without_a_gradient_is_not_stepped_with_its_last_one(strategy, accumulate):
    for distance in run_in_processes(_sometimes, 2, strategy, accumulate, limit_s=360):
        assert distance < 1e-6


def _refused(rank, world_size, make, strategy):
    return outcome(lambda: _train(make, world_size, strategy, 1, 0.5))


@pytest.mark.parametrize("strategy", ["deepspeed_stage_1", pytest.param("deepspeed_stage_2", marks=WHERE_IT_CHANGED)])
def test_ranks_that_use_different_parameters_are_refused(strategy):
    make = functools.partial(Sometimes, lambda step: step == 2, ranks=(1,))
    for said in run_in_processes(_refused, 2, make, strategy, limit_s=360):
        assert said.startswith("refused: ranks used different parameters in one step"), said


class Measures(sg.Callback):
    """Asks for the norm before the trainer clips."""

    @sg.hookimpl
    def on_before_optimizer_step(self, optimizer, run):
        self.norm = float(run.clip_gradients(optimizer, max_norm=math.inf))


def _measured(rank, world_size, strategy):
    look = Measures()
    weights, _ = _train(Net, world_size, strategy, 3, 0.5, callbacks=[look])
    return weights, look.norm


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(each, marks=WHERE_IT_CHANGED) for each in STAGES[:2]), "deepspeed_stage_3"]
)
def test_a_norm_that_is_asked_for_twice_is_the_same(strategy):
    reference, norms = train_module_plainly(Net(), BATCHES, 3, 0.5)
    for weights, norm in run_in_processes(_measured, 2, strategy, limit_s=360):
        assert norm == pytest.approx(norms[-1], rel=1e-5)
        assert relative_difference(weights, reference) < 1e-6


class WholeLayers(Net):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


def _again(rank, world_size, strategy):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, precision="bf16-mixed", **QUIET)
    module, batches = Net(), part(BATCHES, rank, world_size)
    trainer.fit(module, batches)
    trained = weights_of(trainer)
    trainer.fit(module, batches)  # nothing left to do
    again = weights_of(trainer)
    trainer.run.close()
    return relative_difference(again, trained), next(module.parameters()).dtype


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed_stage_2", marks=WHERE_IT_CHANGED), "deepspeed_stage_3"])
def test_masters_outlive_an_engine(strategy):
    for distance, dtype in run_in_processes(_again, 2, strategy, limit_s=360):
        assert distance == 0
        assert dtype == (torch.float32 if strategy == "deepspeed_stage_2" else torch.bfloat16)


def test_options_of_a_precision_that_the_engine_takes_over_are_refused():
    with pytest.raises(
        sg.StratagemError, match=r"precision.16-mixed.init_scale is set .* applies the precision itself"
    ):
        sg.Trainer(strategy="deepspeed_stage_2", precision={"name": "16-mixed", "init_scale": 64.0}, **QUIET)


class Thawing(Net):
    """A layer that is frozen until the third batch."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx >= 2)
        return super().training_step(batch, batch_idx)


class FrozenGroup(Net):
    def configure_optimizers(self):
        self.net[0].requires_grad_(False)
        return torch.optim.SGD([{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}], lr=0.1)


class Detached(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx).detach()


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(5, 3, sparse=True)


LOST = {
    Thawing: "'net.0.weight' was frozen when training began and is trained now",
    FrozenGroup: "parameter group 0 of SGD has no trainable parameter",
    Detached: "reaches no trainable parameter",
    Sparse: "words has sparse gradients, and ZeRO flattens gradients",
    WholeLayers: "configure_optimizers returned Adafactor, which computes with whole layers",
}


def _all_refused(rank, world_size, strategy):
    return {sentence: _refused(rank, world_size, make, strategy) for make, sentence in LOST.items()}


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed_stage_2", marks=WHERE_IT_CHANGED), "deepspeed_stage_3"])
def test_what_would_be_lost_is_refused(strategy):
    for said in run_in_processes(_all_refused, 2, strategy, limit_s=360):
        for sentence, told in said.items():
            assert told.startswith("refused: "), f"{sentence}: {told}"
            assert sentence in told


class Outside(Net):
    """Trains one layer; another gets gradients that nobody uses."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[4].parameters(), lr=0.05)


@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(each, marks=WHERE_IT_CHANGED) for each in ({"name": "deepspeed", "stage": 0}, *STAGES[:2])),
        "deepspeed_stage_3",
    ],
)
def test_what_is_in_no_group_does_not_count_in_the_norm(strategy):
    for distance in run_in_processes(_from_ddp, 2, strategy, limit_s=360):
        assert distance < 1e-6


def _from_ddp(rank, world_size, strategy):
    (weights, _), (expected, _) = (_train(Outside, world_size, each, 1, 0.2) for each in (strategy, "ddp"))
    return relative_difference(weights, expected)


@pytest.mark.parametrize("callback", ["ema", {"name": "stochastic_weight_averaging", "swa_lrs": 0.1}])
def test_callbacks_that_write_into_weights_are_refused(callback):
    with pytest.raises(sg.StratagemError, match=r"callback '\w+' cannot be used with .* 'stepped-copies'"):
        sg.Trainer(strategy="deepspeed_stage_1", callbacks=[callback], **QUIET)
