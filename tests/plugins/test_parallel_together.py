"""What runs on every mesh of a parallel strategy: comm hooks, precisions, steps by hand, outer strategies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import Net, data, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, outcome, share, weights_of

BATCHES = joined_batches(8, 24)
PLAN = {"net.0": "colwise", "net.2": "rowwise"}
UNITS = {"auto_wrap_policy": {nn.Linear}}
#: Of four processes.
MESHES = {
    "replicate": {},
    "tensor x replicate": {"tensor": 2, "plan": PLAN, "replicate": 2},
    "shard x replicate": {"shard": 2, "replicate": 2} | UNITS,
    "tensor x shard": {"tensor": 2, "shard": 2, "plan": PLAN} | UNITS,
    "pipeline x replicate": {"pipeline": 2, "replicate": 2},
    "pipeline x shard": {"pipeline": 2, "shard": 2},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "plan": PLAN},
}
REPLICATED = {mesh: options for mesh, options in MESHES.items() if "replicate" in mesh}


def _train(make, options, batches=BATCHES, **arguments):
    trainer = sg.Trainer(
        strategy={"name": "parallel", **options}, devices=4, **QUIET | {"accelerator": "cpu"} | arguments
    )
    trainer.fit(make(), share(trainer, batches))
    return weights_of(trainer), trainer


def _hooked(rank, world_size, options, hook, windows):
    found = []
    for accumulate, max_norm in windows:
        arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": max_norm}
        weights, trainer = _train(Net, options, comm_hook=hook, **arguments)
        buckets = dict(trainer.run.collectives.traffic.buckets)
        found.append((weights, buckets))
    return found


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    guard="tests/plugins/test_comm_hooks.py::test_resumed_equals_uninterrupted",
)
@pytest.mark.every_push("pipeline x replicate-allreduce")
@pytest.mark.slow
@pytest.mark.parametrize("hook", ["allreduce", "bf16_compress", "powersgd", "int8"])
@pytest.mark.parametrize("mesh", REPLICATED)
def test_averages_over_replicas_pass_comm_hooks(mesh, hook):
    windows = ((1, None), (3, 0.5))
    limit = {"allreduce": 1e-6, "bf16_compress": 0.01, "powersgd": 0.5, "int8": 0.1}[hook]
    results = run_in_processes(_hooked, 4, REPLICATED[mesh], hook, windows, limit_s=360)
    for index, window in enumerate(windows):
        plain, _ = train_module_plainly(Net(), BATCHES, *window)
        for result in results:
            weights, buckets = result[index]
            assert buckets, "the hook had buckets"
            assert relative_difference(weights, plain) < limit


def _precise(rank, world_size, options, precision):
    weights, trainer = _train(Net, options, precision=precision, gradient_clip_val=0.5)
    return weights, tolerance_of(trainer.run.policy), trainer.position.skipped_steps


PRECISIONS = ["bf16-mixed", {"name": "16-mixed", "init_scale": 64.0}, "bf16-true", "64-true"]


@pytest.mark.every_push("pipeline x replicate-bf16-true")
@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
def test_precisions(mesh, precision):
    plain, _ = train_module_plainly(Net(), BATCHES, 1, 0.5)
    for weights, tolerance, skipped in run_in_processes(_precise, 4, MESHES[mesh], precision, limit_s=360):
        assert skipped == 0
        assert relative_difference(weights, plain) < max(tolerance, 1e-6)


class Overflowing(Net):
    """A gradient of the last layer is infinite in the third batch, on the ranks that read its last part."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_last = self.trainer.run.mesh.data_shard == self.trainer.run.mesh.num_data_shards - 1
        return loss * float("inf") if batch_idx == 2 and is_last else loss


def _overflowing(rank, world_size, options):
    weights, trainer = _train(Overflowing, options, precision={"name": "16-mixed", "init_scale": 64.0})
    return weights, trainer.position.skipped_steps


@pytest.mark.every_push("pipeline x tensor")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_all_ranks_skip_a_step_that_overflows_on_one(mesh):
    plain, _ = train_module_plainly(Net(), [batch for i, batch in enumerate(BATCHES) if i != 2], 1, None)
    for weights, skipped in run_in_processes(_overflowing, 4, MESHES[mesh], limit_s=360):
        assert skipped == 1
        assert relative_difference(weights, plain) < 0.02


def _clipped(rank, world_size, options):
    return _train(Net, options, gradient_clip_val=0.1, gradient_clip_algorithm="value")[0]


@pytest.mark.every_push("pipeline x tensor")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_by_value(mesh):
    reference = Net()
    optimizer = reference.configure_optimizers()
    for x, y in BATCHES:
        optimizer.zero_grad()
        reference.criterion(reference(x), y).backward()
        nn.utils.clip_grad_value_(reference.parameters(), 0.1)
        optimizer.step()
    for weights in run_in_processes(_clipped, 4, MESHES[mesh]):
        assert relative_difference(weights, reference.state_dict()) < 1e-6


class ByHand(Net):
    """Two backwards and a step, twice in each batch, in training_step."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            for factor in (0.25, 0.75):
                x, y = batch
                self.manual_backward(factor * self.criterion(self(x), y))
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


def _by_hand(rank, world_size, options):
    return _train(ByHand, options)[0]


@pytest.mark.every_push("tensor x replicate")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if "pipeline" not in mesh])
def test_steps_by_hand(mesh):
    plain, _ = train_module_plainly(Net(), [batch for batch in BATCHES for _ in range(2)], 1, 0.5)
    for weights in run_in_processes(_by_hand, 4, MESHES[mesh]):
        assert relative_difference(weights, plain) < 1e-6


def _outer(rank, world_size, outer, options, batches):
    trainer = sg.Trainer(
        strategy=[outer, {"name": "parallel", **options}], devices=4, **QUIET | {"accelerator": "cpu"}
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, batches))
    return weights_of(trainer)


INNER = {
    "tensor": {"tensor": 2, "plan": PLAN}, "shard": {"shard": 2} | UNITS, "pipeline": {"pipeline": 2},
    "replicate": {},
}  # fmt: skip


@pytest.mark.every_push("local_sgd-pipeline")
@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", ["diloco", "local_sgd"])
def test_teams_of_an_outer_strategy_are_parallel(outer, inner):
    """With one step between averages and plain averages of equal teams, the teams train as one."""
    options = {"name": outer, "team_size": 2, "period": 2}
    weights = run_in_processes(_outer, 4, options, INNER[inner], BATCHES)
    reference = run_in_processes(_outer, 4, options, INNER["replicate"], BATCHES)[0]
    for found in weights:
        assert relative_difference(found, reference) < 1e-5


def _eight(rank, world_size, inner):
    trainer = sg.Trainer(
        strategy=[{"name": "diloco", "team_size": 4, "period": 2}, {"name": "parallel", **inner}], devices=8,
        gradient_clip_val=0.5, **QUIET | {"accelerator": "cpu"},
    )  # fmt: skip
    trainer.fit(Net(), share(trainer, BATCHES[:6]))
    return weights_of(trainer)


@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    "plugins/outer/",
    guard="tests/plugins/test_parallel_together.py::test_teams_of_an_outer_strategy_are_parallel",
)
@pytest.mark.every_push("pipeline x replicate")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor x shard", "pipeline x replicate"])
def test_a_team_may_have_a_mesh_of_several_axes(mesh):
    first, *others = run_in_processes(_eight, 8, MESHES[mesh], limit_s=360)
    for found in others:
        assert relative_difference(found, first) < 1e-6
    reference = run_in_processes(_eight, 8, MESHES["replicate"], limit_s=360)[0]
    assert relative_difference(first, reference) < 1e-5


class Thawing(Net):
    """The first layer is trained from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _thawing(rank, world_size, options):
    trainer = sg.Trainer(
        strategy={"name": "parallel", **options}, devices=world_size, **QUIET | {"accelerator": "cpu", "max_epochs": 2}
    )  # fmt: skip
    trainer.fit(Thawing(), share(trainer, BATCHES))
    return weights_of(trainer)


@pytest.mark.every_push("{'shard': 2}")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicate": 2}, {"shard": 2}, {"bucket_cap_mb": 1e-6}], ids=str)
def test_parameters_that_become_trained_are_averaged(options):
    reference = Thawing()
    optimizer = reference.configure_optimizers()
    for epoch in range(2):
        reference.net[0].requires_grad_(epoch > 0)
        for x, y in BATCHES:
            optimizer.zero_grad()
            reference.criterion(reference(x), y).backward()
            optimizer.step()
    for weights in run_in_processes(_thawing, 2, options):
        assert relative_difference(weights, reference.state_dict()) < 1e-6


class FrozenStage(Net):
    """No parameter of the first stage is trained."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


def _frozen_stage(rank, world_size, options, arguments):
    return _train(FrozenStage, {"balance": [1, len(Net().net) - 1], **options}, **arguments)[0]


@pytest.mark.every_push("{'pipeline': 2, 'replicate': 2}-{'comm_hook': 'allreduce'}")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"pipeline": 2, "replicate": 2}, {"comm_hook": "allreduce"}),
        ({"pipeline": 2, "replicate": 2}, {}),
        ({"pipeline": 2, "shard": 2}, {"gradient_clip_val": 0.5}),
    ],
    ids=str,
)
def test_a_stage_of_a_pipeline_may_be_frozen(options, arguments):
    plain, _ = train_module_plainly(FrozenStage(), BATCHES, 1, arguments.get("gradient_clip_val"))
    for weights in run_in_processes(_frozen_stage, 4, options, arguments):
        assert relative_difference(weights, plain) < 1e-6


# --- Ranks that share samples --------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Adds noise that depends on the process, from one sample on."""

    def __init__(self, rank, since):
        self.rank, self.since = rank, since

    def __len__(self):
        return 16

    def __getitem__(self, index):
        x, y = data(16)
        return x[index] + (self.rank if index >= self.since else 0), y[index]


def _fit_augmented(rank, world_size, since):
    strategy = {"name": "parallel", "tensor": 2, "plan": {"net.0": "colwise", "net.2": "rowwise"}}
    trainer = sg.Trainer(**QUIET, strategy=strategy, accelerator="cpu", devices=2)
    return outcome(lambda: trainer.fit(Net(), DataLoader(Augmented(rank, since), 4)))


@pytest.mark.slow
@pytest.mark.parametrize("since", [0, 4])
def test_ranks_of_one_tensor_axis_that_read_different_samples_are_refused(since):
    for text in run_in_processes(_fit_augmented, 2, since):
        assert f"got different batches (batch {1 + since // 4} of stage 'train')" in text


class WithStatistics(Net):
    """Batch normalization: each replica has statistics of its own batches."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(self.net[0].in_features)
        self.seen = []

    def forward(self, x):
        return super().forward(self.statistics(x))

    def validation_step(self, batch, batch_idx):
        self.seen = self.statistics.running_mean.tolist()


def _with_statistics(rank, world_size, options):
    trainer = sg.Trainer(strategy={"name": "parallel", **options}, devices=2, **QUIET | {"accelerator": "cpu"})
    module, batches = WithStatistics(), share(trainer, BATCHES)
    trainer.fit(module, batches, val_dataloaders=batches)
    return module.seen


@pytest.mark.every_push("{'replicate': 2}")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_evaluation_has_one_value_of_each_buffer(options):
    first, second = run_in_processes(_with_statistics, 2, options)
    assert any(first)
    assert first == second


class Sparse(Net):
    """Has a layer whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


def _sparse(rank, world_size, options):
    with pytest.raises(ConfigError) as caught:
        sg.Trainer(strategy={"name": "parallel", **options}, devices=2, **QUIET | {"accelerator": "cpu"}).fit(
            Sparse(), BATCHES
        )
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_sparse_gradients_are_refused(options):
    (text,) = set(run_in_processes(_sparse, 2, options))
    assert "'table' has sparse gradients, and strategy parallel sends dense ones" in text
