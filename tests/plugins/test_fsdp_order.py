"""FSDP's collectives carry no names: ranks that use different layers are refused by name, and what is the same trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stratagem as sg
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, loss_of, part, relative_difference
from stratagem_testing.training import outcome, share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
UNITS = {"auto_wrap_policy": {nn.Linear}, "timeout": 60}
ONE = {"timeout": 60}
NO_SHARD = {"sharding_strategy": "NO_SHARD", "timeout": 60}


class Layers(Net):
    """Runs the layers that `uses` names for (rank, batch_idx), one after the other."""

    def __init__(self, uses, wide=16):
        super().__init__()
        self.net, self.uses = None, uses
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        self.cat, self.dog = nn.Linear(16, 16), nn.Linear(16, 16)
        self.bear = nn.Linear(16, wide)
        self.scale = nn.Parameter(torch.ones(()))
        self.chosen = []

    def training_step(self, batch, batch_idx):
        self.chosen = self.uses(self.global_rank, batch_idx).split()
        return loss_of(self(batch[0]), batch[1])

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for name in self.chosen:
            if name == "scale":
                x = x * self.scale
            elif name == "unused":
                self.dog(x)
            elif name == "again":
                x = checkpoint(self.cat, x, use_reentrant=False)
            else:
                x = torch.tanh(getattr(self, name)(x))[:, :16]
        return self.last(x)


class ByHand(Layers):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            self.chosen = self.uses(self.global_rank, batch_idx).split()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self(batch[0]), batch[1]))
            optimizer.step()


class SkipsByALeaf(Layers):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            return torch.zeros((), requires_grad=True)
        return super().training_step(batch, batch_idx)


def plainly(make, batches, world_size=2, accumulate=1, twice=False):
    """Train in one process; the gradient is the mean of those of the ranks' shares."""
    module = make()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        for _ in range(1 + twice):
            for rank in range(world_size):
                module.chosen = module.uses(rank, index).split()
                ((x, y),) = part([batch], rank, world_size)
                (loss_of(module(x), y) / world_size / accumulate).backward()
            if (index + 1) % accumulate == 0:
                norm = torch.linalg.vector_norm(
                    torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None])
                )
                assert norm > 1
                optimizer.step()
                optimizer.zero_grad()
    return module.state_dict()


def fit(strategy, make, batches, **arguments):
    trainer = sg.Trainer(max_epochs=1, strategy={"name": "fsdp"} | strategy, **(QUIET | {"devices": 2} | arguments))
    module = make()
    trainer.fit(module, share(trainer, batches))
    return trainer


# --- The same on all ranks ---------------------------------------------------------------------------------------

SAME = {
    "one of two": (UNITS, Layers, lambda rank, step: "cat"),
    "another in every step": (UNITS, Layers, lambda rank, step: ["cat", "dog", "bear dog"][step % 3]),
    "another in every step, one unit": (ONE, Layers, lambda rank, step: ["cat", "dog", "bear dog"][step % 3]),
    "another in every step, replicas": (NO_SHARD, Layers, lambda rank, step: ["cat", "dog", "bear dog"][step % 3]),
    "another order": (UNITS, Layers, lambda rank, step: ["cat dog", "dog cat"][step % 2]),
    "used twice": (UNITS, Layers, lambda rank, step: "cat dog cat"),
    "computed again in backward": (UNITS, Layers, lambda rank, step: "again dog again"),
    "a scalar now and then": (UNITS, Layers, lambda rank, step: ["cat scale", "cat"][step % 2]),
    "whole between forward and backward": (
        UNITS | {"sharding_strategy": "SHARD_GRAD_OP"}, Layers, lambda rank, step: ["cat", "dog"][step % 2],
    ),
    "by hand": (UNITS, ByHand, lambda rank, step: ["cat", "dog cat"][step % 2]),
    "by hand, one unit": (ONE, ByHand, lambda rank, step: ["cat", "dog cat"][step % 2]),
}  # fmt: skip


def _train_all(rank, size, accumulate):
    found = {}
    for name, (strategy, cls, uses) in SAME.items():
        if accumulate > 1 and cls is ByHand:
            continue
        make = lambda cls=cls, uses=uses: cls(uses)  # noqa: E731
        trainer = fit(strategy, make, joined_batches(6, 24), accumulate_grad_batches=accumulate)
        found[name] = weights_of(trainer)
    return found


@pytest.mark.when_changed(
    "plugins/fsdp/",
    "plugins/libraries/",
    guard="tests/parity/test_branching.py::test_what_trains_ranks_that_differ_equals_one_process",
)
@pytest.mark.every_push("1")
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_all_ranks_use_alike_may_change_from_step_to_step(accumulate):
    first, second = run_in_processes(_train_all, 2, accumulate, limit_s=360)

    for name, weights in first.items():
        _, cls, uses = SAME[name]
        plain = plainly(lambda cls=cls, uses=uses: cls(uses), joined_batches(6, 24), 2, accumulate, cls is ByHand)
        assert relative_difference(weights, plain) < 2e-6, name
        assert relative_difference(second[name], plain) < 2e-6, name


# --- Ranks that differ -------------------------------------------------------------------------------------------


def only(rank, there, elsewhere, since=0):
    """Use the layers `there` on `rank`, from step `since`, and `elsewhere` on the others."""
    return lambda here, step: there if here == rank and step >= since else elsewhere


HEAD = "ranks use different layers in one step: "
TAIL = (
    "; expected the same ones on every rank, in the same order: FSDP adds up what comes at the same place; add the "
    'others to the loss with a factor of zero, or choose strategy="ddp_find_unused_parameters_true"'
)
#: What every rank says, wherever in a fit the ranks come to differ.
DIFFERENT = {
    "branches": (UNITS, only(1, "dog", "cat"), "rank 0 came to 'cat'; rank 1 came to 'dog'"),
    "sizes": (UNITS, only(1, "bear", "cat"), "rank 0 came to 'cat'; rank 1 came to 'bear'"),
    "order": (UNITS, only(1, "dog cat", "cat dog"), "rank 0 came to 'cat'; rank 1 came to 'dog'"),
    "one more": (UNITS, only(1, "cat dog", "cat"), "rank 0 came to 'last'; rank 1 came to 'dog'"),
    "one less": (UNITS, only(0, "cat", "cat dog"), "rank 0 came to 'last'; rank 1 came to 'dog'"),
    "twice": (UNITS, only(1, "cat cat", "cat"), "rank 0 came to 'last'; rank 1 came to 'cat'"),
    "whole": (
        UNITS | {"sharding_strategy": "SHARD_GRAD_OP"}, only(1, "dog", "cat"),
        "rank 0 came to 'cat'; rank 1 came to 'dog'",
    ),
    "without a gradient on one": (
        UNITS, only(1, "cat unused", "cat dog"), "rank 0 has gradients for 'dog.weight', 'dog.bias'; rank 1 came to",
    ),
    "in one unit": (
        ONE, only(1, "dog", "cat"),
        "rank 0 has gradients for 'cat.weight', 'cat.bias'; rank 1 has gradients for 'dog.weight', 'dog.bias'",
    ),
    "one more in one unit": (
        ONE, only(1, "cat dog", "cat"),
        "rank 0 has none for 'dog.bias', 'dog.weight'; rank 1 has gradients for 'dog.weight', 'dog.bias'",
    ),
    "in replicas": (
        NO_SHARD, only(1, "dog", "cat"),
        "rank 0 has gradients for 'cat.weight', 'cat.bias'; rank 1 has gradients for 'dog.weight', 'dog.bias'",
    ),
    "a scalar": (UNITS, only(1, "cat scale", "cat"), "rank 0 came to "),
}  # fmt: skip


def _refused(rank, size, names, since, cls, accumulate):
    said = []
    for name in names:
        strategy, uses, _ = DIFFERENT[name]
        late = lambda here, step, uses=uses: uses(here, step) if step >= since else uses(0, step)  # noqa: E731
        make = lambda cls=cls, late=late: cls(late)  # noqa: E731
        batches = joined_batches(6, 24)
        said.append(outcome(lambda: fit(strategy, make, batches, accumulate_grad_batches=accumulate)))  # noqa: B023
    return said


def check(said, name):
    """Insist on the sentence on every rank; one that was stuck gets it from another rank."""
    for each in said:
        assert each.startswith("refused: "), (name, each)
        assert HEAD + DIFFERENT[name][2] in each, (name, each)
        assert TAIL in each, (name, each)


@pytest.mark.every_push("1")
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_that_differ_from_the_start_are_refused_on_all_ranks(accumulate):
    names = list(DIFFERENT)
    for name, *said in zip(
        names, *run_in_processes(_refused, 2, names, 0, Layers, accumulate, limit_s=360), strict=True
    ):
        check(said, name)


@pytest.mark.every_push("one more in one unit")
@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_come_to_differ_are_refused_on_all_ranks(name):
    check([each for (each,) in run_in_processes(_refused, 2, [name], 3, Layers, 1, limit_s=120)], name)


def _replicas(rank, size):
    strategy = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)} | UNITS
    trainer = sg.Trainer(max_epochs=1, strategy={"name": "fsdp"} | strategy, devices=size, **QUIET)
    module = Layers(lambda here, step: "dog" if here > 1 else "cat")
    return outcome(lambda: trainer.fit(module, share(trainer, joined_batches(2, 24))))


@pytest.mark.slow
def test_replicas_that_differ_are_refused_though_each_agrees_within():
    for said in run_in_processes(_replicas, 4, limit_s=180):
        assert said.startswith(f"refused: {HEAD}ranks 0, 1 came to 'cat'; ranks 2, 3 came to 'dog'"), said


def _alone_with_a_leaf(rank, size):
    make = lambda: SkipsByALeaf(lambda rank, step: "cat")  # noqa: E731
    return outcome(lambda: fit(ONE, make, joined_batches(3, 24), devices=size))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "others"), [(2, "rank 0 has"), (3, "ranks 0, 2 have")])
def test_a_loss_that_reaches_no_unit_is_refused_on_all_ranks(size, others):
    for said in run_in_processes(_alone_with_a_leaf, size, limit_s=120):
        assert f"{HEAD}{others} gradients for '" in said
        assert "rank 1 came to the end of the step" in said


class Evaluates(Layers):
    def validation_step(self, batch, batch_idx):
        self.chosen = self.uses(self.global_rank, batch_idx).split()
        self.log("val_loss", loss_of(self(batch[0]), batch[1]), sync_dist=True)


def _evaluate(rank, size, uses):
    trainer = sg.Trainer(strategy={"name": "fsdp"} | UNITS, devices=size, **QUIET)
    return outcome(lambda: trainer.validate(Evaluates(uses), share(trainer, joined_batches(4, 24))))


@pytest.mark.slow
def test_evaluation_is_compared_too():
    assert run_in_processes(_evaluate, 2, lambda rank, step: ["cat", "dog"][step % 2]) == ["nothing"] * 2
    for since in (0, 2):
        for said in run_in_processes(_evaluate, 2, only(1, "bear", "cat", since), limit_s=120):
            assert f"{HEAD}rank 0 came to 'cat'; rank 1 came to 'bear'" in said


def _loop(rank, size, uses, steps):
    kept = {}

    def train():
        with sg.Run(strategy={"name": "fsdp"} | UNITS, devices=size, accelerator="cpu") as run:
            module = Layers(uses)
            model, optimizer = run.setup(module, module.configure_optimizers())
            for step, (x, y) in enumerate(part(joined_batches(steps, 24), rank, size)):
                module.chosen = uses(rank, step).split()
                run.backward(loss_of(model(x), y))
                run.optimizer_step(optimizer)
                optimizer.zero_grad()
            with run.gathered_state():
                kept.update(run.ask("model_state", module=module))

    said = outcome(train)
    return kept if said == "nothing" else said


@pytest.mark.slow
def test_a_loop_of_ones_own_is_compared_too():
    uses = lambda rank, step: ["cat", "dog cat"][step % 2]  # noqa: E731
    for weights in run_in_processes(_loop, 2, uses, 4, limit_s=120):
        assert relative_difference(weights, plainly(lambda: Layers(uses), joined_batches(4, 24))) < 2e-6
    for since in (0, 2):
        for said in run_in_processes(_loop, 2, only(1, "dog", "cat", since), 4, limit_s=120):
            assert f"{HEAD}rank 0 came to 'cat'; rank 1 came to 'dog'" in said
