"""Averages of the weights are those that a plain loop computes, under every kind of strategy."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import stratagem as sg
from stratagem.callbacks import EMA, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(5, 24)
DECAY = 0.7


class Watching(Net):
    """Remembers the loss that validation sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", self.criterion(self(x), y), sync_dist=True)

    def on_train_epoch_end(self):
        self.seen.append(float(self.trainer.callback_metrics["val"]))


def ema_plainly(epochs=2):
    module = Net()
    optimizer, average, seen = module.configure_optimizers(), None, []
    for _ in range(epochs):
        for x, y in BATCHES:
            optimizer.zero_grad()
            module.criterion(module(x), y).backward()
            optimizer.step()
            now = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            average = now if average is None else {n: a + (1 - DECAY) * (now[n] - a) for n, a in average.items()}
        averaged = Net()
        averaged.load_state_dict(average)
        seen.append(float(averaged.criterion(averaged(BATCHES[0][0]), BATCHES[0][1])))
    return module.state_dict(), average, seen


def _ema(rank, world_size, strategy, keep, folder):
    arguments = QUIET | {"strategy": strategy, "devices": world_size}
    callback, module = EMA(decay=DECAY, keep=keep), Watching()
    trainer = sg.Trainer(max_epochs=2, callbacks=callback, **arguments)
    trainer.fit(module, share(trainer, BATCHES), share(trainer, BATCHES[:1]))
    straight = weights_of(trainer), callback.state_dict()["average"], module.seen

    half = sg.Trainer(max_epochs=1, callbacks=EMA(decay=DECAY, keep=False), **arguments)
    half.fit(Net(), share(half, BATCHES))
    half.save_checkpoint(f"{folder}/half.ckpt")
    resumed = EMA(decay=DECAY)
    trainer = sg.Trainer(max_epochs=2, callbacks=resumed, **arguments)
    trainer.fit(Net(), share(trainer, BATCHES), ckpt_path=f"{folder}/half.ckpt")
    return (*straight, resumed.state_dict()["average"])


@pytest.mark.every_push("True-single_device-1", "True-fsdp-2")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world_size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2)])
@pytest.mark.parametrize("keep", [True, False])
def test_ema_is_the_plain_loops_and_is_what_validation_sees(tmp_path, strategy, world_size, keep):
    weights, average, seen = ema_plainly()
    assert relative_difference(weights, average) > 1e-3, "nothing could be told apart"
    for found, averaged, watched, resumed in run_in_processes(_ema, world_size, strategy, keep, str(tmp_path)):
        assert relative_difference(found, average if keep else weights) < 1e-5
        assert relative_difference(averaged, average) < 1e-5
        assert relative_difference(resumed, average) < 1e-5
        assert watched == pytest.approx(seen, rel=1e-4)


def test_ema_updates_all_weights_in_one_call_and_to_the_bit(monkeypatch):
    module, callback, calls = Net(), EMA(decay=DECAY), []
    lerp = torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *arguments: calls.append(len(arguments[0])) or lerp(*arguments))
    callback.average = {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}
    expected = {n: callback.average[n].clone().lerp_(p.detach(), 1 - DECAY) for n, p in module.named_parameters()}
    callback.on_train_batch_end(types.SimpleNamespace(global_step=1), module)

    assert calls == [len(expected)]
    assert all(torch.equal(callback.average[name], value) for name, value in expected.items())


def test_weights_of_all_steps_count_equally_as_in_torchs_average():
    module, plain = Net(), Net()
    sg.Trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=WeightAveraging(), **QUIET).fit(module, BATCHES[:4])

    optimizer, averaged = plain.configure_optimizers(), AveragedModel(plain)
    for first, second in [(BATCHES[0], BATCHES[1]), (BATCHES[2], BATCHES[3])] * 2:
        optimizer.zero_grad()
        (sum(plain.criterion(plain(x), y) for x, y in (first, second)) / 2).backward()
        optimizer.step()
        averaged.update_parameters(plain)
    expected = averaged.module.state_dict()

    assert relative_difference(plain.state_dict(), expected) > 1e-3, "nothing could be told apart"
    assert relative_difference(module.state_dict(), expected) < 1e-6


class Normalized(Net):
    def __init__(self):
        super().__init__()
        first, *rest = self.net
        self.net = nn.Sequential(first, nn.BatchNorm1d(first.out_features), *rest)


def test_stochastic_weight_averaging_equals_torchs_own():
    trainer = sg.Trainer(max_epochs=5, callbacks=StochasticWeightAveraging(
        swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=2), **QUIET)  # fmt: skip
    module = Normalized()
    trainer.fit(module, BATCHES)

    plain = Normalized()
    optimizer, averaged, scheduler = plain.configure_optimizers(), AveragedModel(plain), None
    for epoch in range(5):
        if epoch == 2:
            scheduler = torch.optim.swa_utils.SWALR(optimizer, 1e-3, 2, "cos")
        for x, y in BATCHES:
            optimizer.zero_grad()
            plain.criterion(plain(x), y).backward()
            optimizer.step()
        if scheduler is not None:
            averaged.update_parameters(plain)
            scheduler.step()
    update_bn(BATCHES, averaged)
    expected = averaged.module.state_dict()

    assert relative_difference(plain.state_dict(), expected) > 1e-4
    assert relative_difference(module.state_dict(), expected) < 1e-6


def test_stochastic_weight_averaging_says_where_it_cannot():
    with pytest.raises(ConfigError, match="swa_epoch_start is 7; expected an epoch below max_epochs=2"):
        sg.Trainer(max_epochs=2, callbacks=StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=7), **QUIET).fit(
            Net(), BATCHES
        )
    with pytest.raises(ConfigError, match="averages full parameters, and strategy 'fsdp' shards them"):
        sg.Trainer(
            max_epochs=2, strategy="fsdp", devices=1, callbacks=StochasticWeightAveraging(swa_lrs=0.1), **QUIET
        ).fit(Net(), BATCHES)


def test_buffers_are_averaged_as_torch_does(tmp_path):
    batches = joined_batches(6, 16)
    reference, model = Normalized(), Normalized()
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = reference.configure_optimizers()
    for batch in batches:
        reference.criterion(reference(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(reference)
    keeper = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    for path, callbacks in {None: [keeper], tmp_path / "step=3.ckpt": []}.items():
        averaging = EMA(decay=0.5, use_buffers=True)
        options = QUIET | {"enable_checkpointing": bool(callbacks)}
        trainer = sg.Trainer(max_epochs=1, callbacks=[averaging, *callbacks], **options)
        trainer.fit(model, batches, ckpt_path=path)

    floating = {name: value for name, value in averaged.module.state_dict().items() if value.is_floating_point()}
    assert any("running" in name for name in floating)
    assert relative_difference({name: model.state_dict()[name] for name in floating}, floating) < 1e-6


class Saving(Watching):
    """Saves a checkpoint after each epoch."""

    folder = None

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.trainer.save_checkpoint(f"{self.folder}/within.ckpt")


def _trained_in_two_fits(rank, world_size, strategy, folder):
    """Return weights after four epochs, then those of two fits: the second one resumes, or goes on in the trainer."""
    arguments = QUIET | {"strategy": strategy, "devices": world_size}

    def fit(epochs, ckpt_path=None, **options):
        trainer, module = sg.Trainer(max_epochs=epochs, callbacks=EMA(decay=DECAY, **options), **arguments), Saving()
        Saving.folder = folder
        trainer.fit(module, share(trainer, BATCHES), share(trainer, BATCHES[:1]), ckpt_path=ckpt_path)
        return trainer, module

    straight, halves = weights_of(fit(4)[0]), {}
    for name, options in {"kept": {}, "not kept": {"keep": False}, "not validated": {"evaluate": False}}.items():
        trainer, module = fit(2, **options)
        if name != "not validated":
            loaded = Watching.load_from_checkpoint(f"{folder}/within.ckpt")
            halves[f"{name}, loss"] = float(loaded.criterion(loaded(BATCHES[0][0]), BATCHES[0][1])), module.seen[1]
        halves[f"{name}, resumed within"] = weights_of(fit(4, f"{folder}/within.ckpt")[0])
        path = f"{folder}/{name}.ckpt"
        trainer.save_checkpoint(path)
        halves[f"{name}, resumed"] = weights_of(fit(4, path)[0])
        trainer.max_epochs = 4
        trainer.fit(module, share(trainer, BATCHES), share(trainer, BATCHES[:1]))
        halves[f"{name}, second fit"] = trainer.callbacks[0].state_dict()["average"]
    return straight, halves


@pytest.mark.slow
@pytest.mark.when_changed("plugins/fsdp/", cases=("fsdp-2",))
@pytest.mark.when_changed(
    "plugins/callbacks/",
    cases=(
        "ddp-2",
        "ddp_sharded-2",
    ),
)
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("ddp_sharded", 2)]
)
def test_a_checkpoint_has_the_weights_that_were_validated_and_continues_with_those_trained(
    tmp_path, strategy, world_size
):
    for straight, halves in run_in_processes(_trained_in_two_fits, world_size, strategy, tmp_path):
        for name, found in halves.items():
            if name.endswith("loss"):
                assert found[0] == pytest.approx(found[1], rel=1e-5), name
            else:
                assert relative_difference(found, straight) < 1e-6, name
