"""Every number that can be logged is reduced exactly, or refused in one sentence."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from stratagem_testing import run_in_processes
from stratagem_trainer.api.monitored import monitored

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def tensors(dtype):
    wide = dtype if dtype is torch.uint64 else None
    return lambda numbers: [torch.tensor(number, dtype=wide).to(dtype) for number in numbers]


SMALL = [3, 100, 100, 7, 120, 90]  # their sum does not fit into 8 bits
TRUTHS = [1, 1, 1, 1, 0, 1]
COUNTS = [2**53 + 1, 3, 2**40 + 1, 5, 0, 1]  # neither do these fit into a double
SIGNED = [2**24 + 1, -3, 5, -(2**24), 1, 7]

#: What is logged batch by batch, by kind of value: how to make it, and the numbers.
KINDS = {
    **{str(dtype).removeprefix("torch."): (tensors(dtype), SMALL) for dtype in (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.float16, torch.bfloat16,
        torch.float32, torch.float64, torch.float8_e5m2,
    )},
    "bool": (tensors(torch.bool), TRUTHS),
    "int64": (tensors(torch.int64), COUNTS),
    "uint64": (tensors(torch.uint64), [2**63 + 1, *COUNTS[1:]]),
    "large int64": (tensors(torch.int64), [2**62, 2**62, 2**62, 0, 1, -1]),
    "large float32": (tensors(torch.float32), [2**24, 1, 1, 1, 1, 1]),
    "python bool": (lambda numbers: [bool(number) for number in numbers], TRUTHS),
    "python int": (list, COUNTS),
    "huge python int": (list, [2**80, 1, 2, 3, 4, 5]),
    "python float": (lambda numbers: [number / 8 for number in numbers], SIGNED),
    "numpy bool": (lambda numbers: [numpy.bool_(number) for number in numbers], TRUTHS),
    "numpy uint8": (lambda numbers: [numpy.uint8(number) for number in numbers], SMALL),
    "numpy int64": (lambda numbers: [numpy.int64(number) for number in numbers], COUNTS),
    "numpy float32": (lambda numbers: [numpy.float32(number) for number in numbers], SMALL),
    "numpy array": (lambda numbers: [numpy.array([number]) for number in numbers], SIGNED),
    "mixed": (lambda numbers: [numbers[0], torch.tensor(True), float(numbers[2]), *map(torch.tensor, numbers[3:])],
              [3, 1, 100, 7, 120, 90]),
}  # fmt: skip

REDUCTIONS = {
    "mean": lambda numbers: sum(map(exact, numbers)) / len(numbers),
    "sum": lambda numbers: sum(map(exact, numbers)),
    "max": lambda numbers: max(map(exact, numbers)),
    "min": lambda numbers: min(map(exact, numbers)),
    torch.mean: lambda numbers: sum(map(exact, numbers)) / len(numbers),
    torch.sum: lambda numbers: sum(map(exact, numbers)),
    max: lambda numbers: max(map(exact, numbers)),
    torch.min: lambda numbers: min(map(exact, numbers)),
    torch.median: lambda numbers: statistics.median_low(map(exact, numbers)),
}


def exact(value):
    """Return what `value` is, as Python holds it."""
    if isinstance(value, torch.Tensor) and value.dtype is torch.uint64:
        return int(value.view(torch.int64)) % 2**64
    number = value.item() if hasattr(value, "item") else value
    return int(number) if isinstance(number, bool) else number


def name_of(reduce_fx):
    return reduce_fx if isinstance(reduce_fx, str) else f"{reduce_fx.__module__}.{reduce_fx.__name__}"


class LogsAll(sg.Module):
    """Logs the values of its kinds, one for each batch, with every reduction."""

    def __init__(self, values, **options):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.values, self.options, self.on_steps = values, options, []

    def _log(self, batch_idx, **options):
        for kind, reduce_fx in itertools.product(self.values, REDUCTIONS):
            name = f"{kind} {name_of(reduce_fx)}"
            self.log(name, self.values[kind][batch_idx], reduce_fx=reduce_fx, **options, **self.options)

    def training_step(self, batch, batch_idx):
        self._log(batch_idx, on_step=True, on_epoch=True)
        return self.layer(batch[0]).mean()

    def on_train_batch_end(self):
        self.on_steps.append(
            {name: exact(value) for name, value in self.trainer._state.stage_metrics.step_values().items()}
        )

    def validation_step(self, batch, batch_idx):
        self._log(batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def batches(count=6):
    return DataLoader(TensorDataset(torch.ones(2 * count, 1)), 2)


def nearly(found, wanted):
    """Whether `found` is the number that doubles (or, of ints that fit, 64 bits) hold of `wanted`; NaN is NaN."""
    if math.isnan(wanted):
        return math.isnan(found)
    if isinstance(wanted, int) and -(2**63) <= wanted < 2**63 and not isinstance(found, float):
        return found == wanted
    return math.isclose(float(found), float(wanted), rel_tol=5e-16, abs_tol=0)


def wrong(found, values, suffix=""):
    """Return the names whose reduction is not that of all `values`."""
    return {
        f"{kind} {name_of(fx)}": (found[f"{kind} {name_of(fx)}{suffix}"], wanted)
        for kind, fx in itertools.product(values, REDUCTIONS)
        if not nearly(exact(found[f"{kind} {name_of(fx)}{suffix}"]), wanted := REDUCTIONS[fx](values[kind]))
    }


def made():
    return {kind: make(numbers) for kind, (make, numbers) in KINDS.items()}


@pytest.mark.parametrize("sync_dist", [False, True])
def test_every_dtype_is_reduced_exactly(sync_dist):
    values = made()
    module, trainer = LogsAll(values, sync_dist=sync_dist), sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(module, batches())
    of_training = trainer.published.exact
    trainer.validate(module, batches())

    assert wrong(of_training, values, "_epoch") == {}
    assert wrong(trainer.published.exact, values) == {}
    for batch_idx, seen in enumerate(module.on_steps):
        wanted = {kind: exact(value[batch_idx]) for kind, value in values.items()}
        assert {k: v for k, v in wanted.items() if not nearly(seen[f"{k} mean_step"], v)} == {}


def _on_two(rank, world_size):
    """Return what is wrong of metrics whose values are spread over two ranks: in training by step, and by epoch."""
    values = {kind: [*each[rank::2], each[rank - 2]] for kind, each in made().items()}
    everything = {kind: [*each, each[-2], each[-1]] for kind, each in made().items()}
    module = LogsAll(values, sync_dist=True)
    trainer = sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, use_distributed_sampler=False, **QUIET)
    trainer.fit(module, batches(4))
    found = wrong(trainer.published.exact, everything, "_epoch")
    for batch_idx, seen in enumerate(module.on_steps[:3]):
        both = {kind: each[2 * batch_idx : 2 * batch_idx + 2] for kind, each in made().items()}
        found |= {f"step {batch_idx} {name}": each for name, each in wrong(seen, both, "_step").items()}
    trainer.validate(module, batches(4))
    return found | wrong(trainer.published.exact, everything)


@pytest.mark.slow
def test_every_dtype_is_reduced_exactly_over_ranks():
    """Also where one rank logs whole numbers and the other does not ("mixed")."""
    assert run_in_processes(_on_two, 2) == [{}, {}]


NAN = float("nan")


@pytest.mark.parametrize("numbers", [[NAN, 1.0, 2.0], [1.0, NAN, 2.0], [1.0, 2.0, NAN]], ids=str)
@pytest.mark.parametrize("make", [list, tensors(torch.float32), tensors(torch.float16)])
def test_a_nan_is_not_hidden_by_any_reduction(numbers, make):
    class Logs(LogsAll):
        def validation_step(self, batch, batch_idx):
            for reduce_fx in ("mean", "sum", "max", "min"):
                self.log(reduce_fx, self.values[batch_idx], reduce_fx=reduce_fx)

    (found,) = sg.Trainer(**QUIET).validate(Logs(make(numbers)), batches(3))

    assert all(math.isnan(value) for value in found.values())


def test_reductions_have_the_names_that_users_write():
    class Logs(LogsAll):
        def validation_step(self, batch, batch_idx):
            for reduce_fx in ("avg", "AVG", "Mean", "SUM", "Max"):
                self.log(reduce_fx, self.values[batch_idx], reduce_fx=reduce_fx)

    (found,) = sg.Trainer(**QUIET).validate(Logs([1.0, 2.0, 6.0]), batches(3))

    assert found == {"avg": 3.0, "AVG": 3.0, "Mean": 3.0, "SUM": 9.0, "Max": 6.0}


@pytest.mark.parametrize(("value", "message"), [
    (1j, r"log\('a'\) got 1j"),
    (torch.tensor(1j), r"log\('a'\) got a tensor of complex64; expected a real number"),
    (torch.tensor(1, dtype=torch.complex128), r"log\('a'\) got a tensor of complex128"),
    (numpy.complex64(1), r"log\('a'\) got .*1\+0j"),
    ("1", r"log\('a'\) got '1'"),
    (None, r"log\('a'\) got None"),
    (numpy.array([1, 2]), r"log\('a'\) got an array of shape \(2,\); expected one number"),
    (torch.ones(2), r"log\('a'\) got a tensor of shape \(2,\); expected one number"),
    (torch.ones(0), r"log\('a'\) got a tensor of shape \(0,\); expected one number"),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_what_is_not_one_real_number_is_refused(value, message, first):
    class Logs(LogsAll):
        def validation_step(self, batch, batch_idx):
            self.log("a", value if first or batch_idx else 1.0)

    with pytest.raises(sg.StratagemError, match=message):
        sg.Trainer(**QUIET).validate(Logs({}), batches(2))


@pytest.mark.parametrize(("reduce_fx", "message"), [
    (lambda stacked: stacked, r"the reduce_fx of log\('a'\) returned a tensor of shape \(2,\); expected one number"),
    (lambda stacked: stacked.max(0), r"the reduce_fx of log\('a'\) returned .*max.*; expected one number"),
    ("median", r"log\('a', reduce_fx='median'\)"),
])  # fmt: skip
def test_a_reduction_that_gives_no_number_is_refused(reduce_fx, message):
    class Logs(LogsAll):
        def validation_step(self, batch, batch_idx):
            self.log("a", 1.0, reduce_fx=reduce_fx)

    with pytest.raises(sg.StratagemError, match=message):
        sg.Trainer(**QUIET).validate(Logs({}), batches(2))


class Scores:
    """As an object of torchmetrics: updated in each step, computed once."""

    def __init__(self):
        self.seen = []

    def update(self, value):
        self.seen.append(value)

    def compute(self):
        return torch.tensor(sum(self.seen))

    def reset(self):
        self.seen = []


@pytest.mark.parametrize(("first", "then", "message"), [
    ({"on_step": True}, {"on_epoch": True, "reduce_fx": "sum"}, "on_epoch=True, reduce_fx='sum'"),
    ({}, {"reduce_fx": "max"}, "reduce_fx='max'"),
    ({"reduce_fx": torch.median}, {"reduce_fx": torch.std}, "reduce_fx=std"),
    ({"sync_dist": True}, {}, "sync_dist=False"),
    ({}, {"prog_bar": True}, "prog_bar=True"),
    ({"logger": False}, {}, "logger=True"),
])  # fmt: skip
@pytest.mark.parametrize("later", [1, 4], ids=["next batch", "next epoch"])
def test_other_options_for_a_name_are_refused(first, then, message, later):
    class Logs(LogsAll):
        count = 0

        def training_step(self, batch, batch_idx):
            self.log("a", 1.0, **(first if self.count < later else then))
            self.count += 1
            return self.layer(batch[0]).mean()

    with pytest.raises(sg.StratagemError, match=r"log\('a'\) was called with other options before") as caught:
        sg.Trainer(max_epochs=2, **QUIET).fit(Logs({}), batches(3))
    assert message in str(caught.value)


def test_the_same_options_said_otherwise_are_the_same():
    class Logs(LogsAll):
        def training_step(self, batch, batch_idx):
            self.log("a", 1.0, **[{}, {"on_step": True}, {"on_epoch": False, "reduce_fx": torch.mean}][batch_idx])
            self.log("b", 2.0, reduce_fx=lambda stacked: stacked.max(), on_epoch=True)
            return self.layer(batch[0]).mean()

    trainer = sg.Trainer(max_epochs=2, **QUIET)
    trainer.fit(Logs({}), batches(3))

    assert (trainer.callback_metrics["a"], trainer.callback_metrics["b"]) == (1.0, 2.0)


VALUE = 0.1 + 2**-40  # float32 cannot hold it


def test_users_read_float32_tensors_and_decisions_the_numbers_that_were_logged(tmp_path):
    class Logs(LogsAll):
        def training_step(self, batch, batch_idx):
            self.log("number", VALUE, prog_bar=True)
            self.log("whole", 3, on_epoch=True)
            self.log("double", torch.tensor(VALUE, dtype=torch.float64))
            self.log("loss", loss := self.layer(batch[0]).mean())
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val", VALUE)

    seen, bars, scores = (
        [],
        [],
        ModelCheckpoint(dirpath=tmp_path, monitor="val", filename="{val}-{mine}", save_top_k=-1),
    )
    stopping = EarlyStopping(monitor="val")
    seen_in_epoch = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: (
            seen.append({**trainer.callback_metrics, **trainer.logged_metrics}),
            bars.append(trainer.progress_bar_metrics),
        ),
        on_validation_epoch_end=lambda trainer, _: trainer.callback_metrics.update(mine=torch.tensor(2.0)),
    )
    options = QUIET | {"enable_checkpointing": True, "callbacks": [seen_in_epoch, scores, stopping]}
    trainer = sg.Trainer(max_epochs=1, **options)
    trainer.fit(Logs({}), batches(3), batches(2))
    shown = [*seen[-1].values(), *trainer.callback_metrics.values(), *trainer.logged_metrics.values(), scores.best_model_score,
             scores.current_score, scores.kth_value, *scores.best_k_models.values(), stopping.best_score]  # fmt: skip
    state = torch.load(scores.best_model_path, weights_only=True)

    assert {(type(value), value.dtype, value.shape, value.requires_grad) for value in shown} == {
        (torch.Tensor, torch.float32, (), False)
    }
    assert {type(value) for value in bars[-1].values()} == {float}
    assert bars[-1]["number"] == VALUE
    assert monitored(trainer, "who", "val") == VALUE
    assert scores.state_dict()["best_model_score"] == stopping.state_dict()["best_score"] == VALUE
    assert f"val={VALUE}-mine=2.0" in scores.best_model_path
    assert state["ranks"][0]["callback_metrics"]["number"] == VALUE
    trainer.callback_metrics["val"] = torch.tensor(7.0)
    del trainer.callback_metrics["number"]
    assert monitored(trainer, "who", "val") == 7
    assert monitored(trainer, "who", "number", strict=False) is None


def test_a_name_is_of_one_object():
    first, second = Scores(), Scores()
    for values in ((first, second), (first, 1.0), (1.0, first)):

        class Logs(LogsAll):
            def validation_step(self, batch, batch_idx):
                first.update(1)
                second.update(1)
                self.log("a", self.values[batch_idx])

        with pytest.raises(sg.StratagemError, match=r"log\('a'\) got (a float|another Scores|<.*Scores)"):
            sg.Trainer(**QUIET).validate(Logs(values), batches(2))
