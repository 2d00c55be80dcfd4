"""Comm hooks and outer strategies where few look: several fits, several modules, own loops, odd parameters, odd moments."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem.strategies import DDPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches, loss_of, relative_difference, train_plainly
from stratagem_testing.training import outcome, share, train, weights_of, weights_on_all_ranks

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(8, 24)
NO_SHARD = {"name": "fsdp", "sharding_strategy": "NO_SHARD"}


def fit_again(trainer, module, batches):
    trainer.max_epochs += 1
    trainer.fit(module, share(trainer, batches))


# --- Several fits, several modules -------------------------------------------------------------------------------


def _validates_then_fits_twice(rank, world_size):
    trainer, module = (
        sg.Trainer(strategy=NO_SHARD, comm_hook="allreduce", devices=world_size, max_epochs=1, **QUIET),
        Net(),
    )
    trainer.validate(module, share(trainer, BATCHES[:1]))
    trainer.fit(module, share(trainer, BATCHES[:4]))
    fit_again(trainer, module, BATCHES[4:])
    return {"weights": weights_of(trainer)}


def test_hooks_under_fsdp_serve_every_call_of_a_trainer():
    weights = weights_on_all_ranks(run_in_processes(_validates_then_fits_twice, 2))

    assert relative_difference(weights, train_plainly(BATCHES)[0]) < 1e-6


class Asks(sg.Callback):
    """Notes how many steps the first strategy or comm hook that counts them has counted when a fit begins."""

    @sg.hookimpl
    def on_train_start(self, trainer, run):
        hooks = [choice.plugin for choice in run.stack.of("comm_hook")]
        counted = hooks[0].steps(run) if hooks else run.stack.strategies[0].plugin.steps
        trainer.callback_metrics["steps before"] = float(counted)


@pytest.mark.every_push("diloco")
@pytest.mark.parametrize(
    "chosen",
    [
        {"strategy": "ddp", "comm_hook": {"name": "topk", "ratio": 0.2}},
        {"strategy": "ddp", "comm_hook": {"name": "powersgd", "start_powerSGD_iter": 6}},
        {"strategy": {"name": "local_sgd", "period": 6}},
        {"strategy": {"name": "diloco", "period": 3}},
    ],
    ids=["topk", "powersgd", "local_sgd", "diloco"],
)
def test_a_launcher_that_brings_results_home_brings_what_hooks_and_strategies_remember(chosen):
    trainer = sg.Trainer(max_epochs=1, devices=2, launcher="fork", callbacks=[Asks()], **chosen, **QUIET)
    module, loader = Net(), DataLoader(TensorDataset(*data(64)), batch_size=8)
    told = []
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, loader)
        told.append(trainer.callback_metrics["steps before"])

    assert told == [0, 4]


def _two_modules(rank, world_size):
    run = sg.Run(strategy="ddp", devices=world_size, accelerator="cpu")
    one, other = Net(seed=0), Net(seed=1)
    first, optimizer = run.setup(one, one.configure_optimizers())
    second, _ = run.setup(other, other.configure_optimizers())
    x, y = BATCHES[0]
    expected = one.net(x).detach()
    got = first(x)
    run.backward(loss_of(got, y))
    run.optimizer_step(optimizer)
    moved = bool((one.net(x) - expected).abs().max() > 0)
    same = torch.allclose(second(x), other.net(x))
    run.close()
    return torch.allclose(got, expected), moved, same


def test_each_of_two_modules_of_a_run_is_itself():
    assert run_in_processes(_two_modules, 2) == [(True, True, True)] * 2


def _saves_and_loads(rank, world_size, folder):
    def make():
        run = sg.Run(strategy="ddp", devices=world_size, comm_hook={"name": "topk", "ratio": 0.1}, accelerator="cpu")
        module = Net()
        return (run, module, *run.setup(module, module.configure_optimizers()))

    def norm(run):
        return run.stack.of("comm_hook")[0].plugin.statistics(run)["error_norm"]

    run, module, model, optimizer = make()
    for x, y in BATCHES[:3]:
        run.backward(loss_of(model(x + rank), y))
        run.optimizer_step(optimizer)
        optimizer.zero_grad()
    before = norm(run)
    run.save(folder / "own.ckpt", model=model, optimizer=optimizer)
    run.close()
    run, module, model, optimizer = make()
    run.load(folder / "own.ckpt", model=model, optimizer=optimizer)
    loaded = norm(run)
    run.close()
    return before, loaded


def test_a_custom_loop_saves_residuals_on_every_rank(tmp_path):
    results = run_in_processes(_saves_and_loads, 2, tmp_path)

    assert all(before == loaded > 0 for before, loaded in results)
    assert results[0] != results[1], "each rank has other residuals"


# --- Steps that are not made -------------------------------------------------------------------------------------


class Constant(sg.Module):
    """A constant gradient for one parameter; the other's is infinite in step `sick`."""

    def __init__(self, sick):
        super().__init__()
        self.steady, self.hot, self.sick = nn.Parameter(torch.zeros(100)), nn.Parameter(torch.zeros(200)), sick
        self.slope = torch.linspace(1, 2, 100)

    def training_step(self, batch, batch_idx):
        heat = float("inf") if batch_idx == self.sick else 1.0
        return (self.steady * self.slope).sum() + (self.hot * heat).sum() + 1.0

    def configure_optimizers(self):
        return torch.optim.SGD([{"params": [self.steady], "lr": 1.0}, {"params": [self.hot], "lr": 0.0}])


def _accounts(rank, world_size, strategy, precision, sick):
    hook = {"name": "topk", "ratio": 0.1}
    trainer = sg.Trainer(
        strategy=strategy, comm_hook=hook, precision=precision, devices=world_size, max_epochs=1, **QUIET
    )
    module = Constant(sick)
    trainer.fit(module, [torch.zeros(1)] * 40)
    skipped, feedback = (
        trainer.position.skipped_steps,
        trainer.run.stack.of("comm_hook")[0].plugin.feedback(trainer.run),
    )
    residual = trainer.run.collectives.all_reduce(feedback.residuals["steady"] / (feedback.scale or 1.0), "mean")
    return skipped, (residual - module.steady.detach()) / module.slope


@pytest.mark.every_push("scale that grows-ddp_sharded")
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
@pytest.mark.parametrize(
    ("precision", "sick"),
    [("32-true", 0), ({"name": "16-mixed", "growth_interval": 5}, None)],
    ids=["sick gradient", "scale that grows"],
)
def test_what_is_applied_and_the_residuals_are_the_gradients_of_the_steps_that_were_made(strategy, precision, sick):
    strategy = {"name": strategy, "bucket_cap_mb": 0.0004}
    for skipped, accounted in run_in_processes(_accounts, 2, strategy, precision, sick):
        assert skipped == (sick is not None)
        assert torch.allclose(accounted, torch.full((100,), 40.0 - skipped), rtol=1e-3)


def test_nothing_of_a_step_that_is_skipped_is_paid_later():
    strategy = {"name": "ddp", "bucket_cap_mb": 0.0004}
    for skipped, accounted in run_in_processes(_accounts, 2, strategy, "32-true", 20):
        assert skipped == 1
        assert accounted.max() < 39.01
        assert accounted.min() > 25, "residuals are dropped, and no more"


# --- Odd parameters ----------------------------------------------------------------------------------------------


class Complex(Net):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.turn = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64, generator=generator))

    def forward(self, x):
        return super().forward(x + 0.1 * (x.to(torch.complex64) @ self.turn).abs())


def _fits(rank, world_size, make, arguments):
    return train(rank, world_size, make, BATCHES, arguments | {"accelerator": "cpu"})


@pytest.mark.every_push("ddp_sharded")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
def test_complex_gradients_pass_every_hook(strategy):
    results = run_in_processes(_fit_with_every_hook, 2, strategy)
    exact = results[0].pop("allreduce")
    results[1].pop("allreduce")

    for name, weights in results[0].items():
        assert all(torch.equal(weights[each], results[1][name][each]) for each in weights), name
        assert relative_difference(weights, exact) < (0.5 if name == "one_bit" else 0.2), name
        assert not torch.equal(weights["turn"], exact["turn"]), f"{name} lost nothing"


def _fit_with_every_hook(rank, world_size, strategy):
    late = {"one_bit": {"start_iter": 2}, "powersgd": {"start_powerSGD_iter": 2}, "topk": {"ratio": 0.5}}
    late["batched_powersgd"] = late["powersgd"]
    names = ("allreduce", "fp16_compress", "bf16_compress", "int8", *late)
    hooks = {name: {"name": name} | late.get(name, {}) for name in names}
    return {
        name: _fits(rank, world_size, Complex, {"strategy": strategy, "comm_hook": [hook]})["weights"]
        for name, hook in hooks.items()
    }


class Sparse(sg.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        return self.table(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _refusal(rank, world_size, make, arguments, batches=None):
    trainer = sg.Trainer(devices=world_size, max_epochs=1, **arguments, **QUIET)
    return outcome(lambda: trainer.fit(make(), batches or share(trainer, BATCHES)))


class Scaled(Sparse):
    """Scales the rows of its batch in forward."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, max_norm=1.0)


def _refusals(rank, world_size, cases):
    return [_refusal(rank, world_size, make, arguments, [torch.arange(4)] * 2) for make, arguments in cases]


def test_tables_that_ranks_would_step_apart_are_refused_by_name():
    cases = [(Sparse, {"strategy": "ddp", "comm_hook": "int8"})]
    cases += [(Scaled, {"strategy": strategy}) for strategy in ("ddp", "ddp_sharded", "fsdp")]
    for sparse, *scaled in run_in_processes(_refusals, 2, cases):
        assert sparse.startswith("refused: 'table' has sparse gradients, and comm hooks send dense ones")
        for said in scaled:
            assert said.startswith("refused: 'table' has max_norm=1.0: forward writes into the rows that a batch uses")


class Thaws(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 4:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["ddp", {"name": "local_sgd", "period": 100}])
def test_a_parameter_that_is_thawed_where_nobody_notices_is_an_error(strategy):
    for said in run_in_processes(_refusal, 2, Thaws, {"strategy": strategy}):
        assert said.startswith("refused: 'net.0.")
        assert "was frozen when training began and is trained now" in said


def _thaws_between_fits(rank, world_size):
    strategy = {"name": "diloco", "period": 2}
    trainer, module = sg.Trainer(strategy=strategy, devices=world_size, max_epochs=1, **QUIET), Net()
    module.net[0].requires_grad_(False)
    trainer.fit(module, share(trainer, BATCHES))
    before = module.net[0].weight.clone()
    module.net[0].requires_grad_(True)
    fit_again(trainer, module, BATCHES)
    return {"weights": weights_of(trainer), "moved": not torch.equal(before, module.net[0].weight)}


def test_diloco_takes_up_what_is_thawed_between_two_fits():
    results = run_in_processes(_thaws_between_fits, 2)

    weights_on_all_ranks(results)
    assert all(result["moved"] for result in results)


# --- What does not go together -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "diloco", "callbacks": ["ema"]}, "callback 'ema' cannot be used with strategy 'diloco'"),
        ({"strategy": "ddp_sharded", "comm_hook": "noop"}, "comm_hook 'noop' needs 'local-steps'"),
        (
            {"strategy": NO_SHARD, "comm_hook": {"name": "post_localsgd", "model_averaging_period": 4}},
            "comm_hook 'post_localsgd' needs 'local-steps'",
        ),
        ({"strategy": "ddp", "comm_hook": ["int8", "topk"]}, "'int8' and comm_hook 'topk' must both be the last"),
        ({"strategy": {"name": "ddp", "timeout": 0}}, "strategy.ddp.timeout is .*expected more than 0 seconds"),
        ({"strategy": "fsdp", "comm_hook": "int8"}, 'set strategy.fsdp.sharding_strategy to "HYBRID_SHARD"'),
    ],
)
def test_what_cannot_work_together_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(devices=2, **(QUIET | arguments))


# --- Hooks of torch's, on their way to other processes -----------------------------------------------------------


def own_average(state, bucket):
    return default_hooks.allreduce_hook(None, bucket)


LITERAL = {
    "PowerSGD": {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=3),
    },
    "a hook of one's own in a wrapper of torch's": {
        "ddp_comm_hook": own_average,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
}


@pytest.mark.parametrize("options", LITERAL.values(), ids=LITERAL)
def test_the_literal_form_travels_and_trains(options):
    run = sg.Run(strategy=DDPStrategy(**options), accelerator="cpu")
    copied = pickle.loads(pickle.dumps(run.stack))  # as a launcher that starts fresh processes does
    assert [choice.name for choice in copied.of("comm_hook")] == [choice.name for choice in run.stack.of("comm_hook")]

    results = run_in_processes(_fits, 2, Net, {"strategy": DDPStrategy(**options)})

    assert relative_difference(weights_on_all_ranks(results), train_plainly(BATCHES)[0]) < 0.1
