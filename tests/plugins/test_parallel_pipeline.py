"""What a pipeline refuses, and what callbacks, metrics and evaluation see of it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import re
from collections import OrderedDict, UserDict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api import Collectives
from stratagem.api.seeding import seeded
from stratagem.callbacks import EMA
from stratagem.errors import ConfigError
from stratagem_microbatches import batch_size, combined, merge, split
from stratagem_parallel import ParallelStrategy, context_mean
from stratagem_parallel.pipeline.balance import cut_evenly, sizes_of_stages
from stratagem_parallel.pipeline.boundaries import assembled, form_of, register, tensors_in
from stratagem_parallel.pipeline.ghosts import Cut, Given, called_module
from stratagem_parallel.pipeline.neighbours import Neighbours
from stratagem_parallel.pipeline.pipeline import equal_sizes
from stratagem_parallel.pipeline.runner import unchanged
from stratagem_parallel.pipeline.schedules import SCHEDULES, actions, check_counts, schedule_named
from stratagem_parallel.pipeline.targets import TargetCounts
from stratagem_parallel.pipeline.timeline import timeline
from stratagem_testing import run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, outcome, share, weights_of

# --- Schedules ---------------------------------------------------------------------------------------------------

#: (p - 1) / (v m + p - 1) for p ranks, m micro-batches and v stages on a rank, each as long as the v-th part. Zero-bubble schedules
#: wait only while the pipeline fills: (p - 1) / (3 v m + p - 1), three slots for each micro-batch and stage.
IDLE = {
    "gpipe": 3 / 11, "1f1b": 3 / 11, "interleaved_1f1b": 3 / 19, "looped_bfs": 3 / 19,
    "interleaved_zero_bubble": 3 / 51, "zero_bubble_v": 3 / 51, "dualpipe_v": 3 / 51,
}  # fmt: skip


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_idle_shares_are_those_of_the_literature(name):
    table = timeline(name, ranks=4, microbatches=8)
    assert table.idle_share == pytest.approx(IDLE[name])


def test_backward_that_computes_forward_again_is_not_divided():
    kinds = {
        mode: {slot[0] for row in timeline("zero_bubble_v", 4, 8, checkpoint=mode).rows for slot in row if slot}
        for mode in ("never", "except_last", "always")
    }
    assert kinds["always"] == {"F", "B"}
    assert {"I", "W"} < kinds["except_last"]
    always = timeline("zero_bubble_v", 4, 8, checkpoint="always")
    assert sum(slot is not None for row in always.rows for slot in row) == 3 * 8 * 8
    assert always.idle_share > IDLE["zero_bubble_v"]


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_stage_computes_every_microbatch_once(name):
    ranks, microbatches = 4, 8
    table = timeline(name, ranks, microbatches)
    slots = [slot for row in table.rows for slot in row if slot]
    forward = {slot for slot in slots if slot[0] == "F"}
    assert forward == {("F", m, s) for m in range(microbatches) for s in range(table.stages)}
    assert len(slots) == 3 * len(forward)
    sends = sum(
        each.kind.startswith("send") for row in actions(name, ranks, table.stages, microbatches) for each in row
    )
    receives = sum(each.kind.startswith("recv") for r in actions(name, ranks, table.stages, microbatches) for each in r)
    assert sends == receives > 0


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "found"),
    [
        ("1f1b", 4, 3, "at least 4"),
        ("dualpipe_v", 8, 6, "at least 8"),
        ("1f1b", 8, 8, "expected 4"),
        ("zero_bubble_v", 4, 8, "expected 8"),
        ("interleaved_1f1b", 6, 8, "a multiple of 4"),
        ("interleaved_1f1b", 8, 9, "a multiple of 4"),
    ],
)
def test_numbers_that_a_schedule_cannot_serve_are_refused(name, stages, microbatches, found):
    with pytest.raises(ConfigError, match=found):
        check_counts(schedule_named(name), 4, stages, microbatches)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"schedule": "1fb1"}, "did you mean '1f1b'"),
        ({"balance": "balance_by_sise"}, "balance_by_size"),
        ({"balance": [2, 0]}, "how many layers each stage has"),
        ({"balance": []}, "how many layers each stage has"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"checkpoint": "sometimes"}, "checkpoint"),
        ({"split_points": []}, "split_points"),
        ({"split_points": "layers.1"}, "split_points"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, found):
    with pytest.raises(ConfigError, match=found):
        ParallelStrategy(pipeline=2, **options)


def test_options_of_a_pipeline_without_one_are_refused():
    for options in ({"balance": [2, 3]}, {"microbatches": 4}, {"schedule": "gpipe"}, {"checkpoint": "always"}):
        with pytest.raises(ConfigError, match="pipeline is 1"):
            ParallelStrategy(**options)


# --- Cuts --------------------------------------------------------------------------------------------------------


def test_layers_are_cut_so_that_the_largest_stage_is_small():
    assert cut_evenly([1, 1, 1, 1, 4], 2) == [4, 1]
    assert cut_evenly([5, 1, 1, 1, 1, 1], 3) == [1, 2, 3]
    assert cut_evenly([0, 0, 7], 3) == [1, 1, 1]


def test_time_is_measured_where_the_module_has_an_example():
    slow = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    layers = [nn.Linear(4, 256), nn.Tanh(), nn.Tanh(), slow]
    among = sg.api.Collectives()
    assert sizes_of_stages("balance_by_time", layers, 2, torch.randn(64, 4), among) == [3, 1]
    with pytest.raises(ConfigError, match="example_input_array"):
        sizes_of_stages("balance_by_time", layers, 2, None, among)
    with pytest.raises(ConfigError, match="the sum 4"):
        sizes_of_stages([2, 3], layers, 2, None, among)
    with pytest.raises(ConfigError, match="5 stages of a pipeline and the model 4 layers"):
        sizes_of_stages("balance_by_size", layers, 5, None, among)


def test_a_batch_is_divided_by_samples():
    batch = {"x": torch.arange(6), "names": list("abcdef"), "scale": torch.tensor(2.0), "flag": True}
    parts = split(batch, equal_sizes(batch_size(batch), 3))
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [part["names"] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(part["flag"] and part["scale"] == 2 for part in parts)
    with pytest.raises(ConfigError, match="a batch of 6 samples is divided into 4 micro-batches"):
        equal_sizes(batch_size(batch), 4)
    with pytest.raises(ConfigError, match="6 and of 5 in dimension 0"):
        batch_size((torch.zeros(6), torch.zeros(5)))
    assert [part["names"] for part in split(batch, [4, 2])] == [["a", "b", "c", "d"], ["e", "f"]]
    numbers = [{"n": torch.tensor(1), "k": 1}, {"n": torch.tensor(2), "k": 4}]
    assert merge(numbers, [1, 1]) == {"n": torch.tensor(1.5), "k": 2.5}
    assert merge(numbers, [1, 3]) == {"n": torch.tensor(1.75), "k": 3.25}
    own = {"reduce_fx": torch.std}
    assert combined([[("v", 1.0, own)], [("v", 2.0, own)]], [1, 3]) == [("v", 1.75, own)]


# --- Ghosts ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Branches on data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x, skip):
        return torch.tanh(self.linear(x if x.sum() > -1e9 else -x)) + 0.1 * skip


class Body(nn.Module):
    """Layers with skip connections from the first to all others, and a parameter outside of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.shift = nn.Parameter(torch.ones(16))
        self.last = nn.Linear(16, 1)

    def forward(self, x, double=False):
        samples, _ = x.shape
        skip = self.first(x)
        x = skip * self.shift
        for block in self.blocks:
            x = block(x, skip)
        x = x.view(samples, -1) + self.shift
        return 2 * self.last(x) if double else self.last(x)


class Whole(Net):
    body = Body

    def __init__(self):
        super().__init__()
        with seeded(2):
            self.net = self.body()


class Mapping(OrderedDict):
    """As models of transformers and diffusers return it."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Cache:
    """Made by the model, filled by its layers."""

    def __init__(self):
        self.kept = {}


class Cell(nn.Module):
    """A layer that keeps what it computes."""

    def __init__(self, number):
        super().__init__()
        self.number, self.linear, self.wide = number, nn.Linear(16, 16), nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16)

    def forward(self, x, *, keep, cache):
        cache.kept[self.number] = x
        return Mapping(
            out=self.narrow(torch.tanh(self.wide(self.linear(x)))), rows=keep.nonzero()[:, 0], number=self.number
        )


class Habits(nn.Module):
    """What models of others do around their layers; the loss is a mean over targets, of which some are ignored."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.embed = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        self.layers = nn.ModuleList(nn.ModuleList([None, Cell(number)]) for number in range(4))
        self.layers[3][1].linear.weight = self.embed[0].weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3))])
        self.norm = nn.LayerNorm(16)  # called by both stages
        self.head = nn.Linear(16, 3)

    def forward(self, x, labels=None, *, output=Mapping):
        keep = torch.rand(len(x)) < 2 if self.draws else torch.ones(len(x)) > 0
        cache = Cache()
        first = x = self.norm(self.embed(x))
        for number, (_, cell) in enumerate(self.layers):
            found = cell(x, keep=keep, cache=cache)
            x = found.out
            assert found.number == number
            if number == 1:
                x += first.detach()  # in place, in what a layer returned
            if number == 2:
                x = x[found.rows] * self.scales[0]
        with torch.no_grad():
            weight = (first.mean() > -5).float()  # used without a gradient
        scores = self.head(self.norm(x)) * weight * self.scales[1]
        loss = None if labels is None else F.cross_entropy(scores, labels)
        return output(loss=loss, scores=scores, cache=cache)


def _labels(x):
    return torch.where(x[:, 0] > 1, -100, (x.sum(1) > 0).long() + (x.sum(1) > 2).long())


class InModel(Net):
    """The model computes the loss, as those of transformers do."""

    def __init__(self, draws):
        super().__init__()
        with seeded(2):
            self.net = Habits(draws)

    def loss(self, batch):
        return self.net(batch[0], labels=_labels(batch[0]))

    def training_step(self, batch, batch_idx):
        loss = 20 * self.loss(batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.loss(batch)
        self.log("val_loss", output.loss)
        self.log("mean_score", output.scores.mean())

    def predict_step(self, batch, batch_idx):
        return outcome(lambda: self.net(batch[0]).cache.kept)


def _in_model(rank, world_size, draws):
    trainer = _trainer(options={"split_points": ["net.layers.2"], "microbatches": 3}, gradient_clip_val=0.5)
    module, batches = InModel(draws), joined_batches(6, 24)
    trainer.fit(module, batches, batches[:2])
    metrics, weights = {k: float(v) for k, v in trainer.callback_metrics.items()}, weights_of(trainer)
    (said,) = trainer.predict(module, batches[:1])
    return weights, metrics, said, [name for name, each in module.named_parameters() if not each.is_meta]


@pytest.mark.slow
@pytest.mark.parametrize("draws", [True, False])
def test_a_model_is_cut_whatever_its_forward_does(draws):
    """Where it draws no random numbers, micro-batches are compared with the whole batch, too."""
    plain, batches = InModel(draws), joined_batches(6, 24)
    optimizer, norms = plain.configure_optimizers(), []
    for batch in batches:
        (20 * plain.loss(batch).loss).backward()
        norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        expected = [plain.loss(batch) for batch in batches[:2]]

    assert max(norms) > 1
    for weights, metrics, said, held in run_in_processes(_in_model, 2, draws):
        assert relative_difference(weights, plain.state_dict()) < 1e-6
        assert metrics["val_loss"] == pytest.approx(float(sum(each.loss for each in expected)) / 2, rel=1e-5)
        assert metrics["mean_score"] == pytest.approx(float(sum(each.scores.mean() for each in expected)) / 2, rel=1e-4)
        assert "a Cache that a stage of the pipeline made is used on another one" in said
        assert ("net.layers.0.1.linear.weight" in held) != ("net.layers.2.1.linear.weight" in held)


class Dropped(Body):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, x) if x[0, 0] > 0 else x
        return self.last(x)


class Filled(nn.Linear):
    def forward(self, box):
        box.kept = {0: super().forward(box.kept[0])}


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Filled(16, 16) for _ in range(4))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        box = Cache()
        box.kept = {0: x}
        for block in self.blocks:
            block(box)
        return self.last(box.kept[0])


class Backwards(Body):
    def forward(self, x):
        for block in reversed(self.blocks):
            x = block(x, x)
        return self.last(x)


class Weights(Body):
    def forward(self, x):
        for block in self.blocks:
            x = block(x, x)
        return self.last(x @ self.blocks[0].linear.weight)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        with torch.no_grad():
            return block(x, x)


class InFunction(Body):
    def forward(self, x):
        for block in self.blocks:
            x = Twice.apply(x, block)
        return self.last(x)


#: By the class of the model: what is said where it cannot be cut.
NOT_CUT = {
    Boxed: "net.blocks.0 replaces a tensor in one of its arguments",
    Backwards: "net.blocks.1 is in stage 0 of the pipeline, and needs what net.blocks.2 of stage 1 computes",
    Weights: r"net computes with a weight of a layer that it does not call.*, and that layer is on another process",
    InFunction: "net.blocks.0 is called in the autograd function Twice",
}


def _cannot_be_cut(rank, world_size):
    found = {}
    for body in NOT_CUT:
        trainer = _trainer(options={"split_points": ["net.blocks.2"]})
        module = type("Module", (Whole,), {"body": body})()
        found[body] = outcome(lambda trainer=trainer, module=module: trainer.fit(module, joined_batches(6, 24)))
        trainer.close()
    return found


@pytest.mark.when_changed(
    "plugins/parallel/",
    guard="tests/plugins/test_parallel_pipeline.py::test_a_model_with_skip_connections_trains_as_one_process",
)
@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_refused_on_all_ranks():
    for found in run_in_processes(_cannot_be_cut, 2):
        for body, said in NOT_CUT.items():
            assert re.search(said, found[body]), found[body]


def _dropped(rank, world_size):
    module = type("Module", (Whole,), {"body": Dropped})()
    _trainer(options={"split_points": ["net.blocks.2"]}).fit(module, joined_batches(6, 24))


@pytest.mark.when_changed(
    "plugins/parallel/",
    guard="tests/plugins/test_parallel_pipeline.py::test_a_model_with_skip_connections_trains_as_one_process",
)
@pytest.mark.slow
def test_layers_that_are_left_out_at_times_are_refused():
    said = r"net called net\.blocks\.\d 0 times or 1 times, for inputs of the same shapes"
    with pytest.raises(ProcessesFailed, match=said):
        run_in_processes(_dropped, 2)


def test_split_points_are_checked():
    def cut(*points):
        return Cut(module, called_module(module, list(points)), list(points))

    module = Whole()
    with pytest.raises(ConfigError, match=r"did you mean 'net\.blocks\.1'"):
        cut("net.block.1")
    for points in (("net.blocks.2", "net.blocks.1"), ("net.blocks.1", "net.blocks.1")):
        with pytest.raises(ConfigError, match="the order in which Whole defines them"):
            cut(*points)
    found = cut("net.blocks.1", "net.last")
    assert [stage.modules for stage in found.stages] == [
        ("net.first", "net.blocks.0"), ("net.blocks.1", "net.blocks.2", "net.blocks.3"), ("net.last",),
    ]  # fmt: skip
    assert (found.where, found.stages[0].tensors) == ("net", ("net.shift",))


@dataclasses.dataclass
class Record:
    last: torch.Tensor
    more: list[torch.Tensor]


Pair = collections.namedtuple("Pair", "last more")


@pytest.mark.parametrize("kind", [Mapping, Record, Pair, dict])
def test_what_a_stage_returns_keeps_its_class(kind):
    value = kind(last=torch.ones(2), more=[torch.zeros(3)])
    register(value)
    form = form_of(value)
    found = assembled(tensors_in(value, form, 1), pickle.loads(pickle.dumps(form)))
    assert type(found) is kind
    last, more = (found["last"], found["more"]) if kind is dict else (found.last, found.more)
    assert torch.equal(last, torch.ones(2))
    assert torch.equal(more[0], torch.zeros(3))


# --- Runs of two processes ---------------------------------------------------------------------------------------


def _trainer(**arguments):
    options = {"name": "parallel", "pipeline": 2} | arguments.pop("options", {})
    return sg.Trainer(strategy=options, **QUIET | {"accelerator": "cpu", "devices": 2} | arguments)


class Logs(Net):
    """Logs in every way, and returns more than the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=True)
        self.log("samples", len(batch[0]), reduce_fx="sum", on_step=True)
        if batch_idx == 2:
            self.log("late", 1.5)
        return {"loss": loss, "rows": batch[0][:, 0]}


def _everything(rank, world_size):
    batches = joined_batches(4, 24)
    seen = []

    class Recorder(sg.Callback):
        @sg.hookimpl
        def on_before_backward(self, loss):
            seen.append(("before", float(loss)))

        @sg.hookimpl
        def on_after_backward(self):
            seen.append("after")

        @sg.hookimpl
        def on_train_batch_end(self, trainer, outputs, batch):
            seen.append((float(outputs["loss"]), torch.equal(outputs["rows"], batch[0][:, 0])))
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    trainer = _trainer(callbacks=[Recorder()], options={"microbatches": 3})
    module = Logs()
    trainer.fit(module, batches, batches[:1])
    copied = outcome(lambda: copy.deepcopy(module)(batches[0][0]))
    with_gradients = outcome(lambda: module(batches[0][0]))
    found = {k: float(v) for k, v in trainer.callback_metrics.items()}
    tested = trainer.test(module, [(x[:7], y[:7]) for x, y in batches])
    predicted = trainer.predict(module, batches)
    return seen, found, tested, predicted, weights_of(trainer), copied, with_gradients


@pytest.mark.slow
def test_callbacks_metrics_and_evaluation_agree_on_all_ranks():
    first, second = run_in_processes(_everything, 2)

    plain = Net()
    batches = joined_batches(4, 24)
    weights, _ = train_module_plainly(plain, batches)
    seen, found, tested, predicted, trained, copied, with_gradients = first
    assert seen == second[0]
    assert found == second[1]
    assert tested == second[2]
    assert relative_difference(trained, weights) < 1e-6
    assert [each for each in seen if isinstance(each, str)] == ["after"] * 4
    assert all(each[1] is True for each in seen if isinstance(each, tuple) and each[0] != "before")
    metrics = [each for each in seen if isinstance(each, dict)][-1]
    assert metrics["largest"] == pytest.approx(float(batches[-1][0].max()))
    assert metrics["samples"] == 24
    assert metrics["late"] == 1.5
    with torch.no_grad():
        assert torch.allclose(torch.cat(predicted), torch.cat([plain(x) for x, _ in batches]), rtol=1e-5)
        losses = [4 * F.mse_loss(plain(x[:7]), y[:7]) for x, y in batches]
    assert tested[0]["test_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert "a copy of a module was called" in copied
    assert "with gradients outside of training_step" in with_gradients


def _cut(rank, world_size, schedule):
    trainer = _trainer(options={"split_points": ["net.blocks.2"]} | schedule, gradient_clip_val=0.5)
    trainer.fit(Whole(), joined_batches(6, 24))
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"schedule": "zero_bubble_v", "split_points": ["net.blocks.0", "net.blocks.2", "net.last"], "microbatches": 4},
    ],
)
def test_a_model_with_skip_connections_trains_as_one_process(schedule):
    plain, norms = train_module_plainly(Whole(), joined_batches(6, 24), max_norm=0.5)
    assert max(norms) > 1
    for weights in run_in_processes(_cut, 2, schedule):
        assert relative_difference(weights, plain) < 1e-6


class Uneven(Net):
    """Batches of different sizes and lengths; BatchNorm counts each micro-batch once."""

    def __init__(self):
        super().__init__()
        layers = list(self.net)
        self.net = nn.Sequential(*layers[:2], nn.BatchNorm1d(32), *layers[2:])


def _uneven(rank, world_size, checkpoint):
    trainer = _trainer(options={"checkpoint": checkpoint})
    batches = joined_batches(3, 24)
    trainer.fit(Uneven(), [*batches, tuple(each[:10] for each in batches[0])])
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_uneven_last_batch_is_trained(checkpoint):
    module, optimizer = Uneven(), None
    optimizer = module.configure_optimizers()
    batches = joined_batches(3, 24)
    for x, y in [*batches, tuple(each[:10] for each in batches[0])]:
        for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
            (module.criterion(module(part_x), part_y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_in_processes(_uneven, 2, checkpoint):
        assert relative_difference(weights, module.state_dict()) < 1e-6


class Random(Net):
    """Uses a random mask before and after the layers, and dropout in both stages."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), *self.net[:2], nn.Dropout(0.5), *self.net[2:])

    def training_step(self, batch, batch_idx):
        x, y = batch
        mask = torch.rand(len(x), 1)
        masked = torch.cat([mask, x[:, 1:]], 1)
        return {"loss": F.mse_loss(self.net(masked), y), "mask": mask, "seen": masked[:, :1]}


class Keeper(nn.Module):
    """Keeps what passes through it."""

    kept: list = []  # noqa: RUF012

    def forward(self, x):
        if torch.is_grad_enabled():
            self.kept.append(x[:, 0].detach().clone())
        return x


def _random(rank, world_size, schedule):
    sg.seed_everything(5 + rank)
    module, masks = Random(), []
    module.net.insert(0, Keeper())
    Keeper.kept.clear()

    class Recorder(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, outputs):
            masks.append(outputs["mask"][:, 0])

    trainer = _trainer(options={"schedule": schedule, "microbatches": 4}, callbacks=[Recorder()])
    trainer.fit(module, joined_batches(3, 24))
    return torch.cat(masks), torch.cat(Keeper.kept) if Keeper.kept else None, weights_of(trainer), torch.get_rng_state()


@pytest.mark.slow
def test_random_numbers_of_a_step_are_the_same_on_the_first_and_the_last_rank():
    first, second = run_in_processes(_random, 2, "1f1b")
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[3], second[3])
    gpipe, _ = run_in_processes(_random, 2, "gpipe")
    assert relative_difference(gpipe[2], first[2]) < 1e-6


class InFloat32(nn.Linear):
    """Computes in float32 under autocast as well."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class MixedPrecision(Net):
    def __init__(self):
        super().__init__()
        with seeded(1):
            self.net = nn.Sequential(InFloat32(16, 32), nn.Linear(32, 32), nn.Tanh(), InFloat32(32, 1))


def _mixed(rank, world_size, options):
    trainer = _trainer(options=options, precision="bf16-mixed")
    trainer.fit(MixedPrecision(), joined_batches(3, 24))
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"schedule": "zero_bubble_v", "checkpoint": "always"}])
def test_backward_runs_outside_of_autocast(options):
    module = MixedPrecision()
    optimizer = module.configure_optimizers()
    parts = 4 if options else 2
    for x, y in joined_batches(3, 24):
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module.criterion(module(part_x), part_y)
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_in_processes(_mixed, 2, options):
        assert relative_difference(weights, module.state_dict()) < 1e-6


FUSED = hasattr(F, "linear_cross_entropy")


class Ignores(Net):
    """Different numbers of targets are ignored in each micro-batch, and the step counts them."""

    def __init__(self):
        super().__init__()
        with seeded(1):
            self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.weigh = F.cross_entropy
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps = self.steps + 1
        targets = torch.where(x[:, 1] > 0.3 + y[:, 0].sign(), (x[:, 0] > 0).long() + 1, -100)
        output = self(x)
        mean = self.weigh(output, targets.clamp(min=0), self.weights)
        fused = F.linear_cross_entropy(output, self.weights.diag(), targets) if FUSED else 0.0
        counts = targets != -100
        own = context_mean((output.square().sum(1) * counts).sum(), counts.sum())
        weighted = F.l1_loss(output[:, :1], y, weight=x[:, 2:3].abs())
        late = F.nll_loss(output, targets) if batch_idx else 0.0  # the first step has none
        return 4 * self.loss(output, targets) + mean + F.mse_loss(output[:, :1], y) + fused + own + weighted + late


def _ignores(rank, world_size, options):
    trainer = _trainer(options=options)
    module = Ignores()
    trainer.fit(module, joined_batches(4, 24))
    return weights_of(trainer)


@pytest.mark.every_push("default schedule")
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"microbatches": 4}, {"microbatches": 4, "schedule": "gpipe"}], ids=["default schedule", "gpipe"]
)
def test_a_mean_over_targets_counts_those_of_the_whole_batch(options):
    module = Ignores()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(joined_batches(4, 24)):
        module.training_step(batch, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_in_processes(_ignores, 2, options):
        for name, value in module.named_parameters():
            assert torch.allclose(weights[name], value, rtol=1e-5, atol=1e-7)
        assert weights["steps"] in (0, 16)


def _chunked(x, y, m):
    options = nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    return F.linear_cross_entropy(x, torch.eye(4), y, options=options)


def _only_where_some_are(x, y, m):
    return F.cross_entropy(x[m], y[m]) if m.any() else 0 * x.sum()


def _mean_of_first(row, number):
    return row[: 1 + number].sum() * (1 / (1 + number))


def _loss_of_some(row, number):
    return F.cross_entropy(row.expand(1 + number, 4), torch.zeros(1 + int(number), dtype=torch.long)) * (1 + row.sum())


#: Of outputs (N, 4), targets of which some are -100, and a mask: means of whole batches, also over micro-batches.
WHOLE = {
    "legacy arguments": lambda x, y, m: F.cross_entropy(x, y, size_average=True),
    "legacy position": lambda x, y, m: F.nll_loss(x, y, None, None, -100, None, "mean"),
    "weights": lambda x, y, m: F.cross_entropy(x, y, torch.arange(1.0, 5.0)),
    "those of a mask": lambda x, y, m: F.cross_entropy(x[m], y[m].clamp(min=0)),
    "where some are": _only_where_some_are,
    "weighted squares": lambda x, y, m: F.mse_loss(x, 0 * x, weight=m[:, None].expand(x.shape) * 2.5),
    "weighted distances": lambda x, y, m: F.l1_loss(x, 0 * x, weight=m[:, None].expand(x.shape) * 2.5),
    "weighted elements": lambda x, y, m: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), m[:, None] * 1.0),
    "context_mean": lambda x, y, m: context_mean(x[m].square().sum(), m.sum()),
    "context_mean of a number": lambda x, y, m: context_mean(x[m].square().sum(), len(x[m])),
    "a mean in each sample": lambda x, y, m: sum(map(_mean_of_first, x, m * 1)) / len(x),
    "a sum over samples": lambda x, y, m: F.mse_loss(x, x.detach() + 1, reduction="sum") / len(x),
    "a critic": lambda x, y, m: (x + 500).mean() - 500,
    "pairs": lambda x, y, m: F.softplus(x[0::2] - x[1::2]).mean(),
    "a mean of some that is logged": lambda x, y, m: x.square().mean() + 0 * x[m].mean().detach(),
}  # fmt: skip
if FUSED:
    WHOLE["fused"] = lambda x, y, m: F.linear_cross_entropy(x, torch.eye(4), y)
    WHOLE["fused, in chunks"] = _chunked
    WHOLE["fused, no default"] = lambda x, y, m: F.linear_cross_entropy(x, torch.eye(4), y, ignore_index=1)
#: What two micro-batches give differs from what both as one give.
OF_PARTS = {
    "a mean of some": lambda x, y, m: x[m].square().mean(),
    "a mean over some": lambda x, y, m: x[m].square().mean(0).sum(),
    "squares of some": lambda x, y, m: F.mse_loss(input=x[m], target=0 * x[m]),
    "a quotient": lambda x, y, m: (x.square().sum(1) * m).sum() / m.sum(),
    "a quotient of a number": lambda x, y, m: torch.div(x[m].sum(), len(x[m])),
    "the items in a batch": lambda x, y, m: F.cross_entropy(x, y, reduction="sum") / (y != -100).sum(),
    "divided by what varies": lambda x, y, m: x.square().sum() / x.detach().std(),
    "a reciprocal": lambda x, y, m: (x.square().sum(1) * m).sum() * m.sum().reciprocal(),
    "a number's reciprocal": lambda x, y, m: (x.square().sum(1) * m).sum() * (1 / int(m.sum())),
    "a power": lambda x, y, m: (x.square().sum(1) * m).sum() * m.sum().float() ** -1,
    "weights that sum to one": lambda x, y, m: torch.dot(x.square().sum(1), m / m.sum()),
    "a normalized mask": lambda x, y, m: (x.square().sum(1) * F.normalize(m.float(), p=1, dim=0)).sum(),
    "a mean of numbers": lambda x, y, m: x.square().sum(1).where(m, torch.nan).nanmean(),
    "one operation": lambda x, y, m: torch.addcdiv(x.new_zeros(()), (x.square().sum(1) * m).sum(), m.sum().float()),
    "a median": lambda x, y, m: x.square().sum(1).median(),
    "a sum": lambda x, y, m: x.square().sum(),
    "a root": lambda x, y, m: x.square().mean().sqrt(),
    "among samples": lambda x, y, m: F.cross_entropy(x @ x.T.detach(), torch.arange(len(x))),
    "an adaptive weight": lambda x, y, m: x.square().mean() + (x.sum() / x.square().sum()).detach() * x.mean(),
    "of size one": lambda x, y, m: x.square().mean() / x.square().mean().detach(),
    "a straight path": lambda x, y, m: ((x.mean(0) - x.mean(0).detach()) * x.mean(0).exp().detach()).sum(),
    "where it is differentiated": lambda x, y, m: x.square().mean() + x.norm() * x.requires_grad,
    "not of zeros": lambda x, y, m: F.cross_entropy(x, y) * (1 // int(x.any())),
    "a mean in each sample": lambda x, y, m: torch.stack(list(map(_loss_of_some, x, m * 3))).mean(),
    "a mean and a count": lambda x, y, m: {"loss": F.cross_entropy(x, y) * (y >= 0).sum(), "count": (y >= 0).sum()},
    "a sum and a constant": lambda x, y, m: {"loss": x.square().sum(), "count": 8},
}


class LastStage:
    count = 1

    def compute(self, stage, given):
        x, y = given.tensors
        return F.cross_entropy(x, y, reduction="none").sum() / (y >= 0).sum()


def _compare(batch, outputs, first, step, user=None):
    """Compare two of four micro-batches with both as one, as the rank of the last stage does after some steps."""
    cpu = torch.device("cpu")
    neighbours = Neighbours(batch, 6, 4, first, LastStage())
    for index, output in enumerate(outputs.split(6)):
        neighbours.keep(index, None, output)
    user, run = user or nn.Module(), SimpleNamespace(device=cpu, devices=(cpu,))
    counts = TargetCounts(Collectives(), True)
    neighbours.compare(lambda batch, answer: step(batch, answer()), counts, user, run, set(), differentiates=True)


def _weighed(loss, *, plainly=False):
    """Return the loss and the gradient of four micro-batches, as the last stage of a pipeline computes them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator, requires_grad=True)
    y, keeps = torch.randint(4, (24,), generator=generator), torch.rand(24, generator=generator) > 0.4
    keeps[:6] = False
    keeps[0] = loss is not _only_where_some_are
    y = y.where(keeps, -100)
    if loss is WHOLE.get("fused, no default"):
        y = y.clamp(min=0)
    if plainly:
        total = loss(x, y, keeps)
    else:
        parts = list(zip(x.split(6), y.split(6), keeps.split(6), strict=True))
        counts, losses = TargetCounts(Collectives()), []
        counts.begin(lambda index: loss(torch.zeros(6, 4), *parts[index][1:]), 4)
        for index, part in enumerate(parts):
            with counts.weighing(index):
                losses.append(loss(*part))
        counts.check()
        for first in range(3):
            _compare((y, keeps), x, first, lambda batch, x: loss(x, *batch))
        total = sum(losses) / 4
    total.backward()
    return total.detach(), x.grad


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
def test_a_mean_over_micro_batches_is_that_of_the_whole_batch(name):
    rounding = 1e-3 if name == "a critic" else 1e-7
    for found, expected in zip(_weighed(WHOLE[name]), _weighed(WHOLE[name], plainly=True), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("name", OF_PARTS)
def test_a_loss_that_two_micro_batches_do_not_give_is_refused(name):
    with pytest.raises(ConfigError, match="at once and .* as the mean over two micro-batches"):
        _weighed(OF_PARTS[name])


@pytest.mark.parametrize("ignored", [0, 5])
def test_a_loss_that_the_last_stage_computes_is_compared(ignored):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 4, generator=generator), torch.randint(4, (24,), generator=generator)
    y[:ignored] = -100
    neighbours = Neighbours(x, 6, 4, 0, LastStage())
    for index, value in enumerate(zip(x.split(6), y.split(6), strict=True)):
        neighbours.keep(index, value, LastStage().compute(0, Given((), {}, value)))
    cpu = torch.device("cpu")
    run = SimpleNamespace(device=cpu, devices=(cpu,))
    with pytest.raises(ConfigError, match="compute the loss in training_step") if ignored else nullcontext():
        counts = TargetCounts(Collectives(), True)
        neighbours.compare(lambda _, answer: answer(), counts, nn.Module(), run, set(), differentiates=True)


class LogsPerplexity(nn.Module):
    """Logs the perplexity of a batch; keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def log(self, name, value): ...

    def step(self, batch, output):
        self.calls += 1
        self.seen.append(batch)
        loss = F.cross_entropy(F.dropout(output), batch[0], reduction="none").mean()
        self.log("loss", loss)
        self.log("perplexity", loss.exp())
        return {"loss": loss}


def test_micro_batches_are_compared_without_a_trace():
    generator, module = torch.Generator().manual_seed(1), LogsPerplexity()
    x, y = torch.randn(24, 4, generator=generator), torch.randint(4, (24,), generator=generator)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"training_step logs differs .*: perplexity \([0-9.]+ for [0-9.]+\) for some"):
        _compare((y,), x, 0, module.step, module)
    assert (module.calls, module.seen) == (0, [])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_compared_is_told(capsys):
    x = torch.randn(24, 4)
    _compare((x,), x, 0, lambda batch, output: (output + torch.rand(())).mean())
    _compare((x,), x, 0, lambda batch, output: output.view(6, 4).mean() * output.sum())
    for count in (lambda output: len(output), lambda output: 0 * len(output)):
        _compare((x,), x, 0, lambda batch, output, count=count: {"loss": output.sum(), "count": count(output)})
    _compare((x,), x, 0, lambda batch, output: {"loss": output.mean(), "count": len(output)})
    random, failed = capsys.readouterr().out.splitlines()
    assert random.endswith("training_step was not compared: it draws random numbers")
    assert "training_step was not compared: it failed with \"shape '[6, 4]' is invalid" in failed


def test_other_means_of_means_are_refused():
    with pytest.raises(ConfigError, match="targets that are not ignored, and 6 with zeros"):  # pseudo-labels
        _weighed(lambda x, y, m: F.cross_entropy(x, x.argmax(1).where(x[:, 0] < 0.2, -100)))
    with pytest.raises(ConfigError, match="computes 1 losses over targets in one micro-batch, 2 in another"):
        _weighed(lambda x, y, m: F.cross_entropy(x, y) + (F.nll_loss(x, y) if m.sum() > 1 else 0.0))


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.by


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.net, self.scale = nn.Sequential(Scale(), *self.net, Scale()), Scale()

    def forward(self, x):
        return self.scale(super().forward(x))


def _scaled(rank, world_size):
    trainer = _trainer()
    trainer.fit(Scaled(), joined_batches(4, 24))
    return weights_of(trainer)


@pytest.mark.slow
def test_parameters_without_dimensions_are_trained_in_all_stages_and_outside():
    plain, _ = train_module_plainly(Scaled(), joined_batches(4, 24))
    for weights in run_in_processes(_scaled, 2):
        assert relative_difference(weights, plain) < 1e-6


class InPlace(Net):
    """The second stage begins with an operation in place, whose result depends on how often it is computed."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.net[0], nn.LeakyReLU(0.5, inplace=True), *self.net[2:])


def _in_place(rank, world_size, options):
    trainer = _trainer(options={"balance": [1, 4]} | options)
    trainer.fit(InPlace(), joined_batches(3, 24))
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_stage_may_begin_with_an_operation_in_place(checkpoint):
    plain, _ = train_module_plainly(InPlace(), joined_batches(3, 24))
    for weights in run_in_processes(_in_place, 2, {"checkpoint": checkpoint}):
        assert relative_difference(weights, plain) < 1e-6


def test_buffers_are_restored_after_an_error_and_where_they_were_replaced():
    module = Ignores()
    steps = module.steps
    with pytest.raises(ValueError, match="stop"), unchanged([module]):
        module.weights += 1
        module.steps = module.steps + 1
        raise ValueError("stop")
    assert module.steps is steps
    assert module.weights.tolist() == [1, 2, 3, 4]


class HeadOutside(Net):
    """The last layer is not one of those that the pipeline cuts; validation uses it too."""

    def __init__(self):
        super().__init__()
        *layers, self.head = self.net
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return self.head(self.net(x))


def _head_outside(rank, world_size, options):
    trainer = _trainer(options=options, devices=world_size)
    batches = joined_batches(3, 24)
    trainer.fit(HeadOutside(), batches, batches[:1])
    return weights_of(trainer), float(trainer.callback_metrics["val_loss"])


@pytest.mark.slow
def test_validation_uses_layers_outside_of_the_stages_on_all_ranks():
    module, batches = HeadOutside(), joined_batches(3, 24)
    plain, _ = train_module_plainly(module, batches)
    with torch.no_grad():
        loss = float(loss_of(module(batches[0][0]), batches[0][1]))
    for weights, found in run_in_processes(_head_outside, 3, {"pipeline": 3, "balance": [2, 1, 1]}):
        assert relative_difference(weights, plain) < 1e-6
        assert found == pytest.approx(loss, rel=1e-5)


def _other_samples(rank, world_size):
    return outcome(lambda: _trainer().fit(Net(), [*joined_batches(1, 24), *joined_batches(1, 24, seed=rank)]))


def test_different_samples_on_two_stages_are_refused():
    for found in run_in_processes(_other_samples, 2):
        assert "refused: ranks that share samples got different batches (batch 2 of stage 'train')" in found


def _other_order(rank, world_size):
    batches = joined_batches(2, 24)
    reversed_ = [tuple(each.flip(0) for each in batch) for batch in batches] if rank else batches
    longer = [*batches, batches[0] if rank else tuple(each[:12] for each in batches[0])]
    return [outcome(lambda each=each: _trainer().fit(Net(), each)) for each in (reversed_, longer)]


@pytest.mark.slow
def test_another_order_or_another_size_on_two_stages_is_refused():
    for found in run_in_processes(_other_order, 2):
        assert "refused: ranks that share samples got different batches (batch 1 of stage 'train')" in found[0]
        assert "refused: the stages of the pipeline got batches of different shapes" in found[1]


class TakesMapping(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def _mapping(rank, world_size):
    batches = [UserDict(x=x, y=y) for x, y in joined_batches(2, 24)]
    batches.append(UserDict(x=batches[0]["x"][:12], y=batches[0]["y"][:12]))
    return outcome(lambda: _trainer().fit(TakesMapping(), batches))


@pytest.mark.slow
def test_a_batch_may_be_a_mapping():
    assert run_in_processes(_mapping, 2) == ["nothing"] * 2


class CallsALayerTwice(Net):
    def __init__(self):
        super().__init__()
        with seeded(1):
            layer = nn.Linear(16, 16)
            self.net = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(16, 1))


def _twice(rank, world_size):
    trainer = _trainer(options={"shard": 2, "balance": [2, 3]}, devices=4)
    trainer.fit(CallsALayerTwice(), share(trainer, joined_batches(3, 24)))
    return weights_of(trainer)


@pytest.mark.slow
def test_a_layer_of_two_stages_is_sharded():
    plain, _ = train_module_plainly(CallsALayerTwice(), joined_batches(3, 24))
    for weights in run_in_processes(_twice, 4):
        for name in plain:
            assert torch.allclose(weights[name], plain[name], rtol=1e-5, atol=1e-6)


def _other_schedule(rank, world_size):
    module, batches = Net(), joined_batches(2, 24)
    _trainer(options={"schedule": "interleaved_1f1b"}).fit(module, batches)
    again = outcome(lambda: _trainer(options={"schedule": "looped_bfs"}).fit(module, batches))
    other = outcome(lambda: _trainer(options={"schedule": "zero_bubble_v"}).fit(module, batches))
    return again, other


@pytest.mark.slow
def test_a_model_that_was_cut_keeps_its_stages():
    for again, other in run_in_processes(_other_schedule, 2):
        assert again == "nothing"
        assert "stages are on other processes" in other


class Measured(Net):
    """The last layer takes longest."""

    def __init__(self):
        super().__init__()
        slow = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        with seeded(1):
            self.net = nn.Sequential(
                nn.Dropout(0.5), *self.net[:4], nn.Sequential(nn.Linear(32, 512), slow, nn.Linear(512, 1))
            )
        self.example_input_array = torch.randn(64, 16)


def _by_time(rank, world_size):
    trainer, module = _trainer(options={"balance": "balance_by_time"}), Measured()
    trainer.fit(module, joined_batches(2, 24))
    return [name for name, parameter in module.named_parameters() if not parameter.is_meta], torch.get_rng_state()


@pytest.mark.slow
def test_layers_are_cut_by_measured_time():
    (first, state), (second, other) = run_in_processes(_by_time, 2)
    assert second == [name for name in second if name.startswith("net.5.")]
    assert first == ["net.1.weight", "net.1.bias", "net.3.weight", "net.3.bias"]
    assert torch.equal(state, other)


# --- Refused in a run: the same sentence on all ranks, and no hang -----------------------------------------------


class Text(nn.Module):
    def forward(self, x):
        return "text"


class ReturnsText(Net):
    def __init__(self):
        super().__init__()
        self.net.insert(2, Text())


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such layer")


class FailsInALayer(Net):
    def __init__(self):
        super().__init__()
        self.net.insert(2, Fails())


class NoSequence(sg.Module):
    lr = 5e-3

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    configure_optimizers = Net.configure_optimizers


class TwoSequences(NoSequence):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Sequential(nn.Tanh()), nn.Sequential(nn.Tanh())


class CallsLayers(Net):
    def training_step(self, batch, batch_idx):
        return self.net[0](batch[0]).sum()


class CallsTwice(Net):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum() + self.net(batch[0]).sum()


class ReturnsNone(Net):
    def training_step(self, batch, batch_idx):
        self.net(batch[0])


class LogsMetric(Net):
    def training_step(self, batch, batch_idx):
        self.log("metric", Metric())
        return super().training_step(batch, batch_idx)


class Metric:
    def update(self): ...
    def compute(self): ...
    def reset(self): ...


class Manual(Net):
    automatic_optimization = False


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class OwnBackward(Net):
    def backward(self, loss, *arguments, **options):
        loss.backward()


REFUSED = [
    (ReturnsText, {"balance": [3, 3]}, "must be Tensor, not str"),
    (FailsInALayer, {"balance": [1, 5]}, "no such layer"),
    (TwoSequences, {}, "has 2 nn.Sequential (one, other)"),
    (NoSequence, {}, "has no nn.Sequential"),
    (CallsLayers, {}, "expected one call of"),
    (Net, {"balance": [2, 2]}, "the sum 5"),
    (Net, {"microbatches": 5, "schedule": "gpipe"}, "a batch of 24 samples is divided into 5"),
    (Net, {"schedule": "zero_bubble_v", "balance": [1, 4]}, "expected 4"),
    (Manual, {}, "manual"),
    (Lbfgs, {}, "closure-optimizers"),
    (OwnBackward, {}, "backward"),
]
#: Raised on one rank, in the middle of a step: the other ranks end with a report of it.
REFUSED_ON_ONE = [
    (CallsTwice, {}, "called net twice"),
    (ReturnsNone, {}, "training_step returned a NoneType"),
    (LogsMetric, {}, "got a Metric in training_step under a pipeline"),
]


def _refused(rank, world_size, make, options):
    return outcome(lambda: _trainer(options=options).fit(make(), joined_batches(2, 24)))


@pytest.mark.every_push(
    "must be Tensor, not str by ReturnsText",
    "no such layer by FailsInALayer",
    "expected one call of by CallsLayers",
)
@pytest.mark.parametrize(
    ("make", "options", "found"), REFUSED, ids=[f"{found} by {make.__name__}" for make, _, found in REFUSED]
)
def test_what_cannot_be_pipelined_is_refused_on_all_ranks(make, options, found):
    first, second = run_in_processes(_refused, 2, make, options)
    assert first.startswith("refused: ")
    assert found in first
    assert found in second


def _averaged(rank, world_size):
    trainer = _trainer(callbacks=[EMA(decay=0.9)])
    return outcome(lambda: trainer.fit(Net(), joined_batches(2, 24)))


def test_an_average_of_parameters_that_other_stages_have_is_refused():
    for found in run_in_processes(_averaged, 2):
        assert "refused: ema averages the parameters of a process" in found


def _failing(rank, world_size, make, options):
    _trainer(options=options).fit(make(), joined_batches(2, 24))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "options", "found"), REFUSED_ON_ONE, ids=lambda each: getattr(each, "__name__", None))
def test_what_one_rank_finds_ends_all(make, options, found):
    with pytest.raises(AssertionError, match=found):
        run_in_processes(_failing, 2, make, options)
