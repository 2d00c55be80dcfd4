"""The gradient of a step is that of the mean over all targets of its window, on all ranks, under every strategy."""

from __future__ import annotations

import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import stratagem as sg
from stratagem.api.seeding import seeded
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import relative_difference
from stratagem_testing.training import share, weights_of
from stratagem_trainer.targets import Targets

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}  # fmt: skip
WORDS, LENGTH, SAMPLES = 23, 8, 8
MASKS = ("some", "prompts", "one sample")


class Reader(sg.Module):
    """Scores each next word from the word before it; its loss is a mean, or a sum with the number of targets."""

    def __init__(self, returns="mean", lr=0.1):
        super().__init__()
        self.returns, self.lr = returns, lr
        with seeded(3):
            layers = [nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh()]
            self.net = nn.Sequential(*layers, nn.Linear(16, WORDS))

    @property
    def sequential_module(self):
        return self.net

    def parallel_plan(self):
        return {"net.1": "colwise", "net.3": "rowwise"}

    def training_step(self, batch, batch_idx):
        scores, targets = 6 * self.net(batch[0]).flatten(0, 1), batch[1].flatten()
        if self.returns == "mean":
            return F.cross_entropy(scores, targets)
        count = (targets != -100).sum(0, keepdim=self.returns == "element")
        return {"loss": F.cross_entropy(scores, targets, reduction="sum"), "count": count}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def texts(mask, steps=7):
    """Return batches of words and targets, of which samples have different numbers."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(WORDS, (steps, SAMPLES, LENGTH), generator=generator)
    targets = torch.randint(WORDS, (steps, SAMPLES, LENGTH), generator=generator)
    draw = torch.rand(steps, SAMPLES, LENGTH, generator=generator)
    if mask == "some":
        ignored = draw < 0.7
    elif mask == "prompts":  # no rank, micro-batch and part of a sequence without a target
        prompts = (torch.arange(SAMPLES) + torch.arange(steps)[:, None]) % (LENGTH - 1)
        ignored = torch.arange(LENGTH) < prompts[..., None]
    else:  # nearly all targets are those of one sample
        ignored = (torch.arange(SAMPLES) != 1)[:, None] & (torch.arange(LENGTH) != 0) & (torch.arange(LENGTH) != 7)
        ignored = ignored.expand(steps, SAMPLES, LENGTH)
    return list(zip(words, targets.masked_fill(ignored, -100), strict=True))


def plain(batches, accumulate, max_norm=None):
    """Return the weights after plain steps on whole windows, and the largest norm of a gradient."""
    model, norms = Reader("sum"), []
    optimizer = model.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        outputs = [model.training_step(batch, 0) for batch in batches[start : start + accumulate]]
        (sum(each["loss"] for each in outputs) / sum(each["count"] for each in outputs)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, max(norms)


def _trained(rank, world_size, strategy, returns, masks, windows):
    """Return the difference from one plain process for each mask and window, and the smallest norm."""
    found, norms = {}, []
    counted = {"loss_normalization": {"labels": 1}} if returns == "mean" else {}
    for mask in masks:
        batches = texts(mask)
        for accumulate, max_norm in windows:
            expected, norm = plain(batches, accumulate, max_norm)
            norms.append(norm)
            trainer = sg.Trainer(
                strategy=strategy, devices=world_size, accumulate_grad_batches=accumulate, gradient_clip_val=max_norm,
                **counted, **QUIET,
            )  # fmt: skip
            trainer.fit(Reader(returns), share(trainer, batches))
            found[mask, accumulate, max_norm] = relative_difference(weights_of(trainer), expected)
    return found, min(norms)


STRATEGIES = {
    "ddp": "ddp",
    "ddp_sharded": "ddp_sharded",
    "fsdp": "fsdp",
    "tensor": {"name": "parallel", "tensor": 2},
    "context": {"name": "parallel", "context": 2, "check_parts": False},  # words are scored one by one
    "pipeline": {"name": "parallel", "pipeline": 2, "microbatches": 4},
    "shard": {"name": "parallel", "shard": 2},
    "deepspeed_stage_1": "deepspeed_stage_1",
    "deepspeed_stage_2": "deepspeed_stage_2",
    "deepspeed_stage_3": "deepspeed_stage_3",
}
WINDOWS = ((1, None), (3, 0.5))


@pytest.mark.when_changed("plugins/deepspeed/", cases=("mean-deepspeed_stage_2",))
@pytest.mark.when_changed(
    "plugins/parallel/",
    "plugins/parallel_unchanged/",
    cases=(
        "mean-context",
        "element-pipeline",
    ),
)
@pytest.mark.slow
@pytest.mark.every_push(
    "mean-fsdp", "sum-ddp", "sum-pipeline", "element-pipeline", "mean-context", "mean-deepspeed_stage_2"
)
@pytest.mark.parametrize(
    ("returns", "strategy"),
    [("mean", name) for name in STRATEGIES]
    + [("sum", name) for name in STRATEGIES if "deepspeed" not in name]
    + [("element", "pipeline")],
)
def test_each_target_counts_alike(returns, strategy):
    for found, norm in run_in_processes(_trained, 2, STRATEGIES[strategy], returns, MASKS, WINDOWS, limit_s=360):
        assert norm > 1
        assert {case: distance for case, distance in found.items() if not distance < 1e-6} == {}
        assert len(found) == len(MASKS) * len(WINDOWS)


@pytest.mark.parametrize("returns", ["sum", "element"])
def test_each_target_counts_alike_on_several_devices_of_one_process(returns):
    found, norm = _trained(0, 2, "dp", returns, MASKS, WINDOWS)

    assert norm > 1
    assert max(found.values()) < 1e-6


def _refused(rank, world_size, strategy):
    with pytest.raises(ConfigError, match="returned a 'count', and strategy 'deepspeed_stage_1' keeps gradients"):
        _trained(rank, world_size, strategy, "sum", MASKS[:1], WINDOWS)


@pytest.mark.slow
def test_a_sum_is_refused_where_an_engine_has_the_gradients():
    run_in_processes(_refused, 2, "deepspeed_stage_1")


#: Each keeps a part of the gradients for the next step.
KEEPING = (
    {"name": "topk", "ratio": 0.2},
    "int8",
    {"name": "one_bit", "start_iter": 0},
    {"name": "powersgd", "start_powerSGD_iter": 2},
)


def _through_hooks(rank, world_size):
    """Return for each hook and window how far sums are from means, whose targets are counted before."""
    found = {}
    for hook in KEEPING:
        for accumulate in (1, 2):
            weights = []
            for returns in ("mean", "sum"):
                counted = {"loss_normalization": {"labels": 1}} if returns == "mean" else {}
                trainer = sg.Trainer(
                    strategy="ddp", devices=world_size, comm_hook=hook, accumulate_grad_batches=accumulate, **counted,
                    **QUIET,
                )  # fmt: skip
                trainer.fit(Reader(returns, lr=0.02), share(trainer, texts("some")))
                weights.append(weights_of(trainer))
            found[str(hook), accumulate] = relative_difference(*weights)
    return found


def test_hooks_that_keep_gradients_are_told_the_scale_of_sums():
    for found in run_in_processes(_through_hooks, 2):
        assert {case: distance for case, distance in found.items() if not distance < 1e-5} == {}
        assert len(found) == 2 * len(KEEPING)


def _in_parts(rank, world_size):
    trainer = sg.Trainer(
        strategy="ddp",
        devices=world_size,
        comm_hook="int8",
        callbacks=[{"name": "auto_microbatch", "microbatches": 2}],
        **QUIET,
    )
    with pytest.raises(ConfigError, match="comm_hook 'int8' averages gradients before the counts of all parts of a ba"):
        trainer.fit(Reader("sum"), share(trainer, texts("some")))


def test_hooks_that_cannot_be_told_it_in_time_are_refused():
    run_in_processes(_in_parts, 2)


class Unsized:
    """A loader without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


class SavesAt(sg.Callback):
    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if batch_idx == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _resumed(rank, world_size, folder, returns, sized):
    """Return the weights of a run, and those of runs that continue from checkpoints within it."""

    counted = {} if returns == "sum" else {"loss_normalization": {"labels": 1}}

    def fit(path=None, **arguments):
        trainer = sg.Trainer(
            strategy="ddp", devices=world_size, accumulate_grad_batches=3, default_root_dir=folder,
            **(QUIET | {"max_epochs": 2}), **counted, **arguments,
        )  # fmt: skip
        batches = share(trainer, texts("prompts"))
        trainer.fit(Reader(returns), batches if sized else Unsized(batches), ckpt_path=path)
        return weights_of(trainer)

    paths = {batch: folder / f"{batch}.ckpt" for batch in (1, 2, 4, 5, 6)}
    whole = fit(callbacks=[SavesAt(batch, path) for batch, path in paths.items()])
    return whole, {batch: fit(path) for batch, path in paths.items()}


@pytest.mark.slow
@pytest.mark.every_push("sized-sum", "unsized-mean")
@pytest.mark.parametrize("returns", ["mean", "sum"])
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_a_run_resumes_within_a_window(tmp_path, returns, sized):
    for whole, resumed in run_in_processes(_resumed, 2, tmp_path, returns, sized):
        assert {batch for batch, weights in resumed.items() if relative_difference(weights, whole) != 0} == set()


@pytest.mark.parametrize(("returns", "precision"), [("mean", "32-true"), ("mean", "16-mixed"), ("sum", "32-true")])
def test_loaders_without_a_length(returns, precision):
    expected, _ = plain(texts("prompts"), 3)
    counted = {} if returns == "sum" else {"loss_normalization": {"labels": 1}}
    trainer = sg.Trainer(accumulate_grad_batches=3, precision=precision, **counted, **QUIET)
    trainer.fit(Reader(returns), Unsized(texts("prompts")))
    assert relative_difference(weights_of(trainer), expected) < (1e-6 if precision == "32-true" else 2e-3)


class Lbfgs(Reader):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


class SkipsLast(Reader):
    """Skips the last batch of the first window."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class EndsEpoch(Reader):
    """Ends the first epoch within its second window."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


def test_windows_that_end_early_have_their_own_counts():
    batches = texts("one sample")
    for module, windows in (
        (SkipsLast("sum"), [[0], [2, 3], [4, 5], [6]]),
        (EndsEpoch("sum"), [[0, 1], [0, 1], [2, 3], [4, 5], [6]]),
    ):
        expected = Reader("sum")
        optimizer = expected.configure_optimizers()
        for window in windows:
            outputs = [expected.training_step(batches[index], 0) for index in window]
            (sum(each["loss"] for each in outputs) / sum(each["count"] for each in outputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
        epochs = 2 if isinstance(module, EndsEpoch) else 1
        trainer = sg.Trainer(accumulate_grad_batches=2, **(QUIET | {"max_epochs": epochs}))
        trainer.fit(module, batches)
        assert relative_difference(weights_of(trainer), dict(expected.state_dict())) < 1e-6, type(module).__name__


class NoTargetsFirst(Reader):
    def training_step(self, batch, batch_idx):
        targets = batch[1].masked_fill(torch.tensor(batch_idx == 0), -100)
        return super().training_step((batch[0], targets), batch_idx)


def test_a_window_without_targets_changes_nothing():
    trainer = sg.Trainer(**QUIET)
    trainer.fit(NoTargetsFirst("sum"), texts("some"))
    assert 1 < trainer.position.loss_divisor < 64


def test_a_chosen_mean_is_not_divided_by_a_count():
    weights = []
    for returns in ("mean", "sum"):
        trainer = sg.Trainer(loss_normalization="batches", **QUIET)
        trainer.fit(Reader(returns, lr=1e-4), texts("some"))
        weights.append(weights_of(trainer))
    assert relative_difference(*weights) > 1e-3  # that of the sum is larger


class Attributed(dict):
    """A batch that must not be asked for keys that it lacks."""

    def __missing__(self, key):
        raise AttributeError(key)


class Looks(sg.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        assert set(batch) == {"x"}
        return self.layer(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_without_labels_are_left_alone():
    trainer = sg.Trainer(accumulate_grad_batches=2, **QUIET)
    trainer.fit(Looks(), [Attributed(x=torch.ones(3, 2)) for _ in range(4)])
    assert trainer.global_step == 2


class Tries(sg.Callback):
    def __init__(self):
        self.tried, self.shown = [], []

    @sg.hookimpl
    def on_fit_start(self, trainer):
        with trainer.trial_steps("a test") as step:
            self.tried = [float(step(batch, number)) for number, batch in enumerate(texts("prompts", steps=4))]

    @sg.hookimpl
    def on_train_batch_end(self, trainer):
        self.shown.append(float(trainer.progress_bar_metrics["loss"]))


def test_a_sum_is_shown_and_tried_as_a_mean():
    found = []
    for returns in ("mean", "sum"):
        callback = Tries()
        sg.Trainer(callbacks=callback, **QUIET).fit(Reader(returns), texts("prompts"))
        found.append([*callback.tried, *callback.shown])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len(found[0]) == 4 + 7


class CountsFirst(Reader):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output if batch_idx == 0 else output["loss"] / output["count"]


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Reader(), {"loss_normalization": "tokens"}, "counts 'labels' of a batch, and the loader yields a tuple"),
        (Reader(), {"loss_normalization": {"label": 1}}, "loss_normalization is {'label': 1}"),
        (Reader(), {"loss_normalization": "token"}, "loss_normalization is 'token'"),
        (Reader(), {"loss_normalization": {"labels": 0.5}}, "loss_normalization.labels is 0.5"),
        (CountsFirst("sum"), {}, "returned a 'count' before, and none on rank 0 now"),
        (Reader("sum"), {"loss_normalization": {"labels": 1}}, "returned a 'count' under loss_normalization="),
        (Lbfgs("sum"), {}, "returned a 'count' under LBFGS"),
        (Lbfgs(), {"loss_normalization": {"labels": 1}}, "loss_normalization is .* with LBFGS, which evaluates"),
    ],
)
def test_what_cannot_be_counted_is_an_error(module, options, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(**QUIET, **options).fit(module, texts("some"))


class Counts(Reader):
    """Returns what `count` makes of the targets."""

    def __init__(self, count):
        super().__init__("sum")
        self.count = count

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) | {"count": self.count(batch[1] != -100)}


@pytest.mark.parametrize(
    ("count", "found"),
    [
        (lambda are_targets: are_targets.sum(1), r"a tensor of shape \(8,\) and torch.int64"),
        (lambda are_targets: are_targets, r"a tensor of shape \(8, 8\) and torch.bool"),
        (lambda are_targets: torch.ones(0), r"a tensor of shape \(0,\) and torch.float32"),
        (lambda are_targets: are_targets.any(), r"tensor\(True\)"),
        (lambda are_targets: -are_targets.sum(), r"tensor\(-\d+\)"),
        (lambda are_targets: are_targets.sum() / 0, r"tensor\(inf\)"),
        (lambda are_targets: torch.ones((), requires_grad=True), r"tensor\(1., requires_grad=True\)"),
        (lambda are_targets: True, "True"),
        (lambda are_targets: -1, "-1"),
        (lambda are_targets: float("nan"), "nan"),
        (lambda are_targets: "8", "'8'"),
    ],
)
def test_what_is_not_a_count_is_refused(count, found):
    with pytest.raises(ConfigError, match=f"training_step returned {found} as 'count'; expected the number of targets"):
        sg.Trainer(**QUIET).fit(Counts(count), texts("some"))


def test_counts_of_samples_are_refused_on_several_devices_of_one_process():
    with pytest.raises(ConfigError, match=r"training_step returned a tensor of shape \(8,\) and torch.int64"):
        sg.Trainer(strategy="dp", devices=2, **QUIET).fit(Counts(lambda are_targets: are_targets.sum(1)), texts("some"))


@pytest.mark.parametrize("count", [lambda n: n, lambda n: n[None], lambda n: n.double(), int, float])
def test_numbers_are_counts(count):
    trainer = sg.Trainer(**QUIET)
    trainer.fit(Counts(lambda are_targets: count(are_targets.sum())), texts("some"))

    assert relative_difference(weights_of(trainer), plain(texts("some"), 1)[0]) < 1e-6


class Clamped(Reader):
    """Divides by at least 1, so that the loss of a batch without targets is 0."""

    def training_step(self, batch, batch_idx):
        scores, targets = 6 * self.net(batch[0]).flatten(0, 1), batch[1].flatten()
        return F.cross_entropy(scores, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)


def without_targets(*indices):
    return [(words, targets.clone().fill_(-100) if index in indices else targets)
            for index, (words, targets) in enumerate(texts("some"))]  # fmt: skip


@pytest.mark.parametrize("empty", [(4,), (3, 4, 5)], ids=["batch", "window"])
@pytest.mark.parametrize("options", [{}, {"checks": None}, {"callbacks": "auto_microbatch"}])
def test_a_mean_of_no_targets_is_named(empty, options):
    trainer = sg.Trainer(accumulate_grad_batches=3, loss_normalization={"labels": 1}, **QUIET, **options)
    message = (
        rf"a mean that is not finite for batch {empty[0]}, in which loss_normalization counts no target; .* SUM / max"
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Reader(), without_targets(*empty))


def test_a_mean_that_is_0_without_targets_counts_nothing():
    batches = without_targets(1, 3, 4, 5)
    trainer = sg.Trainer(accumulate_grad_batches=3, loss_normalization={"labels": 1}, **QUIET)
    trainer.fit(Clamped(), batches)

    expected = Reader("sum")
    optimizer = expected.configure_optimizers()
    for window in (batches[:3], batches[3:6], batches[6:]):
        outputs = [expected.training_step(batch, 0) for batch in window]
        (sum(each["loss"] for each in outputs) / sum(each["count"] for each in outputs).clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert relative_difference(weights_of(trainer), dict(expected.state_dict())) < 1e-6


def test_a_batch_without_a_place_for_labels_is_told_what_helps():
    with pytest.raises(ConfigError, match='yields a Tensor; .*; return {"loss": SUM, "count": NUMBER} without it, or'):
        sg.Trainer(loss_normalization="tokens", **QUIET).fit(Reader(), [words for words, _ in texts("some")])


class OfStrings(UserDict):
    """A batch with names for keys alone, as a TensorDict: any other question is an error, and iterating gives rows."""

    def __getitem__(self, key):
        return self.data[{str: key}[type(key)]]

    get = __getitem__

    def __contains__(self, key):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError

    def keys(self):
        return self.data.keys()


def test_a_mapping_is_asked_for_keys_that_it_has():
    x, labels = torch.ones(2), torch.tensor([1, -100])

    assert Targets(labels=1).find(OfStrings(x=x)) is None
    assert Targets().find(OfStrings(x=x, labels=labels)) is labels
    with pytest.raises(ConfigError, match="the loader yields a OfStrings with x"):
        Targets().count(OfStrings(x=x))


def _warned(rank, world_size, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = sg.Trainer(strategy="ddp", devices=world_size, **QUIET, **options)
        trainer.fit(Reader(), share(trainer, texts("some")))
    return [str(each.message) for each in caught if "targets that are not" in str(each.message)]


def test_a_mean_of_means_is_told_once():
    first, second = run_in_processes(_warned, 2, {})
    assert len(first) == 1
    assert 'set loss_normalization="tokens"' in first[0]
    assert second == []
    assert run_in_processes(_warned, 2, {"loss_normalization": "batches"}) == [[], []]
