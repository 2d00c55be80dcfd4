"""What a module may define and call: ends of steps, compilation, hyper-parameters, metrics that compute themselves."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

import stratagem as sg
from selection import HEAVY
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, train_module_plainly
from stratagem_testing.training import share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(4, 12)


# --- Ends of steps -----------------------------------------------------------------------------------------------


class Ending(Net):
    """The step returns what the loss is made of; the end makes it."""

    def training_step(self, batch):
        x, y = batch
        return self(x), y

    def training_step_end(self, output):
        return self.criterion(*output)

    def validation_step(self, batch):
        return batch[0].sum()

    def validation_step_end(self, output):
        self.log("doubled", 2 * output, reduce_fx="sum")

    def test_step(self, batch):
        return batch[0].sum()

    def test_step_end(self, output):
        self.log("tripled", 3 * output, reduce_fx="sum")


def test_an_end_receives_what_the_step_returned_and_stands_for_it():
    module, trainer = Ending(), sg.Trainer(**QUIET)
    trainer.fit(module, BATCHES)
    plain, _ = train_module_plainly(Net(), BATCHES)
    total = float(sum(x.sum() for x, _ in BATCHES))

    assert all(torch.equal(weights_of(trainer)[name], plain[name]) for name in plain)
    assert trainer.validate(module, BATCHES)[0]["doubled"] == pytest.approx(2 * total, rel=1e-5)
    assert trainer.test(module, BATCHES)[0]["tripled"] == pytest.approx(3 * total, rel=1e-5)


# --- Compilation -------------------------------------------------------------------------------------------------


class Counting(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _compiled(rank, world_size, strategy):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    trainer = sg.Trainer(strategy=strategy, devices=world_size, **QUIET)
    trainer.fit(torch.compile(Counting(), backend=backend), share(trainer, BATCHES))
    return weights_of(trainer), len(graphs)


@pytest.mark.every_push("ddp-2")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("single_device", 1), ("ddp", 2)])
def test_a_compiled_module_trains_as_the_module_itself(strategy, world_size):
    plain, _ = train_module_plainly(Net(), BATCHES)
    for weights, graphs in run_in_processes(_compiled, world_size, strategy):
        assert graphs > 0
        assert all(torch.allclose(weights[name], plain[name], atol=1e-6) for name in plain)


@pytest.mark.slow
def test_a_compiled_part_is_the_users_business():
    module = Net()
    module.net = torch.compile(module.net, backend="aot_eager")
    trainer = sg.Trainer(**QUIET)
    trainer.fit(module, BATCHES)
    plain, _ = train_module_plainly(Net(), BATCHES)

    found = [parameter.detach() for parameter in module.parameters()]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, plain.values(), strict=True))


# --- Hyper-parameters --------------------------------------------------------------------------------------------


class Configured(Net):
    def __init__(self, width=3, rate=0.1, extra=None, sizes=(1, 2)):
        super().__init__()
        self.save_hyperparameters(ignore="extra")
        self.width = self.hparams.width


def test_hyper_parameters_are_items_and_attributes_and_come_back(tmp_path):
    module = Configured(width=5, extra=object())
    assert module.hparams == {"width": 5, "rate": 0.1, "sizes": (1, 2)}
    assert module.hparams.rate == module.hparams["rate"] == 0.1
    with pytest.raises(AttributeError, match="no hyper-parameter is called 'widht'; did you mean 'width'"):
        _ = module.hparams.widht

    trainer = sg.Trainer(**QUIET)
    trainer.fit(module, BATCHES)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = Configured.load_from_checkpoint(tmp_path / "a.ckpt", rate=0.2)

    assert again.hparams == {"width": 5, "rate": 0.2, "sizes": (1, 2)}
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


class Misspelt(Net):
    def __init__(self, rate=0.1):
        super().__init__()
        self.save_hyperparameters("raet")


def test_a_hyper_parameter_that_is_not_an_argument_is_refused():
    with pytest.raises(ConfigError, match="names 'raet'; expected arguments of .*; did you mean 'rate'"):
        Misspelt()


# --- Metrics that compute themselves -----------------------------------------------------------------------------


class Measured(Net):
    def __init__(self):
        from torchmetrics import MeanSquaredError

        super().__init__()
        self.train_error, self.error = MeanSquaredError(), MeanSquaredError()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.train_error(self(x).detach().squeeze(1), y.squeeze(1))
        self.log("train_error", self.train_error, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error.update(self(x).squeeze(1), y.squeeze(1))
        self.log("error", self.error)

    def on_train_epoch_end(self):
        self.seen.append({k: float(v) for k, v in self.trainer._state.stage_metrics.step_values().items()})


def _measure(rank, world_size):
    module = Measured()
    trainer = sg.Trainer(strategy="ddp" if world_size > 1 else "auto", devices=world_size, **QUIET)
    batches = part(BATCHES, rank, world_size)
    # Ranks see different numbers of samples: a mean of their means would be another number.
    batches = [(x[: len(x) - rank * 2], y[: len(y) - rank * 2]) for x, y in batches]
    trainer.fit(module, batches, batches)
    metrics = dict(trainer.callback_metrics)
    results = [trainer.validate(module, batches)[0]["error"] for _ in range(2)]
    module.eval()
    with torch.no_grad():
        pairs = [((module(x) - y) ** 2).sum() for x, y in batches]
    return results, float(sum(pairs)), sum(len(x) for x, _ in batches), module.seen, metrics


@pytest.mark.slow
@HEAVY
@pytest.mark.parametrize("world_size", [1, 2])
def test_metric_objects_are_computed_over_the_epoch_and_all_ranks(world_size):
    importlib.import_module("torchmetrics")  # seconds: once here, and not in each process
    ranks = run_in_processes(_measure, world_size)
    exact = sum(squares for _, squares, *_ in ranks) / sum(count for _, _, count, *_ in ranks)
    for results, _, _, seen, metrics in ranks:
        assert results == pytest.approx([exact, exact])
        assert "train_error_step" in seen[0]
        assert {"train_error_epoch", "train_error_step", "error"} <= set(metrics)
    assert len({float(metrics["train_error_epoch"]) for *_, metrics in ranks}) == 1


class Updated(Measured):
    def training_step(self, batch, batch_idx):
        x, y = batch
        self.train_error.update(self(x).detach().squeeze(1), y.squeeze(1))
        self.log("train_error", self.train_error)


class Several(Net):
    def validation_step(self, batch, batch_idx):
        from torchmetrics import R2Score

        self.metric = getattr(self, "metric", None) or R2Score(multioutput="raw_values")
        self.metric.update(batch[0], batch[0])
        self.log("r2", self.metric)


@pytest.mark.slow
@HEAVY
def test_metric_objects_that_cannot_be_logged_are_told():
    with pytest.raises(ConfigError, match="MeanSquaredError that was only updated is logged on each step"):
        sg.Trainer(**QUIET).fit(Updated(), BATCHES)
    with pytest.raises(ConfigError, match=r"R2Score.compute\(\) returned .*; expected one number"):
        sg.Trainer(**QUIET).validate(Several(), BATCHES)


def test_tools_that_read_all_attributes_can_be_used_outside_a_trainer():
    module = Net()
    traced = torch.jit.trace(module, BATCHES[0][0])

    assert torch.equal(traced(BATCHES[0][0]), module(BATCHES[0][0]))
    assert {"trainer", "device_mesh"}.isdisjoint(name for name, _ in inspect.getmembers(module))
