"""dp and ddp2: a batch cut for the devices of one process, compared with the whole batch on one device."""

from __future__ import annotations

import functools
import math
import os
import pickle
import subprocess
import sys
import traceback
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from ports import free_port
from programs import scripts
from selection import HEAVY
from stratagem.errors import ConfigError
from stratagem.strategies import DDP2Strategy, DPStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.precision import tolerance_of
from stratagem_testing.reference import (
    Buffered,
    ByHand,
    Double,
    Dropped,
    Frozen,
    Lbfgs,
    Net,
    Scalar,
    Scheduled,
    Tied,
    Unused,
    joined_batches,
    loss_of,
    relative_difference,
    train_lbfgs_plainly,
    train_module_plainly,
)
from stratagem_testing.training import EveryBatch, loader, share, weights_of

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1,
}  # fmt: skip
BATCHES = joined_batches(6, 24)
#: 23 samples: parts of 12 and 11, or of 8, 8 and 7.
UNEVEN = joined_batches(6, 23)


def trainer_of(devices=2, **arguments):
    return sg.Trainer(**(QUIET | {"strategy": "dp", "devices": devices} | arguments))


def trained(module, batches, devices=2, **arguments):
    trainer = trainer_of(devices, **arguments)
    trainer.fit(module, batches)
    return weights_of(trainer)


# --- The same training as on one device --------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("batches", [BATCHES, UNEVEN], ids=["even", "uneven"])
def test_parts_of_a_batch_train_what_the_whole_batch_does(devices, batches):
    reference, norms = train_module_plainly(Net(), batches)
    assert max(norms) > 1

    assert relative_difference(trained(Net(), batches, devices), reference) < 1e-6


@pytest.mark.parametrize("model", [Frozen, Tied, Scalar, Scheduled])
def test_unusual_models(model):
    assert relative_difference(trained(model(), UNEVEN, 3), train_module_plainly(model(), UNEVEN)[0]) < 1e-6


def test_parameters_that_no_loss_reaches_stay():
    assert relative_difference(trained(Unused(), BATCHES), train_module_plainly(Unused(), BATCHES)[0]) < 1e-6


def test_a_buffer_is_kept_from_the_first_part():
    assert relative_difference(trained(Buffered(), BATCHES, 3), train_module_plainly(Buffered(), BATCHES)[0]) < 1e-6


def test_accumulation_and_clipping():
    reference, norms = train_module_plainly(Net(), UNEVEN, accumulate=2, max_norm=0.5)
    assert min(norms) > 0.5

    weights = trained(Net(), UNEVEN, 3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    by_value = trained(Net(), UNEVEN, 3, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    assert relative_difference(weights, reference) < 1e-6
    assert relative_difference(by_value, train_module_plainly(Net(), UNEVEN, max_value=0.05)[0]) < 1e-6


def test_an_optimizer_that_evaluates_the_model():
    batches = [tuple(tensor.double() for tensor in batch) for batch in UNEVEN[:3]]

    assert relative_difference(trained(Lbfgs(), batches, 3), train_lbfgs_plainly(batches)) < 1e-6


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions_reach_the_threads_of_the_parts(precision):
    seen = []

    class Watched(Net):
        def training_step(self, batch, batch_idx):
            seen.append((torch.is_autocast_enabled("cpu"), self(batch[0]).dtype))
            return super().training_step(batch, batch_idx)

    trainer = trainer_of(3, precision=precision, callbacks=[skipped := EveryBatch(lambda t: t.position.skipped_steps)])
    trainer.fit(Watched(), UNEVEN)
    used = [batch for before, after, batch in zip([0, *skipped.results], skipped.results, UNEVEN, strict=False)
            if before == after]  # fmt: skip
    double = precision == "64-true"
    module = Double() if double else Net()
    reference, _ = train_module_plainly(module, [tuple(t.double() for t in b) for b in used] if double else used)

    kind = {"64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}[precision.split("-")[0]]
    assert set(seen) == {(precision.endswith("mixed"), kind)}
    assert len(used) >= 2
    assert relative_difference(weights_of(trainer), reference) < (tolerance_of(trainer.run.policy) or 1e-6)


def test_double_precision_is_kept():
    batches = [tuple(tensor.double() for tensor in batch) for batch in UNEVEN]

    assert relative_difference(trained(Double(), batches, 3), train_module_plainly(Double(), batches)[0]) < 1e-12


def test_random_numbers_are_the_same_each_time():
    def once():
        torch.manual_seed(3)
        return trained(Dropped(), UNEVEN, 3)

    first, second = once(), once()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_loop_of_your_own_joins_the_outputs_of_the_whole_batch():
    reference, _ = train_module_plainly(Net(), UNEVEN)
    with sg.Run(strategy="dp", accelerator="cpu", devices=3) as run:
        module = Net()
        model, optimizer = run.setup(module, module.configure_optimizers())
        for x, y in run.dataloader(UNEVEN):
            out = model(x)
            assert out.shape == y.shape
            run.backward(loss_of(out, y))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()

    assert relative_difference(module.state_dict(), reference) < 1e-6


def test_one_process_has_all_devices():
    trainer = trainer_of(3)
    trainer.run.connect()

    assert (trainer.run.num_processes, trainer.world_size, len(trainer.run.devices)) == (1, 1, 3)
    assert trainer.run.devices[0] == trainer.run.device
    assert "1 process on 1 node, each with 3 devices" in trainer.run.explain()
    assert sg.Run(strategy="single_device", accelerator="cpu", devices=1).devices == (torch.device("cpu"),)


# --- Ends of steps -----------------------------------------------------------------------------------------------


class Contrastive(Net):
    """A loss over all pairs of the batch's samples: parts alone cannot compute it."""

    def training_step(self, batch, batch_idx):
        return {"out": self(batch[0]), "y": batch[1]}

    def training_step_end(self, outputs):
        return contrastive(outputs["out"], outputs["y"])


def contrastive(out, y):
    return 4 * F.cross_entropy(out @ y.T, torch.arange(len(y))) + loss_of(out, y)


class PlainContrastive(Net):
    criterion = staticmethod(contrastive)


def test_the_end_of_a_step_sees_the_whole_batch():
    reference, norms = train_module_plainly(PlainContrastive(), UNEVEN)
    assert max(norms) > 1
    assert relative_difference(reference, train_module_plainly(Net(), UNEVEN)[0]) > 1e-3

    assert relative_difference(trained(Contrastive(), UNEVEN, 3), reference) < 1e-6


class Ends(Net):
    """Keeps what its ends get."""

    def __init__(self):
        super().__init__()
        self.got = []

    def training_step(self, batch, batch_idx):
        return {"loss": loss_of(self(batch[0]), batch[1]), "samples": len(batch[0])}

    def training_step_end(self, outputs):
        self.got.append(outputs)
        return (outputs["loss"] * outputs["samples"]).sum() / outputs["samples"].sum()

    def validation_step(self, batch, batch_idx):
        return batch[0].sum(), batch[0]

    def validation_step_end(self, outputs):
        self.got.append(outputs)

    test_step, test_step_end = validation_step, validation_step_end


def test_an_end_gets_an_item_for_each_part_where_parts_returned_a_number():
    module = Ends()
    weights = trained(module, UNEVEN, 3)

    assert relative_difference(weights, train_module_plainly(Net(), UNEVEN)[0]) < 1e-6
    assert [outputs["samples"].tolist() for outputs in module.got] == [[8, 8, 7]] * 6
    assert all(outputs["loss"].shape == (3,) for outputs in module.got)


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("devices", [1, 3])
def test_ends_of_evaluation(stage, devices):
    module = Ends()
    getattr(trainer_of(devices), stage)(module, UNEVEN[:2])

    for (sums, rows), (x, _) in zip(module.got, UNEVEN, strict=False):
        assert sums.shape == (devices,)
        assert float(sums.sum()) == pytest.approx(float(x.sum()), rel=1e-5)
        assert torch.equal(rows, x)


def test_a_batch_smaller_than_the_devices_makes_fewer_parts():
    module = Ends()
    trainer_of(3).validate(module, [tuple(t[:size] for t in UNEVEN[0]) for size in (1, 2, 4)])

    assert [len(sums) for sums, _ in module.got] == [1, 2, 2]  # four samples: two and two, as torch.chunk


def test_predictions_are_those_of_the_whole_batch():
    x, y = UNEVEN[0]
    predictions = trainer_of(3).predict(Net(), loader((x, y), 9))

    assert [len(each) for each in predictions] == [9, 9, 5]
    assert torch.allclose(torch.cat(predictions), Net()(x), atol=1e-6)


Point = namedtuple("Point", "x names")


class Nested(Net):
    """Batches and outputs of every build."""

    def predict_step(self, batch, batch_idx):
        x, names = batch["point"]
        assert batch["scale"].dim() == 0
        return {
            "point": Point(x, list(names)), "pair": (x + 1, 2.0 * len(x)), "mean": x.mean(), "nothing": None,
            "said": batch["said"],
        }  # fmt: skip


def test_nested_batches_are_cut_and_outputs_joined_item_by_item():
    x = torch.arange(10.0).reshape(5, 2)
    batch = {"point": Point(x, list("abcde")), "scale": torch.tensor(3.0), "said": "hello"}

    (output,) = trainer_of(2).predict(Nested(), [batch])

    assert torch.equal(output["point"].x, x)
    assert output["point"].names == list("abcde")
    assert torch.equal(output["pair"][0], x + 1)
    assert float(output["pair"][1]) == pytest.approx(6 * 0.6 + 4 * 0.4)
    assert float(output["mean"]) == pytest.approx(float(x.mean()))
    assert output["nothing"] is None
    assert output["said"] == ["hello", "hello"]


# --- What parts log ----------------------------------------------------------------------------------------------


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = loss_of(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log_dict({"most": batch[0].max(), "again": batch[0].max()}, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("least", batch[0].min(), reduce_fx=torch.min, on_step=False, on_epoch=True)
        for each in batch[0][0, :2]:
            self.log("twice", each, reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx == 0 and len(batch[0]) == 7:
            self.log("rare", 1.0, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("devices", [1, 3])
def test_what_parts_log_is_what_the_whole_batch_would(devices):
    losses = []
    trainer = trainer_of(devices, callbacks=[EveryBatch(lambda t: losses.append(dict(t.callback_metrics)))])
    trainer.fit(Logs(), UNEVEN)
    plain, wanted = Net(), []
    optimizer = plain.configure_optimizers()
    for x, y in UNEVEN:
        loss = loss_of(plain(x), y)
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, found = torch.cat([x for x, _ in UNEVEN]), trainer.callback_metrics

    assert [float(each["loss_step"]) for each in losses] == pytest.approx(wanted, rel=1e-5)
    assert [float(each["samples_step"]) for each in losses] == [23] * 6
    assert float(found["loss_epoch"]) == pytest.approx(sum(wanted) / 6, rel=1e-5)
    assert float(found["samples_epoch"]) == 6 * 23
    assert float(found["most"]) == float(found["again"]) == float(x.max())
    assert float(found["least"]) == float(x.min())
    starts = {1: (0,), 3: (0, 8, 16)}[devices]
    firsts = sum(float(batch[start, :2].sum()) for batch, _ in UNEVEN for start in starts)
    assert float(found["twice"]) == pytest.approx(firsts, rel=1e-4)
    assert ("rare" in found) == (devices == 3)


class LogsExactly(Net):
    def training_step(self, batch, batch_idx):
        self.log("bytes", torch.tensor(100, dtype=torch.uint8), reduce_fx="sum", on_step=True)
        self.log("truths", torch.tensor(True), reduce_fx="sum", on_step=True)
        nan = float("nan") if len(batch[0]) == 7 else 1.0  # the last part
        self.log_dict({"most": torch.tensor(nan), "again": nan}, reduce_fx="max", on_step=True)
        return loss_of(self(batch[0]), batch[1])


def test_what_parts_log_is_joined_exactly():
    trainer = trainer_of(3)
    trainer.fit(LogsExactly(), UNEVEN[:1])
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert (found["bytes"], found["truths"]) == (300, 3)
    assert math.isnan(found["most"])
    assert math.isnan(found["again"])


def test_a_mean_over_batches_of_unequal_size_counts_samples():
    batches = [UNEVEN[0], tuple(t[:5] for t in UNEVEN[1])]
    (metrics,) = trainer_of(3).validate(Net(), batches)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))

    assert metrics["val_loss"] == pytest.approx(loss_of(Net()(x), y).item(), rel=1e-5)


class Measured(Net):
    """Accuracy of the sign, computed by an object that collects."""

    def __init__(self, where):
        from torchmetrics.classification import BinaryAccuracy

        super().__init__()
        self.accuracy, self.where = BinaryAccuracy(), where

    def validation_step(self, batch, batch_idx):
        out = self(batch[0])
        if self.where == "update":
            self.accuracy.update(out > 0, batch[1] > 0)
        elif self.where == "call":
            self.accuracy(out > 0, batch[1] > 0)
        elif self.where == "log":
            self.log("accuracy", self.accuracy)
        return out > 0, batch[1] > 0

    def validation_step_end(self, outputs):
        self.accuracy.update(*outputs)
        self.log("accuracy", self.accuracy)


@HEAVY
def test_an_object_that_collects_does_so_at_the_end_of_a_step():
    (metrics,) = trainer_of(3).validate(Measured("end"), UNEVEN)
    with torch.no_grad():
        right = [float((Net()(x) > 0).eq(y > 0).float().mean()) for x, y in UNEVEN]

    assert metrics["accuracy"] == pytest.approx(sum(right) / len(right))


@HEAVY
@pytest.mark.parametrize("where", ["update", "call", "log"])
def test_an_object_that_collects_is_refused_in_a_part(where):
    with pytest.raises(ConfigError, match="a step used a BinaryAccuracy.*validation_step_end"):
        trainer_of(2).validate(Measured(where), UNEVEN)


# --- Refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 2}, "devices=2 with num_nodes=2 needs 'multi-process', which strategy 'dp' does not.*ddp2"),
        ({"comm_hook": "fp16_compress"}, "'gradient-buckets', which strategy 'dp' does not provide"),
        ({"sync_batchnorm": True}, "sync_batchnorm is True, and strategy 'dp' trains on 2 devices in one process"),
        ({"sync_batchnorm": True, "strategy": "ddp2"}, "strategy 'ddp2' trains on 2 devices in one process"),
    ],
)
def test_choices_that_cannot_work_are_refused_before_anything_runs(arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(2, **arguments)


def test_synchronized_batch_normalization_changes_nothing_on_one_device():
    assert trainer_of(1, sync_batchnorm=True).run.num_processes == 1


def test_manual_optimization_is_refused():
    with pytest.raises(ConfigError, match="ByHand needs 'manual-optimization', which strategy 'dp' lacks"):
        trainer_of(2).fit(ByHand(), BATCHES)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("text", "no tensor that can be divided into chunks for 2 devices"),
        ((torch.tensor(1.0), 3), "no tensor that can be divided"),
        ((torch.zeros(4, 16), torch.zeros(3, 1)), "tensors of 4 and of 3 in dimension 0"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(2).predict(Net(), [batch])


def test_one_device_takes_any_batch():
    class Says(Net):
        def predict_step(self, batch, batch_idx):
            return batch

    assert trainer_of(1).predict(Says(), ["text"]) == ["text"]


class Strange(Net):
    """Its steps do what a part cannot."""

    def __init__(self, what):
        super().__init__()
        self.what, self.seen = what, 0
        self.norm = nn.BatchNorm1d(16)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.what == "sets":
            self.seen += len(x)
        elif self.what == "sets a buffer":
            self.norm.running_mean = self.norm.running_mean + 1
        elif self.what == "differs":
            return None if len(x) == 11 else loss_of(self(x), y)
        elif self.what == "is ragged":
            return x[:, : len(x)]
        return loss_of(self(x), y)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sets", "Strange.training_step set seen on a replica"),
        ("sets a buffer", "Strange.training_step set running_mean on a replica"),
        ("differs", "returned a tensor without dimensions and NoneType"),
        ("is ragged", r"of the shapes \(12, 12\) and \(11, 11\)"),
    ],
)
def test_what_would_be_lost_or_cannot_be_joined_is_refused(what, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(2).fit(Strange(what), UNEVEN)


@pytest.mark.slow
def test_compiled_modules_and_recomputation_are_refused():
    with pytest.raises(ConfigError, match="Net is compiled, and 2 devices of one process run copies of it"):
        trainer_of(2).fit(torch.compile(Net()), BATCHES)
    inside = Net()
    inside.net[0] = torch.compile(inside.net[0])
    with pytest.raises(ConfigError, match="is compiled"):
        trainer_of(2).fit(inside, BATCHES)
    with pytest.raises(ConfigError, match="activation_checkpointing is set"):
        trainer_of(2, activation_checkpointing={nn.Linear}).fit(Net(), BATCHES)


def test_an_error_in_a_part_surfaces_once_with_its_traceback():
    class Raises(Net):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 7:
                return self.culprit()
            return super().training_step(batch, batch_idx)

        def culprit(self):
            raise ZeroDivisionError("out of order")

    with pytest.raises(ZeroDivisionError, match="^out of order") as caught:
        trainer_of(3).fit(Raises(), UNEVEN)

    text = "".join(traceback.format_exception(caught.value))
    assert str(caught.value) == "out of order"
    assert "in culprit" in text
    assert text.count("Traceback") == 1
    assert "in chunk 3 of 3 of a batch, on cpu" in text


# --- What a copy is ----------------------------------------------------------------------------------------------


class Inspecting(Net):
    """Looks at the copy that runs its step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.extras = nn.ParameterList([torch.ones(16)])
        self.norm = nn.BatchNorm1d(16)
        self.looked = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.looked.append((self.device, len(list(self.parameters())), self.training, self.current_epoch))
        x = x + self.lstm(x[:, None])[0][:, 0] + self.extras[0] + self.norm(x)
        return loss_of(self(x), y) + sum((p**2).sum() for p in self.parameters())


def test_copies_have_parameters_and_buffers_of_their_own_kind():
    module, plain = Inspecting(), Inspecting()
    plain.load_state_dict(module.state_dict())
    trainer_of(2).fit(module, BATCHES[:1])
    halves = [tuple(t.chunk(2)[index] for t in BATCHES[0]) for index in (0, 1)]
    plain.__dict__["_fit"] = trainer_of(1)._state
    optimizer = plain.configure_optimizers()
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    sum(plain.training_step(half, 0) / 2 for half in halves).backward()
    optimizer.step()

    count = len(list(plain.parameters()))
    assert module.looked == [(torch.device("cpu"), count, True, 0)] * 2
    for (name, parameter), other in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(parameter, other, atol=1e-6), name
    first_half = halves[0][0].mean(0)
    assert torch.allclose(module.norm.running_mean, 0.9 * before["norm.running_mean"] + 0.1 * first_half, atol=1e-6)
    assert int(module.norm.num_batches_tracked) == 1


def test_evaluation_keeps_inference_mode_and_gradients_off_in_the_threads():
    class Looks(Net):
        def predict_step(self, batch, batch_idx):
            return [(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training)]

    assert trainer_of(2).predict(Looks(), BATCHES[:1]) == [[(True, False, False)] * 2]
    assert trainer_of(2, inference_mode=False).predict(Looks(), BATCHES[:1]) == [[(False, False, False)] * 2]


def test_options_travel():
    assert pickle.loads(pickle.dumps(DDP2Strategy(timeout=3.0, bucket_cap_mb=1.5))).timeout.total_seconds() == 3
    assert DPStrategy.process_per_device is False


# --- Several nodes -----------------------------------------------------------------------------------------------


def on_node(rank):
    """Make this process the only one of a node."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=str(rank), GROUP_RANK=str(rank))


def _train_on_nodes(rank, size, make, batches, arguments):
    on_node(rank)
    trainer = trainer_of(**({"strategy": "ddp2", "num_nodes": size} | arguments))
    trainer.fit(make(), share(trainer, batches))
    return weights_of(trainer), trainer.run.num_processes, trainer.world_size


NODES = joined_batches(6, 20)  # 10 on each of two nodes: parts of 5, or of 4, 4 and 2


#: By name: the model, the arguments of the trainer, and those of the reference.
TRAINED = {
    "plain": (Net, {"devices": 3}, {}),
    "accumulated and clipped": (
        Net, {"devices": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"accumulate": 2, "max_norm": 0.5},
    ),
    "unused": (Unused, {"strategy": {"name": "ddp2", "find_unused_parameters": True}}, {}),
}  # fmt: skip
#: Keeps the tests that share two processes on one worker.
SHARED = pytest.mark.xdist_group("two nodes of ddp2")


@functools.cache
def on_two_nodes():
    """Return what each of two nodes found: trained in three ways, refused, with a comm hook, and a metric."""
    return run_in_processes(_all_on_nodes, 2)


def _all_on_nodes(rank, size):
    trained = {name: _train_on_nodes(rank, size, make, NODES, options) for name, (make, options, _) in TRAINED.items()}
    return trained | {
        "refused": _refused_on_nodes(rank, size, Unused, NODES, {}),
        "hooked": _hooked(rank, size),
        "metric": _epoch_mean(rank, size),
    }


@pytest.mark.slow
@SHARED
@pytest.mark.parametrize("case", TRAINED)
def test_two_nodes_train_what_the_joined_batch_does(case):
    results, (make, _, limits) = [found[case] for found in on_two_nodes()], TRAINED[case]
    reference, _ = train_module_plainly(make(), NODES, **limits)

    assert [rest for _, *rest in results] == [[1, 2], [1, 2]]
    for weights, *_ in results:
        assert relative_difference(weights, reference) < 1e-6
        assert all(torch.equal(weights[name], results[0][0][name]) for name in weights)


def _refused_on_nodes(rank, size, make, batches, arguments):
    try:
        return _train_on_nodes(rank, size, make, batches, arguments)
    except ConfigError as error:
        return str(error)


@SHARED
def test_parameters_that_no_loss_reaches_are_explained_on_all_nodes():
    for found in on_two_nodes():
        assert "set strategy.ddp2.find_unused_parameters to true" in found["refused"]


class Counting(sg.CommHook):
    """Counts what passes."""

    def __init__(self):
        self.elements = 0

    @sg.hookimpl
    def reduce_bucket(self, bucket):
        self.elements += bucket.buffer.numel()
        return (yield bucket.buffer)


def _hooked(rank, size):
    hook = Counting()
    weights, *_ = _train_on_nodes(rank, size, Net, NODES, {"comm_hook": [hook]})
    return weights, hook.elements


@SHARED
def test_comm_hooks_see_every_gradient_between_nodes():
    reference, _ = train_module_plainly(Net(), NODES)
    for weights, elements in (found["hooked"] for found in on_two_nodes()):
        assert relative_difference(weights, reference) < 1e-6
        assert elements == 6 * sum(parameter.numel() for parameter in Net().parameters())


def _epoch_mean(rank, size):
    on_node(rank)
    trainer = trainer_of(strategy="ddp2", num_nodes=size)
    trainer.run.connect()
    return trainer.validate(Net(), share(trainer, NODES))[0]["val_loss"]


@SHARED
def test_a_metric_is_reduced_over_parts_and_nodes():
    x, y = (torch.cat(parts) for parts in zip(*NODES, strict=True))
    mean = loss_of(Net()(x), y).item()

    assert [found["metric"] for found in on_two_nodes()] == [pytest.approx(mean, rel=1e-5)] * 2


def _two_on_a_node(rank, size):
    os.environ.update(TORCHELASTIC_RUN_ID="x", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    with pytest.raises(ConfigError) as caught:
        sg.Trainer(**(QUIET | {"strategy": "ddp2"})).fit(Net(), NODES)
    return str(caught.value)


def test_several_processes_on_a_node_are_refused_by_all_of_them():
    for said in run_in_processes(_two_on_a_node, 2):
        assert "has 2 processes on this node, and strategy 'ddp2' uses all devices of a node from one" in said


SCRIPT = """
import stratagem as sg
from stratagem_testing.reference import Net, data
from stratagem_testing.training import loader

trainer = sg.Trainer(strategy="ddp2", accelerator="cpu", devices=2, num_nodes=2, max_epochs=1, logger=False,
                     enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(Net(), loader(data(40), 10))
print(trainer.global_rank, trainer.world_size, trainer.global_step, trainer.effective_batch_size)
"""


@pytest.mark.slow
def test_two_launched_nodes_start_one_process_each(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        scripts.Popen(
            [sys.executable, str(script)], env=os.environ | meeting | {"NODE_RANK": str(node)}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in (0, 1)
    ]  # fmt: skip
    said = [node.communicate(timeout=360)[0] for node in nodes]

    assert [node.returncode for node in nodes] == [0, 0], said
    assert [text.strip().splitlines()[-1] for text in said] == ["0 2 2 20", "1 2 2 20"]
