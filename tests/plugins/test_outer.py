"""Teams that train apart and meet: against copies of the model that meet by hand, in one process and plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_outer.conformance import PostLocalSGDConformance
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    ByHand,
    Gan,
    Halves,
    Lbfgs,
    Net,
    critic_loss,
    data,
    generator_loss,
    joined_batches,
    loss_of,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.strategy import outer
from stratagem_testing.strategy.outer import averaging, mix
from stratagem_testing.training import (
    QUIET,
    EveryBatch,
    bytes_sent,
    in_empty_folder,
    outcome,
    share,
    train,
    weights_of,
    weights_on_all_ranks,
)

BATCHES = joined_batches(10, 24)
POST = {"name": "post_localsgd", "model_averaging_period": 2}
PARAMETERS = sum(parameter.numel() for parameter in Net().parameters())


class Adam(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Normalized(Net):
    """With what a process has of its own besides parameters: running statistics, random numbers."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(32))
        self.net.insert(3, nn.Dropout(0.2))


# --- The reference: copies of a model, trained in turn -----------------------------------------------------------


class Copies(outer.Copies):
    def unite(self):
        """What the end of a fit does: one model, and one momentum for the next fit to go on with."""
        average = self.average()
        momenta = [[o.state[p]["momentum_buffer"] for p in o.param_groups[0]["params"]] for o in self.optimizers]
        for model in self.models:
            model.load_state_dict(average)
        with torch.no_grad():
            mix(momenta, torch.full((len(momenta), len(momenta)), 1 / len(momenta)))


def outer_steps(period, compressed=lambda gradient: gradient, **options):
    """DiLoCo with torch's own SGD as the outer optimizer."""
    anchor = list(Net().parameters())
    outer = torch.optim.SGD(anchor, **({"lr": 0.7, "momentum": 0.9, "nesterov": True} | options))

    def meet(step, models):
        if step % period == 0:
            for place, parameter in enumerate(anchor):
                gradients = torch.stack([parameter - model[place] for model in models])
                parameter.grad = compressed(gradients).mean(0)
            outer.step()
            for model in models:
                for mine, parameter in zip(model, anchor, strict=True):
                    mine.copy_(parameter)

    return meet


def ring(step, models):
    size = len(models)
    neighbours = torch.eye(size)
    for rank in range(size):
        for other in {(rank - 1) % size, (rank + 1) % size}:
            neighbours[rank, other] = 1
    mix(models, neighbours / neighbours.sum(1, keepdim=True))


def random_pairs(step, models):
    from stratagem_outer.decentralized import partner

    weights = torch.zeros(len(models), len(models))
    for rank in range(len(models)):
        weights[rank, rank] += 0.5
        weights[rank, partner(rank, len(models), step)] += 0.5
    assert torch.equal(weights, weights.T), "whom I meet meets me"
    mix(models, weights)


def late(interval, delay, on_the_way=None):
    """What was averaged at one step is applied, as a difference, a few steps later."""
    on_the_way = {} if on_the_way is None else on_the_way

    def meet(step, models):
        for model, changes in zip(models, on_the_way.pop(step, []), strict=False):
            for parameter, change in zip(model, changes, strict=True):
                parameter.add_(change)
        if step % interval == 0:
            means = [torch.stack(list(same)).mean(0) for same in zip(*models, strict=True)]
            on_the_way[step + delay] = [[m - p for m, p in zip(means, model, strict=True)] for model in models]

    return meet


# --- Training ----------------------------------------------------------------------------------------------------

#: A strategy, the same by hand, the module, and what the trainer is told besides.
SAME = {
    "local_sgd": ({"name": "local_sgd", "period": 4}, lambda: averaging(4), Net, {}),
    "local_sgd, late": ({"name": "local_sgd", "period": 3, "start_step": 4}, lambda: averaging(3, 4), Net, {}),
    "local_sgd, adam": ({"name": "local_sgd", "period": 3}, lambda: averaging(3), Adam, {}),
    "local_sgd, accumulating": (
        {"name": "local_sgd", "period": 2}, lambda: averaging(2), Net, {"accumulate_grad_batches": 2},
    ),
    "local_sgd, clipping each team": (
        {"name": "local_sgd", "period": 2}, lambda: averaging(2), Net, {"gradient_clip_val": 0.5},
    ),
    "local_sgd, by hand": ({"name": "local_sgd", "period": 4}, lambda: averaging(4), ByHand, {}),
    "diloco": ({"name": "diloco", "period": 3}, lambda: outer_steps(3), Net, {}),
    "diloco, adam": ({"name": "diloco", "period": 3}, lambda: outer_steps(3), Adam, {}),
    "diloco, heavy ball": (
        {"name": "diloco", "period": 2, "nesterov": False, "outer_momentum": 0.5, "outer_lr": 0.9},
        lambda: outer_steps(2, lr=0.9, momentum=0.5, nesterov=False), Net, {},
    ),
    "diloco, without momentum": (
        {"name": "diloco", "period": 2, "outer_momentum": 0.0},
        lambda: outer_steps(2, momentum=0.0, nesterov=False), Net, {},
    ),
    "diloco, accumulating": (
        {"name": "diloco", "period": 2}, lambda: outer_steps(2), Net, {"accumulate_grad_batches": 2},
    ),
    "decentralized": ({"name": "decentralized"}, lambda: ring, Net, {}),
    "decentralized, adam": ({"name": "decentralized"}, lambda: ring, Adam, {}),
    "decentralized, random": ({"name": "decentralized", "topology": "random"}, lambda: random_pairs, Net, {}),
    "async_averaging": (
        {"name": "async_averaging", "interval_steps": 3, "delay_steps": 2}, lambda: late(3, 2), Net, {},
    ),
    "async_averaging, at once": (
        {"name": "async_averaging", "interval_steps": 2, "delay_steps": 2}, lambda: late(2, 2), Adam, {},
    ),
}  # fmt: skip


def _train_all(rank, size, cases):
    return {name: train(rank, size, make, BATCHES, {"strategy": s, **more}) for name, (s, make, more) in cases.items()}


@pytest.mark.every_push("2")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_copies_that_meet_by_hand(size):
    results = run_in_processes(_train_all, size, {name: (s, make, more) for name, (s, _, make, more) in SAME.items()})

    for name, (_, meet, make, more) in SAME.items():
        accumulate, max_norm = more.get("accumulate_grad_batches", 1), more.get("gradient_clip_val")
        reference = Copies(size, make).train(BATCHES, meet(), accumulate, max_norm)
        weights = weights_on_all_ranks([result[name] for result in results])
        assert relative_difference(weights, reference.average()) < 1e-6, name
        assert results[0][name]["steps"] == reference.step, name


WITHIN = {
    "diloco, ddp": ([{"name": "diloco", "period": 3, "team_size": 2}, "ddp"], lambda: outer_steps(3)),
    "diloco, ddp_sharded": ([{"name": "diloco", "period": 3, "team_size": 2}, "ddp_sharded"], lambda: outer_steps(3)),
    "diloco, fsdp": ([{"name": "diloco", "period": 3, "team_size": 2}, "fsdp"], lambda: outer_steps(3)),
    "local_sgd, fsdp": ([{"name": "local_sgd", "period": 4, "team_size": 2}, "fsdp"], lambda: averaging(4)),
    "decentralized, ddp": ([{"name": "decentralized", "team_size": 2}, "ddp"], lambda: ring),
    "async_averaging, fsdp": (
        [{"name": "async_averaging", "interval_steps": 3, "delay_steps": 2, "team_size": 2}, "fsdp"],
        lambda: late(3, 2),
    ),
}


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_training_equals_copies_that_meet_by_hand"
)
@pytest.mark.slow
def test_teams_of_two_equal_copies_with_twice_the_batch():
    results = run_in_processes(_train_all, 4, {name: (stack, Net, {}) for name, (stack, _) in WITHIN.items()})

    for name, (_, meet) in WITHIN.items():
        weights = weights_on_all_ranks([result[name] for result in results])
        assert relative_difference(weights, Copies(2).train(BATCHES, meet()).average()) < 1e-6, name


@pytest.mark.slow
def test_meeting_after_every_step_is_data_parallel_training():
    """With SGD: parameters that took one step each have the average of the steps."""
    reference = Copies(1).train(BATCHES, lambda step, models: None).average()
    cases = {"every step": ({"name": "local_sgd", "period": 1}, Net, {})}

    for result in run_in_processes(_train_all, 2, cases):
        assert relative_difference(result["every step"]["weights"], reference) < 1e-6


class Different(Net):
    """Begins with other numbers on every rank, and has constants."""

    def __init__(self):
        rank = int(os.environ.get("RANK", 0))
        super().__init__(seed=rank)
        numbers = torch.rand(1000, generator=torch.Generator().manual_seed(rank))
        self.register_buffer("constants", torch.cat([numbers, torch.tensor([float("-inf")])]))


@pytest.mark.slow
def test_all_begin_with_the_first_ones_model_and_constants_stay_as_they_are():
    cases = {
        "local_sgd": ({"name": "local_sgd", "period": 3}, Different, {}),
        "post_localsgd": ("ddp", Different, {"comm_hook": POST | {"start_localSGD_iter": 0, "subgroup_size": 1}}),
    }
    results = run_in_processes(_train_all, 3, cases)

    for name, period in {"local_sgd": 3, "post_localsgd": 2}.items():
        weights = weights_on_all_ranks([result[name] for result in results])
        assert torch.equal(weights.pop("constants"), Different().constants)
        assert relative_difference(weights, Copies(3).train(BATCHES, averaging(period)).average()) < 1e-6


@pytest.mark.slow
def test_coarse_pseudo_gradients_end_near_exact_ones():
    cases = {word: ({"name": "diloco", "period": 2, "compress": word}, Net, {}) for word in ("fp16", "int8")}
    exact = Copies(3).train(BATCHES, outer_steps(2)).average()

    results = run_in_processes(_train_all, 3, cases)

    for word, tolerance in {"fp16": 1e-3, "int8": 3e-2}.items():
        difference = relative_difference(weights_on_all_ranks([result[word] for result in results]), exact)
        assert 1e-6 < difference < tolerance, word  # what was rounded shows


def _int8_mean(rank, size, messages):
    from stratagem_outer.compressed import mean_in_int8

    with sg.Run(strategy="local_sgd", devices=size, accelerator="cpu") as run:
        return [mean_in_int8(message[rank].clone(), run.collectives) for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_an_average_in_8_bits_is_the_same_everywhere_and_near(size):
    numbers = torch.randn(size, 1000, generator=torch.Generator().manual_seed(0))
    broken = numbers.clone()
    broken[0, 500] = float("inf")
    results = run_in_processes(_int8_mean, size, [numbers, numbers[:, :1], torch.zeros(size, 7), broken])

    for mean, single, zeros, infinite in results:
        assert torch.equal(mean, results[0][0])
        assert (mean - numbers.mean(0)).abs().max() < numbers.abs().max() / 127
        assert (single - numbers[:, :1].mean(0)).abs() < numbers[:, :1].abs().max() / 127
        assert zeros.abs().max() == 0
        assert not torch.isfinite(infinite).all(), "an overflow must stay one"


def _several_optimizers(rank, size, strategies):
    return {name: train(rank, size, Gan, BATCHES, {"strategy": strategy}) for name, strategy in strategies.items()}


@pytest.mark.slow
def test_modules_that_step_by_hand_meet_between_batches():
    """A batch is a step, whatever it steps: parameters must not change under a graph that is at hand."""
    strategies = {"local_sgd": {"name": "local_sgd", "period": 4}, "every batch": {"name": "decentralized"}}
    results = run_in_processes(_several_optimizers, 2, strategies)

    for name, meet in {"local_sgd": averaging(4), "every batch": ring}.items():
        reference = gans(2, meet)
        assert relative_difference(weights_on_all_ranks([result[name] for result in results]), reference) < 1e-6, name


def _two_optimizers(rank, size):
    local_sgd = {"name": "local_sgd", "period": 3}
    weights = [train(rank, size, make, BATCHES, {"strategy": local_sgd})["weights"] for make in (Net, Halves)]
    with sg.Run(strategy=local_sgd, devices=size, accelerator="cpu") as run:
        module = Halves()
        model, *optimizers = run.setup(module, *module.configure_optimizers())
        run.backward(loss_of(model(BATCHES[0][0]), BATCHES[0][1]))
        assert run.optimizer_step(optimizers)
        return weights, outcome(lambda: run.optimizer_step(optimizers[0]))


@pytest.mark.slow
def test_two_optimizers_are_one_step():
    for (whole, halves), said in run_in_processes(_two_optimizers, 2):
        assert relative_difference(whole, halves) == 0
        assert (
            "strategy.local_sgd counts steps, and 1 of 2 optimizers steps; expected all in one step; call run" in said
        )


def gans(teams, meet):
    models = [Gan() for _ in range(teams)]
    optimizers = [model.configure_optimizers() for model in models]
    for step, (x, _) in enumerate(BATCHES, 1):
        for model, (for_critic, for_generator), part in zip(models, optimizers, x.chunk(teams), strict=True):
            made = model.generator(part)
            for_critic.zero_grad()
            critic_loss(model.critic, torch.cat([part, part], 1), made.detach()).backward()
            for_critic.step()
            for_generator.zero_grad()
            generator_loss(model.critic, made).backward()
            for_generator.step()
        with torch.no_grad():
            meet(step, [list(model.parameters()) for model in models])
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}


# --- One model of several ----------------------------------------------------------------------------------------


class Watched(Normalized):
    """Keeps what validation saw, and what training had before and after."""

    def __init__(self):
        super().__init__()
        self.seen = {"before": [], "during": [], "after": []}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen["before"].append(copy.deepcopy(self.net.state_dict()))

    def on_validation_epoch_end(self):
        self.seen["during"].append(copy.deepcopy(self.net.state_dict()))

    def on_train_batch_start(self, batch, batch_idx):
        self.seen["after"].append(copy.deepcopy(self.net.state_dict()))


def _watch(rank, size, strategies):
    found = {}
    for strategy in strategies:
        model = Watched()
        saves = EveryBatch(weights_of)
        trainer = sg.Trainer(**(QUIET | {"strategy": strategy, "devices": size, "max_epochs": 2, "callbacks": [saves]}))
        trainer.fit(model, share(trainer, BATCHES[:5]), share(trainer, BATCHES[5:7]))
        found[strategy] = {**model.seen, "saved": saves.results, "end": dict(model.net.state_dict())}
    return found


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_a_second_fit_goes_on_from_the_average"
)
@pytest.mark.slow
def test_validation_and_checkpoints_see_the_average_and_training_goes_on_with_its_own():
    """Parameters and running statistics; counters are the first process's."""
    names = ["local_sgd", "diloco", "async_averaging", "decentralized"]
    results = run_in_processes(_watch, 2, names)

    for name in names:
        ranks = [result[name] for result in results]
        own = [rank["before"][4] for rank in ranks]  # the first epoch's last
        for key in own[0]:
            mean = (own[0][key].double() + own[1][key].double()) / 2
            for rank, mine in zip(ranks, own, strict=True):
                assert torch.allclose(rank["during"][-2][key].double(), mean, atol=1e-6), (name, key)
                assert torch.equal(rank["saved"][4]["net." + key], rank["during"][-2][key]), (name, key)
                assert torch.equal(rank["after"][5][key], mine[key]), f"{name} lost {key} by validating"
                assert torch.equal(rank["end"][key], ranks[0]["end"][key]), f"{name} ended with several models"
        assert not torch.equal(own[0]["1.running_mean"], own[1]["1.running_mean"]), "nothing to average"


# --- Resuming ----------------------------------------------------------------------------------------------------

STACKS = {
    "local_sgd": {"name": "local_sgd", "period": 3},
    "diloco": {"name": "diloco", "period": 3},
    "decentralized": {"name": "decentralized", "topology": "random"},
    "async_averaging": {"name": "async_averaging", "interval_steps": 3, "delay_steps": 3},
}
STACKS_OF_FOUR = {
    "diloco, ddp": [{"name": "diloco", "period": 3, "team_size": 2}, "ddp"],
    "diloco, ddp_sharded": [{"name": "diloco", "period": 3, "team_size": 2}, "ddp_sharded"],
    "diloco, fsdp": [{"name": "diloco", "period": 3, "team_size": 2}, "fsdp"],
    "local_sgd, shards": [
        {"name": "local_sgd", "period": 3, "team_size": 2}, {"name": "fsdp", "state_dict_type": "sharded"},
    ],
}  # fmt: skip


class AdamNormalized(Normalized):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SavesAt(sg.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    @sg.hookimpl
    def on_train_batch_end(self, trainer):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _fit(size, stack, make, path=None, **more):
    trainer = sg.Trainer(**(QUIET | {"strategy": stack, "devices": size} | more))
    trainer.fit(make(), share(trainer, BATCHES), ckpt_path=path)
    return trainer


def _stop_and_resume(rank, size, stacks, make, folder):
    found = {}
    for number, (name, stack) in enumerate(stacks.items()):
        path = Path(folder) / f"{number}.ckpt"
        torch.manual_seed(rank)
        whole = weights_of(_fit(size, stack, make, callbacks=[SavesAt(4, path)]))
        torch.manual_seed(77)
        found[name] = whole, weights_of(_fit(size, stack, make, path=path))
    return found


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_a_checkpoint_is_one_model_for_any_strategy"
)
@pytest.mark.every_push("two processes")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stacks", "make"),
    [(2, STACKS, AdamNormalized), (4, STACKS_OF_FOUR, Adam)],
    ids=["two processes", "four processes"],
)
def test_the_same_processes_resume_between_two_meetings_as_if_they_had_never_stopped(size, stacks, make, tmp_path):
    for result in run_in_processes(_stop_and_resume, size, stacks, make, tmp_path):
        for name, (whole, resumed) in result.items():
            differing = [key for key in whole if not torch.equal(whole[key], resumed[key])]
            assert not differing, f"{name} differs in {differing}"


def _fit_twice(rank, size, strategies):
    found = {}
    for name, strategy in strategies.items():
        trainer, model = sg.Trainer(strategy=strategy, devices=size, **QUIET), Net()
        for epochs in (1, 2):
            trainer.max_epochs = epochs
            trainer.fit(model, share(trainer, BATCHES[:5]))
        found[name] = weights_of(trainer)
    return found


@pytest.mark.slow
def test_a_second_fit_goes_on_from_the_average():
    """Where the period and the outer step stood; an averaging round that was under way is over."""
    on_the_way = {}
    meets = {"diloco": outer_steps(3), "async_averaging": late(3, 3, on_the_way), "local_sgd": averaging(3)}
    results = run_in_processes(_fit_twice, 2, {name: STACKS[name] for name in meets})

    for name, meet in meets.items():
        copies = Copies(2).train(BATCHES[:5], meet)
        copies.unite()
        on_the_way.clear()
        reference = copies.train(BATCHES[:5], meet).average()
        weights = weights_on_all_ranks([{"weights": result[name]} for result in results])
        assert relative_difference(weights, reference) < 1e-6, name


class LooksAtStart(sg.Callback):
    """Keeps the model and the momentum that a resumed fit begins with."""

    @sg.hookimpl
    def on_train_start(self, trainer, module):
        momentum = [trainer.optimizers[0].state[p]["momentum_buffer"].clone() for p in module.parameters()]
        self.found = copy.deepcopy(dict(module.state_dict())), momentum, trainer.run.stack.strategies[0].plugin


def _save_at_four(rank, size, strategy, path):
    _fit(size, strategy, Net, callbacks=[SavesAt(4, path)])


def _begin_with(rank, size, strategy, path):
    looks = LooksAtStart()
    trainer = _fit(size, strategy, Net, path=path, callbacks=[looks], max_epochs=2)
    weights, momentum, outer = looks.found
    return weights, momentum, trainer.global_step, getattr(outer, "steps", None)


@pytest.mark.every_push("single_device-1-diloco-2", "diloco-4-in teams-4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "saving", "loaded", "loading"),
    [
        ("diloco", 2, "single_device", 1),
        ("single_device", 1, "diloco", 2),
        ("diloco", 2, "diloco", 3),
        ("diloco", 4, "in teams", 4),
    ],
)
def test_a_checkpoint_is_one_model_for_any_strategy(saved, saving, loaded, loading, tmp_path):
    stacks = {
        "diloco": {"name": "diloco", "period": 3},
        "in teams": [{"name": "diloco", "period": 3, "team_size": 2}, "ddp"],
        "single_device": "single_device",
    }
    path = tmp_path / "four.ckpt"
    run_in_processes(_save_at_four, saving, stacks[saved], path)
    copies = Copies(saving)
    copies.train(BATCHES[:4], outer_steps(3) if saved == "diloco" else lambda step, models: None)
    parameters = zip(*(model.parameters() for model in copies.models), strict=True)
    states = [optimizer.state for optimizer in copies.optimizers]

    for weights, momentum, steps, counted in run_in_processes(_begin_with, loading, stacks[loaded], path):
        assert relative_difference(weights, copies.average()) < 1e-6
        for mine, same in zip(momentum, parameters, strict=False):
            mean = torch.stack([state[p]["momentum_buffer"] for state, p in zip(states, same, strict=True)]).mean(0)
            assert torch.allclose(mine, mean, atol=1e-6)
        assert steps > 4
        assert counted == (None if loaded == "single_device" else steps if saved == "diloco" else steps - 4)


def _sizes(rank, size, folder):
    sizes = []
    for exact in (True, False):
        path = Path(folder) / f"{exact}.ckpt"
        _fit(size, {"name": "diloco", "period": 3, "exact_resume": exact}, Net, callbacks=[SavesAt(4, path)])
        _fit(size, {"name": "diloco", "period": 3, "exact_resume": exact}, Net, path=path)
        sizes.append(path.stat().st_size if rank == 0 else 0)
    return sizes


@pytest.mark.slow
def test_what_each_process_has_of_its_own_can_be_left_out(tmp_path):
    (whole, small), _ = run_in_processes(_sizes, 2, tmp_path)

    model = PARAMETERS * 4
    # Left out: two models, their momenta, and one anchor and outer momentum.
    assert whole - small > 6 * model


def _continue_by_hand(rank, size):
    """A loop of one's own: `Run.save` writes the average."""
    with in_empty_folder() as folder, sg.Run(strategy="local_sgd", devices=size, accelerator="cpu") as run:
        module = Net()
        model, optimizer = run.setup(module, module.configure_optimizers())
        for x, y in BATCHES[:3]:
            run.backward(loss_of(model(x.chunk(size)[rank]), y.chunk(size)[rank]))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        own = copy.deepcopy(dict(module.state_dict()))
        run.save(folder / "three.ckpt", model=model, optimizer=optimizer)
        assert all(torch.equal(own[name], tensor) for name, tensor in module.state_dict().items())
        run.collectives.barrier()
        return torch.load(folder / "three.ckpt", weights_only=True)["state_dict"] if rank == 0 else None


@pytest.mark.slow
def test_a_loop_of_ones_own_saves_the_average():
    weights, _ = run_in_processes(_continue_by_hand, 2)

    reference = Copies(2).train(BATCHES[:3], averaging(8))
    assert relative_difference(weights, reference.average()) < 1e-6


# --- What is sent ------------------------------------------------------------------------------------------------


def _count(rank, size, strategies):
    counts = {}
    for name, (strategy, make) in strategies.items():
        sent = EveryBatch(lambda trainer: bytes_sent() or 0)
        trainer = sg.Trainer(strategy=strategy, devices=size, callbacks=[sent], **QUIET)
        trainer.run.connect()
        trainer.fit(make(), share(trainer, BATCHES[:8]))
        counts[name] = {k: c.payload for (k, by), c in trainer.run.collectives.traffic.counts.items() if by == "models"}
        counts[name]["by batch"] = [after - before for before, after in itertools.pairwise(sent.results)]
        trainer.close()
    return counts


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_training_equals_copies_that_meet_by_hand"
)
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_bytes_are_those_of_the_meetings(size):
    model, piece = 4 * PARAMETERS, -(-PARAMETERS // size) + 4
    strategies = {
        "local_sgd": {"name": "local_sgd", "period": 4},
        "fp16": {"name": "diloco", "period": 4, "compress": "fp16"},
        "int8": {"name": "diloco", "period": 4, "compress": "int8"},
        "ring": {"name": "decentralized", "period": 4},
        "random": {"name": "decentralized", "period": 4, "topology": "random"},
        "async": {"name": "async_averaging", "interval_steps": 4},
    }
    expected = {
        "local_sgd": {"all_reduce": 2 * model},
        "fp16": {"all_reduce": model},
        "int8": {"exchange": 2 * size * piece, "all_gather": 2 * piece},
        "ring": {"send": 2 * model * (1 if size == 2 else 2), "all_reduce": model},  # and once at the end
        "async": {"all_reduce": 3 * model},
    }
    results = run_in_processes(_count, size, {name: (strategy, Net) for name, strategy in strategies.items()})

    for result in results:
        for name, sent in result.items():
            assert sent.pop("broadcast") == model, "the start"
            by_batch = sent.pop("by batch")
            if any(by_batch) and name == "local_sgd":  # meets after the fourth batch and the eighth
                assert max(by_batch[0], by_batch[1], by_batch[4]) < model / 4 < by_batch[2], by_batch
            if name in expected:
                assert sent == expected[name], name
    if size == 3:  # one of three rests
        assert sum(result["random"].get("send", 0) for result in results) == 2 * 2 * model


# --- The comm hook -----------------------------------------------------------------------------------------------


@pytest.mark.when_changed(
    "plugins/outer/", "plugins/testing/", guard="tests/conformance/test_comm_hooks.py::TestPowerSGD"
)
class TestPostLocalSGD(PostLocalSGDConformance): ...


def _post_local(rank, size, cases):
    return {
        name: train(rank, size, Net, BATCHES, {"strategy": "ddp", "comm_hook": {"name": "post_localsgd", **options}})
        for name, options in cases.items()
    }


@pytest.mark.slow
@pytest.mark.every_push("2-1")
@pytest.mark.parametrize(("size", "subgroup"), [(2, 1), (4, 2)])
def test_gradients_are_averaged_by_all_then_by_subgroups_and_parameters_now_and_then(size, subgroup):
    cases = {
        f"{start} {period}": {
            "model_averaging_period": period, "start_localSGD_iter": start, "subgroup_size": subgroup,
        }
        for start, period in ((4, 2), (0, 3))
    }  # fmt: skip
    results = run_in_processes(_post_local, size, cases)

    for name, options in cases.items():
        start, period = options["start_localSGD_iter"], options["model_averaging_period"]
        reference = Copies(size // subgroup).train(BATCHES, averaging(period, start), together_until=start)
        weights = weights_on_all_ranks([result[name] for result in results])
        assert relative_difference(weights, reference.average()) < 1e-6, name


def _post_local_by_default(rank, size, nodes):
    os.environ.update(
        LOCAL_RANK=str(rank // nodes), LOCAL_WORLD_SIZE=str(size // nodes), NODE_RANK=str(rank % nodes),
        GROUP_RANK=str(rank % nodes),
    )  # fmt: skip
    options = {"name": "post_localsgd", "model_averaging_period": 3, "start_localSGD_iter": 2}
    arguments = {"strategy": "ddp", "comm_hook": options, "num_nodes": nodes, "devices": size // nodes}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = train(rank, size, Net, BATCHES, arguments)
    return result | {"said": [str(each.message) for each in warned if "subgroup" in str(each.message)]}


@pytest.mark.slow
def test_by_default_a_subgroup_is_the_processes_of_a_node_as_in_torch():
    one_node = run_in_processes(_post_local_by_default, 2, 1)
    plain, norms = train_module_plainly(Net(), BATCHES)
    assert max(norms) > 1

    assert relative_difference(weights_on_all_ranks(one_node), plain) < 1e-6
    assert [len(each["said"]) for each in one_node] == [1, 0]
    assert "all 2 processes are on one node, which is one subgroup" in one_node[0]["said"][0]

    two_nodes = run_in_processes(_post_local_by_default, 2, 2)
    reference = Copies(2).train(BATCHES, averaging(3, 2), together_until=2)

    assert relative_difference(weights_on_all_ranks(two_nodes), reference.average()) < 1e-6
    assert not any(each["said"] for each in two_nodes)


# --- Refusals ----------------------------------------------------------------------------------------------------

ALONE = {
    "ddp around": (["ddp", "diloco"], {}, "cannot wrap another strategy"),
    "two outer": (["diloco", "local_sgd"], {}, "cannot be used with"),
    "period 0": ({"name": "local_sgd", "period": 0}, {}, "strategy.local_sgd.period is 0; expected at least 1"),
    "unknown compression": ({"name": "diloco", "compress": "int4"}, {}, "'fp16' or 'int8'"),
    "momentum": ({"name": "diloco", "outer_momentum": 1.5}, {}, "expected a number from 0 to 1"),
    "delay": ({"name": "async_averaging", "interval_steps": 2, "delay_steps": 3}, {}, "one round at a time"),
    "no period": ("ddp", {"comm_hook": "post_localsgd"}, "model_averaging_period is not set"),
    "no buckets": ("fsdp", {"comm_hook": {"name": "post_localsgd", "model_averaging_period": 2}}, "gradient-buckets"),
    "hook in teams": (
        ["diloco", "ddp"], {"comm_hook": {"name": "post_localsgd", "model_averaging_period": 2}}, "provides 'teams'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_what_cannot_work_is_refused_before_any_process_starts(case):
    strategy, more, words = ALONE[case]
    with pytest.raises(ConfigError, match=words):
        sg.Run(strategy=strategy, devices=4, accelerator="cpu", **more)


class Zero(Net):
    def configure_optimizers(self):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=1e-3)


class Thaws(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.net[0].requires_grad_(batch_idx > 2)


class Half(Net):
    def __init__(self):
        super().__init__()
        self.bfloat16()

    def forward(self, x):
        return self.net(x.bfloat16())


TOGETHER = {
    "no divisor": ({"name": "diloco", "team_size": 3}, Net, {}, "trains in one process"),
    "no divisor of the processes": ([{"name": "diloco", "team_size": 3}, "ddp"], Net, {}, "team_size is 3 and the run"),
    "one team": ([{"name": "diloco", "team_size": 4}, "ddp"], Net, {}, "one team of the run's 4 processes"),
    "one node": (["diloco", "ddp"], Net, {}, "team_size is 4 by default"),
    "teams of one strategy for one": ({"name": "diloco", "team_size": 2}, Net, {}, "trains in one process"),
    "LBFGS": ("local_sgd", Lbfgs, {}, "LBFGS, which evaluates the model"),
    "a distributed optimizer": ("local_sgd", Zero, {}, "synchronizes the parameters of all ranks itself"),
    "shards by hand": ([{"name": "local_sgd", "team_size": 2}, "fsdp"], ByHand, {}, "uses manual optimization"),
    "thawed": ({"name": "local_sgd", "period": 2}, Thaws, {}, "was frozen when training began"),
    "16 bits": ({"name": "diloco", "compress": "fp16"}, Half, {}, "16 bits already"),
    "one subgroup": ("ddp", Net, {"comm_hook": POST | {"subgroup_size": 4}}, "one subgroup"),
    "odd subgroups": ("ddp", Net, {"comm_hook": POST | {"subgroup_size": 3}}, "expected a divisor"),
    "LBFGS with the hook": ("ddp", Lbfgs, {"comm_hook": POST}, "LBFGS, which evaluates the model"),
}


def _refusals(rank, size):
    said = {}
    for name, (strategy, make, more, _) in TOGETHER.items():
        trainer = sg.Trainer(strategy=strategy, devices=size, **QUIET, **more)
        said[name] = outcome(lambda trainer=trainer, make=make: trainer.fit(make(), BATCHES[:8]))
    return said


@pytest.mark.when_changed(
    "plugins/outer/", guard="tests/plugins/test_outer.py::test_what_cannot_work_is_refused_before_any_process_starts"
)
@pytest.mark.slow
def test_what_cannot_work_is_refused_on_all_ranks():
    for said in run_in_processes(_refusals, 4):
        for name, (*_, words) in TOGETHER.items():
            assert said[name].startswith("refused: "), (name, said[name])
            assert words in said[name], name


def _two_modules(rank, size):
    with sg.Run(strategy="local_sgd", devices=size, accelerator="cpu") as run:
        first, second = Net(), Net()
        run.setup(first, first.configure_optimizers())
        return outcome(lambda: run.setup(second, second.configure_optimizers()))


@pytest.mark.slow
def test_two_modules_in_a_loop_of_ones_own_are_refused():
    for said in run_in_processes(_two_modules, 2):
        assert "expected one module in a run" in said


def _short(rank, size):
    with pytest.warns(UserWarning, match="without a sync") if rank == 0 else pytest.MonkeyPatch.context():
        train(rank, size, Net, BATCHES[:3], {"strategy": "diloco"})


@pytest.mark.slow
def test_a_run_shorter_than_a_period_is_told():
    run_in_processes(_short, 2)


def _snippets(rank, size):
    page = (Path(__file__).parents[2] / "docs" / "local-updates.md").read_text()
    steps = []
    with in_empty_folder() as folder:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(64)), batch_size=4)
        names = {"folder": folder, "model": Net(), "loader": loader}
        for source in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            if "sg.Trainer(" not in source:  # a package in examples/, whose tests run
                continue
            exec(source, names)
            steps.append(names["trainer"].global_step)
            names["trainer"].close()
    return steps


@pytest.mark.when_changed(
    "plugins/outer/", "docs/", guard="tests/plugins/test_outer.py::test_training_equals_copies_that_meet_by_hand"
)
@pytest.mark.slow
def test_what_the_page_shows_runs():
    assert run_in_processes(_snippets, 4) == [[4, 8]] * 4
