"""Batches are computed in as many parts as memory needs, and training is that of whole batches in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.callbacks import AutoMicrobatch
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    ByHand,
    Dropped,
    Lbfgs,
    Net,
    Unused,
    joined_batches,
    loss_of,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


class Limited(Net):
    """From batch `since` on, the device of `ranks` has memory for `most` samples at a time, in forward or backward."""

    def __init__(self, most=8, place="forward", ranks=(0, 1), since=0):
        super().__init__()
        self.most, self.place, self.ranks, self.since, self.sizes = most, place, ranks, since, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        is_short = self.trainer.global_rank in self.ranks and batch_idx >= self.since and len(x) > self.most
        if is_short and self.place == "forward":
            self(x)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")
        hidden = self.net[:2](x)
        # the last layers have their gradients when the backward fails
        out = self.net[2:](FailsInBackward.apply(hidden) if is_short else hidden)
        loss = loss_of(out, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "out": out}


class Running(Limited):
    """A running mean, which forward assigns, and a number of calls, which it counts in place."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self._count(x)
        return super().forward(x)

    def training_step(self, batch, batch_idx):
        if len(batch[0]) <= self.most:
            self._count(batch[0])
        return super().training_step(batch, batch_idx)

    def _count(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1


class Sees(sg.Callback):
    def __init__(self):
        self.outputs, self.losses = [], []

    @sg.hookimpl
    def on_train_batch_end(self, trainer, outputs):
        self.outputs.append(outputs)
        self.losses.append(trainer.callback_metrics.get("train_loss_step"))


def fit(module, batches, *callbacks, auto=None, **options):
    auto = auto or AutoMicrobatch()
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1, "callbacks": [auto, *callbacks]} | options))
    trainer.fit(module, share(trainer, batches) if trainer.world_size > 1 else batches)
    return trainer, auto


# --- One process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_training_is_that_of_whole_batches(place, accumulate, capsys):
    batches = joined_batches(7, 24)
    sees, module = Sees(), Limited(most=7, place=place, since=4)  # within a window of three
    trainer, auto = fit(module, batches, sees, accumulate_grad_batches=accumulate)

    expected, _ = train_module_plainly(Net(), batches, accumulate)
    assert relative_difference(weights_of(trainer), expected) < 1e-6
    assert auto.count == 4
    assert module.sizes[:4] == [24] * 4
    assert module.sizes[-4:] == [6] * 4
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("auto_microbatch")]
    assert lines == [
        "auto_microbatch: out of memory at batch 4 with 24 samples; 2 micro-batches of 12 from now on",
        "auto_microbatch: out of memory at batch 4 with 24 samples; 4 micro-batches of 6 from now on",
    ]


def test_parts_of_different_sizes_count_by_their_samples():
    batches = joined_batches(4, 26)
    sees, module = Sees(), Limited()
    trainer, _ = fit(module, batches, sees, auto=AutoMicrobatch(microbatches=4))
    plain = Sees()
    reference = sg.Trainer(max_epochs=1, callbacks=[plain], **QUIET)
    reference.fit(Limited(most=99), batches)

    assert module.sizes[:4] == [7, 7, 6, 6]
    assert relative_difference(weights_of(trainer), weights_of(reference)) < 1e-6
    for mine, whole in zip(sees.outputs, plain.outputs, strict=True):
        assert torch.allclose(mine["loss"], whole["loss"], rtol=1e-6)
        assert torch.allclose(mine["out"], whole["out"], atol=1e-6)
        assert not mine["out"].requires_grad
    assert torch.allclose(torch.stack(sees.losses), torch.stack(plain.losses), rtol=1e-6)
    epoch = [made.callback_metrics["train_loss_epoch"] for made in (trainer, reference)]
    assert torch.allclose(*epoch, rtol=1e-6)


class DropsOut(Limited):
    def __init__(self, **options):
        super().__init__(**options)
        self.net = Dropped().net.insert(1, nn.Dropout(0.3))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failed_attempt_leaves_no_trace(accumulate):
    weights = []
    for microbatches, since in ((1, 0), (4, 99)):  # the first attempts fail; none does
        sg.seed_everything(3)
        module = DropsOut(since=since)
        trainer, _ = fit(
            module, joined_batches(4, 32), auto=AutoMicrobatch(microbatches=microbatches),
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        weights.append(weights_of(trainer))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_buffers_are_put_back():
    states = []
    for microbatches, since in ((1, 3), (4, 99)):
        module = Running(since=since)
        fit(module, joined_batches(4, 32), auto=AutoMicrobatch(microbatches=microbatches))
        states.append((module.mean, int(module.calls)))
    # the three whole batches do not count, four parts of the last one do
    assert [calls for _, calls in states] == [4, 16]
    single = Running(since=99)
    fit(single, joined_batches(4, 32)[3:], auto=AutoMicrobatch(microbatches=4))
    assert torch.equal(states[0][0], single.mean)


def test_the_number_is_saved_and_resumed(tmp_path):
    batches = joined_batches(6, 32)
    trainer, _ = fit(Limited(), batches, max_steps=3, max_epochs=-1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Limited()
    resumed, auto = AutoMicrobatch(), AutoMicrobatch()
    trainer = sg.Trainer(max_epochs=1, callbacks=[resumed], **QUIET)
    trainer.fit(module, batches, ckpt_path=tmp_path / "a.ckpt")

    assert resumed.count == 4
    assert module.sizes == [8] * 12
    assert relative_difference(weights_of(trainer), train_module_plainly(Net(), batches)[0]) < 1e-6
    assert auto.count == 0


def test_the_smallest_size_is_kept_and_the_error_explains():
    with pytest.raises(torch.OutOfMemoryError, match="rank 0 ran out of memory on cpu, in training_step at step 0"):
        fit(Limited(most=3), joined_batches(2, 16), auto=AutoMicrobatch(smallest=4))
    with pytest.raises(torch.OutOfMemoryError, match=r'parameters; set precision="bf16-mixed"\.$'):
        fit(Limited(most=0), joined_batches(2, 16))


def test_other_errors_are_not_retried():
    class Fails(Net):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            raise RuntimeError("no such thing")

    module = Fails()
    with pytest.raises(RuntimeError, match="no such thing"):
        fit(module, joined_batches(2, 16))
    assert module.calls == 1


def test_an_optimizer_that_evaluates_the_model_itself():
    class Short(Lbfgs):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) > 8:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    batches = [tuple(each.double() for each in batch) for batch in joined_batches(3, 16)]
    trainer, auto = fit(Short(), batches)
    reference = sg.Trainer(max_epochs=1, **QUIET)
    reference.fit(Lbfgs(), batches)
    assert auto.count == 2
    assert relative_difference(weights_of(trainer), weights_of(reference)) < 1e-6


class Tokens(sg.Module):
    """Targets of -100 do not count; a batch has different numbers of them."""

    def __init__(self, summed=False):
        super().__init__()
        self.net, self.summed = nn.Linear(4, 5), summed
        torch.nn.init.normal_(self.net.weight, generator=torch.Generator().manual_seed(0))
        torch.nn.init.zeros_(self.net.bias)

    def training_step(self, batch, batch_idx):
        out, labels = self.net(batch["x"]).flatten(0, 1), batch["labels"].flatten()
        if self.summed:
            return {"loss": nn.functional.cross_entropy(out, labels, reduction="sum"), "count": (labels >= 0).sum()}
        return nn.functional.cross_entropy(out, labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def token_batches():
    generator = torch.Generator().manual_seed(1)
    batches = []
    for batch in range(4):
        labels = torch.randint(5, (7, 6), generator=generator)
        for row in range(7):
            labels[row, (batch + row) % 6 :] = -100  # one row has no target at all
        batches.append({"x": torch.randn(7, 6, 4, generator=generator), "labels": labels})
    return batches


@pytest.mark.parametrize("options", [{"loss_normalization": "tokens"}, {"summed": True}])
def test_targets_count_alike_in_parts(options):
    summed, trained = options.get("summed", False), []
    for microbatches in (1, 7, 3):
        trainer, _ = fit(
            Tokens(summed), token_batches(), auto=AutoMicrobatch(microbatches=microbatches), accumulate_grad_batches=2,
            **{name: value for name, value in options.items() if name != "summed"},
        )  # fmt: skip
        trained.append(weights_of(trainer))
    plain = _tokens_plainly(2)
    for weights in trained:
        assert relative_difference(weights, plain) < 1e-6


class CountsBooleans(Tokens):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output | {"count": output["count"] >= 0}


def test_counts_of_parts_are_checked_one_by_one():
    with pytest.raises(ConfigError, match=r"returned tensor\(True\) as 'count'"):
        fit(CountsBooleans(summed=True), token_batches(), auto=AutoMicrobatch(microbatches=7))


def _tokens_plainly(accumulate):
    module, batches = Tokens(summed=True), token_batches()
    optimizer = module.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        results = [module.training_step(batch, 0) for batch in batches[start : start + accumulate]]
        total = sum(result["loss"] for result in results) / sum(result["count"] for result in results)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return module.state_dict()


# --- Several ranks -----------------------------------------------------------------------------------------------


def _train(rank, world_size, make, options, trainer_options, batches):
    module, sees = make(**options), Sees()
    trainer, auto = fit(module, batches, sees, devices=world_size, **trainer_options)
    return weights_of(trainer), auto.count, module.sizes, trainer.global_step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_rank_recovers_alone_and_the_others_follow(place, strategy):
    batches = joined_batches(8, 48)
    options = {"place": place, "ranks": (1,), "since": 2}
    results = run_in_processes(_train, 2, Limited, options, {"strategy": strategy}, batches)

    expected, _ = train_module_plainly(Net(), batches)
    for weights, count, sizes, steps in results:
        assert relative_difference(weights, expected) < 1e-6
        assert (count, steps) == (4, 8)
        assert sizes[:2] == [24] * 2
        assert sizes[-4:] == [6] * 4
    assert results[0][2].count(24) == 3  # rank 0 computes the batch as a whole with which rank 1 ran out of memory


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"accumulate_grad_batches": 3}, {"strategy": {"name": "ddp", "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}},
    {"strategy": {"name": "ddp", "find_unused_parameters": True}, "gradient_clip_val": 0.5}, {"comm_hook": "allreduce"},
])  # fmt: skip
def test_ranks_train_as_one_process_does(options):
    batches = joined_batches(8, 48)
    limits = {"place": "backward", "ranks": (1,), "since": 4}
    results = run_in_processes(_train, 2, Limited, limits, {"strategy": "ddp"} | options, batches)

    clipped = {"max_norm": options["gradient_clip_val"]} if "gradient_clip_val" in options else {}
    expected, _ = train_module_plainly(Net(), batches, options.get("accumulate_grad_batches", 1), **clipped)
    for weights, *_ in results:
        assert relative_difference(weights, expected) < 1e-6


def _buffers(rank, world_size, batches):
    module = Running(ranks=(1,), since=2)
    fit(module, batches, devices=world_size, strategy="ddp", max_epochs=2)
    return module.mean, int(module.calls)


def test_buffers_are_sent_before_the_parts():
    results = run_in_processes(_buffers, 2, joined_batches(4, 32))
    # at the end each rank has counted the parts of the last batch after the broadcast of rank 0's
    assert all(calls == results[0][1] for _, calls in results)


def test_a_parameter_without_a_gradient_stays_without_one():
    class Some(Unused, Limited):
        def __init__(self):
            Limited.__init__(self)
            self.unused = nn.Linear(2, 2)

    trainer, _ = fit(Some(), joined_batches(2, 16))
    assert trainer.optimizers[0].state[trainer.module.unused.weight] == {}


@pytest.mark.parametrize(("options", "found"), [
    ({"strategy": "fsdp"}, "strategy 'fsdp', which provides 'sharded-parameters'"),
    ({"strategy": {"name": "ddp", "static_graph": True}}, "DDP sends messages in its first backward"),
    ({"strategy": "ddp", "sync_batchnorm": True}, "batch normalization sends messages in its forward"),
])  # fmt: skip
def test_what_sends_messages_in_parts_is_refused(options, found):
    for text in run_in_processes(_refused, 2, options):
        assert found in text


def _refused(rank, world_size, options):
    module = Net()
    module.norm = nn.BatchNorm1d(2)
    try:
        fit(module, joined_batches(2, 16), devices=world_size, **options)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_module_that_steps_is_refused():
    with pytest.raises(ConfigError, match="auto_microbatch was chosen with ByHand.automatic_optimization = False"):
        fit(ByHand(), joined_batches(2, 16))


def test_metrics_that_compute_are_refused_in_the_first_step():
    class Accuracy:
        def update(self): ...

        def compute(self): ...

        def reset(self): ...

    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("accuracy", Accuracy())
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigError, match=r"log\('accuracy'\) got a Accuracy, and batches are computed in parts"):
        fit(Logs(), joined_batches(2, 16))
