"""The Trainer's loop on one device: limits, validation, metrics, errors a user meets first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stratagem as sg
from stratagem.api.context import RunContext
from stratagem.callbacks import ModelCheckpoint
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, data, joined_batches, relative_difference, train_plainly

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def loader(samples=32, batch_size=8, shuffle=False):
    return DataLoader(TensorDataset(*data(samples)), batch_size, shuffle=shuffle)


class Recorder(sg.Callback):
    """Remembers the order of events."""

    def __init__(self):
        self.events = []

    @sg.hookimpl
    def on_fit_start(self):
        self.events.append("fit_start")

    @sg.hookimpl
    def on_train_start(self):
        self.events.append("train_start")

    @sg.hookimpl
    def on_train_epoch_start(self):
        self.events.append("epoch_start")

    @sg.hookimpl
    def on_train_batch_start(self, batch_idx):
        self.events.append(f"batch_start {batch_idx}")

    @sg.hookimpl
    def on_before_optimizer_step(self):
        self.events.append("before_step")

    @sg.hookimpl
    def on_train_batch_end(self, batch_idx):
        self.events.append(f"batch_end {batch_idx}")

    @sg.hookimpl
    def on_validation_start(self, trainer):
        self.events.append("sanity" if trainer.sanity_checking else "validation_start")

    @sg.hookimpl
    def on_validation_batch_end(self, batch_idx):
        self.events.append(f"val {batch_idx}")

    @sg.hookimpl
    def on_validation_epoch_end(self):
        self.events.append("validation_epoch_end")

    @sg.hookimpl
    def on_validation_end(self):
        self.events.append("validation_end")

    @sg.hookimpl
    def on_train_epoch_end(self):
        self.events.append("epoch_end")

    @sg.hookimpl
    def on_train_end(self):
        self.events.append("train_end")

    @sg.hookimpl
    def on_fit_end(self):
        self.events.append("fit_end")

    @sg.hookimpl
    def on_exception(self, exception):
        self.events.append(f"exception {exception}")


def test_events_come_in_the_order_of_the_hook_reference():
    recorder = Recorder()
    trainer = sg.Trainer(max_epochs=1, callbacks=recorder, num_sanity_val_steps=1, **QUIET)

    trainer.fit(Net(), joined_batches(2, 8), joined_batches(1, 8))

    assert recorder.events == [
        "fit_start", "sanity", "val 0", "validation_epoch_end", "validation_end", "train_start", "epoch_start",
        "batch_start 0", "before_step", "batch_end 0", "batch_start 1", "before_step", "batch_end 1",
        "validation_start", "val 0", "validation_epoch_end", "validation_end", "epoch_end", "train_end", "fit_end",
    ]  # fmt: skip


def test_other_stages_tell_their_events():
    class Listener:
        def __init__(self):
            self.events = []

        @sg.hookimpl
        def on_test_start(self):
            self.events.append("test_start")

        @sg.hookimpl
        def on_test_batch_end(self):
            self.events.append("test_batch_end")

        @sg.hookimpl
        def on_test_epoch_end(self):
            self.events.append("test_epoch_end")

        @sg.hookimpl
        def on_test_end(self):
            self.events.append("test_end")

        @sg.hookimpl
        def on_predict_start(self):
            self.events.append("predict_start")

        @sg.hookimpl
        def on_predict_batch_end(self):
            self.events.append("predict_batch_end")

        @sg.hookimpl
        def on_predict_end(self):
            self.events.append("predict_end")

    listener = Listener()
    trainer = sg.Trainer(plugins=[listener], **QUIET)
    trainer.test(Net(), loader(8))
    trainer.predict(Net(), loader(8))

    assert listener.events == [
        "test_start", "test_batch_end", "test_epoch_end", "test_end", "predict_start", "predict_batch_end",
        "predict_end",
    ]  # fmt: skip


def test_training_equals_plain_pytorch():
    batches = joined_batches(12, 16)
    model = Net()

    sg.Trainer(max_epochs=1, strategy="single_device", **QUIET).fit(model, batches)

    assert relative_difference(model.state_dict(), train_plainly(batches)[0]) < 1e-7


def test_the_last_batch_of_an_epoch_always_steps():
    trainer = sg.Trainer(max_epochs=2, accumulate_grad_batches=4, **QUIET)

    trainer.fit(Net(), joined_batches(6, 8))

    assert trainer.global_step == 4


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({"max_epochs": 3}, 12, 3),
        ({"max_steps": 7}, 7, 1),
        ({"max_epochs": 1, "limit_train_batches": 2}, 2, 1),
        ({"max_epochs": 1, "limit_train_batches": 0.5}, 2, 1),
        ({"max_epochs": 2, "overfit_batches": 1}, 2, 2),
        ({"fast_dev_run": 2}, 2, 1),
        ({"fast_dev_run": True, "max_epochs": 5}, 1, 1),
        ({"max_epochs": 0}, 0, 0),
        ({"max_time": "00:00:00:00", "min_epochs": 1}, 4, 1),
    ],
)
def test_limits(limits, steps, epochs):
    trainer = sg.Trainer(**limits, **QUIET)

    trainer.fit(Net(), loader())

    assert (trainer.global_step, trainer.current_epoch) == (steps, epochs)


def test_should_stop_ends_training_after_the_batch():
    class Stop(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer, batch_idx):
            trainer.should_stop = trainer.current_epoch == 1 and batch_idx == 1

    trainer = sg.Trainer(max_epochs=5, callbacks=[Stop()], **QUIET)
    trainer.fit(Net(), loader())

    assert trainer.global_step == 6


def test_an_iterable_without_length_is_trained_to_its_end():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(x, y) for x, y in zip(*data(24), strict=True)])

    trainer = sg.Trainer(max_epochs=2, accumulate_grad_batches=2, **QUIET)
    trainer.fit(Net(), DataLoader(Stream(), 8), DataLoader(Stream(), 8))

    assert trainer.global_step == 4
    assert "val_loss" in trainer.callback_metrics


@pytest.mark.parametrize(("interval", "expected"), [(1.0, 1), (0.5, 2), (2, 2), (4, 1)])
def test_val_check_interval(interval, expected):
    recorder = Recorder()
    trainer = sg.Trainer(max_epochs=1, val_check_interval=interval, callbacks=recorder, num_sanity_val_steps=0, **QUIET)

    trainer.fit(Net(), loader(), loader(8))

    assert recorder.events.count("validation_start") == expected


def test_check_val_every_n_epoch():
    recorder = Recorder()
    trainer = sg.Trainer(max_epochs=5, check_val_every_n_epoch=2, callbacks=recorder, num_sanity_val_steps=0, **QUIET)

    trainer.fit(Net(), loader(), loader(8))

    assert recorder.events.count("validation_start") == 2


def test_validation_leaves_the_model_training_and_without_gradients():
    class Watch(Net):
        def validation_step(self, batch, batch_idx):
            assert not self.training
            assert not torch.is_grad_enabled()

        def training_step(self, batch, batch_idx):
            assert self.training
            return super().training_step(batch, batch_idx)

    sg.Trainer(max_epochs=2, **QUIET).fit(Watch(), loader(), loader(8))


def test_sanity_checking_leaves_randomness_alone():
    class Noisy(Net):
        def validation_step(self, batch, batch_idx):
            torch.randn(3)

    weights = []
    for steps in (0, 2):
        torch.manual_seed(3)
        model = Noisy()
        sg.Trainer(max_epochs=1, num_sanity_val_steps=steps, **QUIET).fit(model, loader(shuffle=True), loader(8))
        weights.append(model.state_dict())

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_metrics_are_means_weighted_by_batch_size():
    class Measures(Net):
        def validation_step(self, batch, batch_idx):
            self.log("mean", batch[0].mean())
            self.log("sum", float(len(batch[0])), reduce_fx="sum")
            self.log("max", batch[0].max(), reduce_fx="max")
            self.log("min", batch[0].min(), reduce_fx="min")
            self.log("own", batch[0].max(), reduce_fx=torch.median)

    x, _ = data(20)
    metrics = sg.Trainer(**QUIET).validate(Measures(), loader(20, 8))[0]

    assert metrics["mean"] == pytest.approx(float(x.mean()), rel=1e-5)
    assert metrics["sum"] == 20
    assert metrics["max"] == pytest.approx(float(x.max()))
    assert metrics["min"] == pytest.approx(float(x.min()))


def test_on_step_and_on_epoch_together_get_two_names():
    class Both(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("both", loss, on_step=True, on_epoch=True)
            return loss

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Both(), loader())

    assert {"both_step", "both_epoch", "both"} <= set(trainer.callback_metrics)
    assert trainer.callback_metrics["both"] == trainer.callback_metrics["both_epoch"]


def test_several_validation_loaders_get_a_suffix():
    class Two(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("index", float(dataloader_idx))

    first, second = sg.Trainer(**QUIET).validate(Two(), [loader(8), loader(8)])

    assert first == {"index/dataloader_idx_0": 0.0}
    assert second == {"index/dataloader_idx_1": 1.0}


def test_predict_returns_every_batch():
    model = Net()
    predictions = sg.Trainer(**QUIET).predict(model, loader(20, 8))

    assert [len(batch) for batch in predictions] == [8, 8, 4]
    assert torch.equal(torch.cat(predictions), model.eval()(data(20)[0]).detach())


def test_training_step_may_leave_out_the_index():
    class Short(Net):
        def training_step(self, batch):
            return super().training_step(batch, 0)

        def validation_step(self, batch):
            self.log("val_loss", 1.0)

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Short(), loader(), loader(8))

    assert trainer.callback_metrics["val_loss"] == 1.0


def test_schedulers_step_by_epoch_step_and_metric():
    rates = []

    class Scheduled(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            by_step = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
            return [optimizer], [
                {"scheduler": by_step, "interval": "step", "frequency": 2},
                {"scheduler": plateau, "monitor": "constant"},
            ]

        def training_step(self, batch, batch_idx):
            rates.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx) * 0

        def validation_step(self, batch, batch_idx):
            self.log("constant", 1.0)

    sg.Trainer(max_epochs=2, num_sanity_val_steps=0, **QUIET).fit(Scheduled(), loader(), loader(8))

    assert rates == pytest.approx([1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_plateau_that_steps_with_each_batch_gets_the_metric_of_that_batch(tmp_path, accumulated):
    class Scheduled(Net):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__()
            self.rates = []

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "score", "interval": "step"}]

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("score", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

    plain, rates = Scheduled(), []
    (optimizer,), (config,) = plain.configure_optimizers()
    plain.log = lambda *_: None
    for number, batch in enumerate(loader(), 1):
        loss = plain.training_step(batch, 0)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
            config["scheduler"].step(loss.detach())
        rates.append(optimizer.param_groups[0]["lr"])
    options = {**QUIET, "enable_checkpointing": True, "accumulate_grad_batches": accumulated}
    module, checkpoints = Scheduled(), ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    sg.Trainer(max_epochs=1, callbacks=checkpoints, **options).fit(module, loader())
    resumed, (first, *_) = Scheduled(), sorted(tmp_path.glob("*.ckpt"))
    sg.Trainer(max_epochs=1, **options).fit(resumed, loader(), ckpt_path=first)

    assert module.rates == rates
    assert len(set(rates)) > 1
    assert resumed.rates == rates[accumulated:]


def test_a_data_module_is_prepared_and_set_up():
    calls = []

    class Data(sg.DataModule):
        def prepare_data(self):
            calls.append("prepare")

        def setup(self, stage):
            calls.append(stage)

        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return loader(8)

        def test_dataloader(self):
            return loader(8)

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), datamodule=Data())
    trainer.test(datamodule=Data())

    assert calls == ["prepare", "fit", "prepare", "test"]


class Shared(Net):
    """Two optimizers have the first layer."""

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 1e-3), torch.optim.SGD(self.net[0].parameters(), 1e-3)]


class SharedByHand(Shared):
    automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, 0))
            optimizer.step()


class Unreturned(Net):
    def configure_optimizers(self):
        used, unused = (torch.optim.SGD(self.parameters(), 1e-3) for _ in range(2))
        return [used], [torch.optim.lr_scheduler.StepLR(unused, 1)]


@pytest.mark.parametrize(
    ("module", "message"),
    [(Shared, "SGD with 'net.0.weight', which is in an optimizer already"), (Unreturned, "that it did not return")],
)
def test_what_would_step_twice_or_schedule_nothing_is_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(**QUIET, max_epochs=1).fit(module(), joined_batches(2, 4))


def test_optimizers_that_the_module_steps_may_share_parameters():
    sg.Trainer(**QUIET, max_epochs=1).fit(SharedByHand(), joined_batches(2, 4))


def test_configure_model_builds_before_the_optimizer():
    class Late(Net):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            if self.net is None:
                self.net = Net().net

    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Late(), loader())

    assert trainer.global_step == 4


class BuiltUnasked(Net):
    """Builds its layers whether or not they exist."""

    def configure_model(self):
        self.net = Net().net

    def test_step(self, batch):
        self.log(
            "off", sum((p.detach() - q).abs().sum() for p, q in zip(self.parameters(), Net().parameters(), strict=True))
        )


class SetUpUnasked(BuiltUnasked):
    def setup(self, stage):
        super().configure_model()

    def configure_model(self):
        pass


@pytest.mark.parametrize("strategy", ["single_device", "fsdp"])
def test_a_model_is_built_once(tmp_path, strategy):
    module, options = BuiltUnasked(), {"strategy": strategy, "devices": 1, "max_epochs": 1}
    trainer, batches = sg.Trainer(**QUIET, **options), joined_batches(2, 4)
    trainer.validate(module, batches)
    trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    trained = trainer.test(module, batches)[0]["off"]
    trainer.predict(module, batches)
    second = sg.Trainer(**QUIET, **options)
    again = second.test(module, batches)[0]["off"]
    loaded = BuiltUnasked.load_from_checkpoint(tmp_path / "first.ckpt")
    third = sg.Trainer(**QUIET, **options)

    assert trained > 0
    assert again == third.test(loaded, batches)[0]["off"] == pytest.approx(trained)


def test_a_setup_that_replaces_trained_layers_is_refused_unless_a_checkpoint_has_them(tmp_path):
    trainer, module, batches = sg.Trainer(**QUIET, max_epochs=1), SetUpUnasked(), joined_batches(2, 4)
    trainer.validate(module, batches)
    trainer.fit(module, batches)
    trainer.save_checkpoint(tmp_path / "first.ckpt")

    with pytest.raises(ConfigError, match=r"setup\('test'\) replaced 6 parameters"):
        trainer.test(module, batches)
    assert trainer.test(module, batches, ckpt_path=tmp_path / "first.ckpt")[0]["off"] > 0


def test_a_second_fit_goes_on_with_the_optimizer():
    batches = joined_batches(4, 8)
    model = Net()
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, batches)
    trainer.max_epochs = 2
    trainer.fit(model, batches)

    assert trainer.global_step == 8
    assert relative_difference(model.state_dict(), train_plainly(batches * 2)[0]) < 1e-7


def test_hyper_parameters_are_remembered():
    class With(Net):
        def __init__(self, width, depth=2):
            super().__init__()
            self.save_hyperparameters()

    assert With(3).hparams == {"width": 3, "depth": 2}


def test_an_exception_is_told_and_raised():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of order")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="out of order"):
        sg.Trainer(max_epochs=1, callbacks=recorder, **QUIET).fit(Broken(), loader())
    assert recorder.events[-1] == "exception out of order"


# --- Bad input: one sentence each --------------------------------------------------------------------------------


class NoSteps(sg.Module):
    pass


class Nothing(Net):
    def training_step(self, batch, batch_idx):
        self.log("x", "text")
        return super().training_step(batch, batch_idx)


class WrongOption(Net):
    def training_step(self, batch, batch_idx):
        self.log("x", 1.0, on_stepp=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_epoch": 1}, "no argument 'max_epoch'.*did you mean 'max_epochs'"),
        ({"max_epochs": "1"}, "max_epochs is '1'; expected an integer or None"),
        ({"max_epochs": -2}, "max_epochs is -2; expected at least 0, or -1 for no limit"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0; expected at least 1"),
        ({"gradient_clip_val": -1}, "gradient_clip_val is -1.0; expected more than 0"),
        ({"gradient_clip_algorithm": "nom"}, "gradient_clip_algorithm is 'nom'; expected 'norm' or 'value'"),
        ({"limit_train_batches": 1.5}, "limit_train_batches is 1.5"),
        ({"num_nodes": 0}, "num_nodes is 0; expected at least 1"),
        ({"max_time": "soon"}, "max_time is 'soon'"),
        ({"gpus": 2}, "Trainer has no argument 'gpus'; expected one of its arguments; use accelerator=\"gpu\" and devices"),
        ({"replace_sampler_ddp": False}, "use use_distributed_sampler instead"),
        ({"auto_select_gpus": True}, 'use devices="auto", or list the devices'),
        ({"strategy": "ddp_cpu"}, 'use strategy="ddp_spawn", accelerator="cpu"'),
        ({"accelerator": "ddp"}, "^accelerator 'ddp' is unknown; use strategy=\"ddp\".$"),
        ({"profiler": "simpel"}, "profiler is 'simpel'; .*did you mean 'simple'"),
        ({"strategy": 3}, "strategy is 3; expected a name, a mapping or an instance of stratagem.Strategy"),
        ({"strategy": {"static_graph": True}}, 'expected a mapping with a "name"'),
        ({"strategy": {"name": "ddp", "static_grap": True}}, "strategy.ddp.static_grap is unknown.*'static_graph'"),
        ({"strategy": {"name": "ddp", "static_graph": "true"}}, "strategy.ddp.static_graph is 'true'; expected true or"),
        ({"strategy": {"name": "ddp", "bucket_cap_mb": 0}}, "strategy.ddp.bucket_cap_mb is 0.0; expected more than 0"),
        ({"strategy": "single_device", "devices": 2}, "devices=2 .* needs 'multi-process', which strategy "
         "'single_device' does not provide; choose a strategy that does: .*ddp"),
        ({"strategy": "single_device", "comm_hook": "fp16_compress"}, "comm_hook 'fp16_compress' needs "
         "'gradient-buckets', which strategy 'single_device' does not provide"),
        ({"plugins": [3]}, r"plugins\[0\] is 3"),
        ({"plugins": ["nothing_like_it"]}, r"plugins\[0\] 'nothing_like_it' is not installed"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_with_one_sentence(arguments, message):
    with pytest.raises(sg.StratagemError, match=message) as caught:
        sg.Trainer(**(QUIET | arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (NoSteps, joined_batches(1, 8), "NoSteps has no training_step; expected one, to fit"),
        (torch.nn.Identity, joined_batches(1, 8), "fit got a Identity; expected a stratagem.Module"),
        (Net, [], "the training loader has no batches"),
        (Net, None, "fit got no loader; expected a DataLoader, a datamodule, or a module with train_dataloader"),
        (Net, 3, "the train loader is a int; expected an iterable of batches"),
        (Nothing, joined_batches(1, 8), r"log\('x'\) got 'text'; expected a number"),
        (WrongOption, joined_batches(1, 8), "on_stepp.*did you mean 'on_step'"),
    ],
)
def test_bad_models_and_loaders_are_refused_with_one_sentence(model, batches, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(max_epochs=1, **QUIET).fit(model(), batches)


def test_two_answers_to_one_hook_are_refused():
    class Also:
        @sg.hookimpl
        def wrap_model(self, module):
            return module

    with pytest.raises(
        sg.StratagemError, match="hook 'wrap_model' is answered by strategy 'single_device' and by plug"
    ):
        sg.Trainer(strategy="single_device", plugins=[Also()], **QUIET)


def test_an_answer_of_none_is_an_error_that_names_the_plugin():
    class Silent:
        @sg.hookimpl
        def backward(self, loss):
            loss.backward()

    with pytest.raises(sg.StratagemError, match="plugin 'Silent' returned None from backward"):
        sg.Trainer(max_epochs=1, strategy="single_device", plugins=[Silent()], **QUIET).fit(Net(), joined_batches(1, 8))


def test_hooks_that_no_first_party_plugin_answers_work_too():
    """forward_backward belongs to strategies that own the step."""

    class Owner:
        def __init__(self):
            self.batches = 0

        @sg.hookimpl
        def forward_backward(self, module, batch, batch_idx):
            self.batches += 1
            loss = module("training_step", batch, batch_idx)
            loss.backward()
            return loss

    owner, batches, model = Owner(), joined_batches(4, 8), Net()
    sg.Trainer(max_epochs=1, strategy="single_device", plugins=[owner], **QUIET).fit(model, batches)

    assert owner.batches == 4
    assert relative_difference(model.state_dict(), train_plainly(batches)[0]) < 1e-7


# --- Checkpoints of other code -----------------------------------------------------------------------------------


class Larger(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=5e-3, momentum=0.9)


class Lenient(Larger):
    strict_loading = False


def test_a_checkpoint_of_other_code_names_what_differs_and_the_way_out(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    message = r"model state lacks 'more.bias', 'more.weight'; expected .*; load it into .* strict_loading = False"
    with pytest.raises(sg.StratagemError, match=message):
        sg.Trainer(max_epochs=2, **QUIET).fit(Larger(), joined_batches(2, 8), ckpt_path=tmp_path / "a.ckpt")
    with pytest.raises(sg.StratagemError, match=message):
        Larger.load_from_checkpoint(tmp_path / "a.ckpt")

    lenient = sg.Trainer(max_epochs=2, **QUIET)
    lenient.fit(Lenient(), joined_batches(2, 8), ckpt_path=tmp_path / "a.ckpt")
    assert lenient.global_step == 4
    assert torch.equal(
        Larger.load_from_checkpoint(tmp_path / "a.ckpt", strict=False).net[0].weight, trainer.module.net[0].weight
    )


# --- What a module may define --------------------------------------------------------------------------------------


class Telling(Net):
    def __init__(self):
        super().__init__()
        self.told = []

    def prepare_data(self):
        self.told.append("prepare_data")

    def setup(self, stage):
        self.told.append(f"setup {stage}")

    def teardown(self, stage):
        self.told.append(f"teardown {stage}")

    def validation_step(self, batch):
        self.told.append("validation_step")

    def train_dataloader(self):
        return joined_batches(2, 8)

    def val_dataloader(self):
        return joined_batches(1, 8)


for _name in (
    "on_after_backward", "on_before_zero_grad", "on_validation_epoch_start", "on_validation_batch_start",
    "on_predict_epoch_start", "on_predict_batch_start", "on_predict_epoch_end",
):  # fmt: skip
    setattr(Telling, _name, lambda self, _name=_name: self.told.append(_name))


def test_a_module_is_told_of_more_than_plugins_are():
    module = Telling()
    trainer = sg.Trainer(max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module)
    step = ["on_after_backward", "on_before_zero_grad"]
    validation = ["on_validation_epoch_start", "on_validation_batch_start", "validation_step"]
    assert module.told == ["prepare_data", "setup fit", *step, *step, *validation, "teardown fit"]
    module.told.clear()
    trainer.predict(dataloaders=[batch[0] for batch in joined_batches(1, 8)])
    assert module.told == [
        "prepare_data", "setup predict", "on_predict_epoch_start", "on_predict_batch_start", "on_predict_epoch_end",
        "teardown predict",
    ]  # fmt: skip


def _unprepared(rank, world_size):
    class Broken(Net):
        def prepare_data(self):
            raise OSError("no network")

    with pytest.raises((OSError, sg.StratagemError), match="no network") as caught:
        sg.Trainer(max_epochs=1, strategy="ddp", devices=world_size, **QUIET).fit(Broken(), joined_batches(2, 8))
    return type(caught.value).__name__


def test_data_that_cannot_be_prepared_end_all_ranks():
    assert run_in_processes(_unprepared, 2) == ["OSError", "StratagemError"]


def test_min_steps_outlive_should_stop():
    class Stopper(sg.Callback):
        @sg.hookimpl
        def on_train_batch_end(self, trainer):
            trainer.should_stop = True

    trainer = sg.Trainer(max_epochs=5, min_steps=5, callbacks=[Stopper()], **QUIET)
    trainer.fit(Net(), joined_batches(3, 8))
    assert trainer.global_step == 5


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.criterion(self(batch[0]), batch[1])
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_schedulers_are_stepped_by_whoever_steps_optimizers():
    trainer = sg.Trainer(max_epochs=3, **QUIET)
    trainer.fit(ByHand(), joined_batches(2, 8))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**3)


def test_a_checkpoint_of_an_earlier_layout_says_so(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)
    state["rng"] = {"now": [rank["random"] for rank in state.pop("ranks")]}
    torch.save(state, tmp_path / "old.ckpt")
    with pytest.raises(sg.StratagemError, match="has no 'ranks'.*load_from_checkpoint"):
        sg.Trainer(max_epochs=2, **QUIET).fit(Net(), joined_batches(2, 8), ckpt_path=tmp_path / "old.ckpt")


def test_a_closed_trainer_saves_no_checkpoint_without_its_optimizers(tmp_path):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(Net(), joined_batches(2, 8))
    trainer.close()

    with pytest.raises(ConfigError, match=r"save_checkpoint was called after close\(\)"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert "state_dict" in torch.load(tmp_path / "a.ckpt", weights_only=True)


#: What the Trainer of Lightning 2.6 has of the names below.
OF_LIGHTNING = {
    "accelerator", "accumulate_grad_batches", "callback_metrics", "callbacks", "check_val_every_n_epoch",
    "checkpoint_callback", "checkpoint_callbacks", "ckpt_path", "current_epoch", "datamodule", "default_root_dir",
    "device_ids", "early_stopping_callback", "early_stopping_callbacks", "estimated_stepping_batches", "evaluating",
    "fast_dev_run", "fit", "global_rank", "global_step", "gradient_clip_algorithm", "gradient_clip_val",
    "init_module", "interrupted", "is_global_zero", "is_last_batch", "lightning_module", "num_sanity_val_batches", "limit_predict_batches", "limit_test_batches",
    "limit_train_batches", "limit_val_batches", "local_rank", "log_dir", "log_every_n_steps", "logged_metrics",
    "logger", "loggers", "lr_scheduler_configs", "max_epochs", "max_steps", "min_epochs", "min_steps", "model",
    "node_rank", "num_devices", "num_nodes", "num_predict_batches", "num_sanity_val_steps", "num_test_batches",
    "num_training_batches", "num_val_batches", "optimizers", "overfit_batches", "precision", "predict",
    "predict_dataloaders", "predicting", "print", "progress_bar_metrics", "sanity_checking", "save_checkpoint",
    "should_stop", "state", "strategy", "test", "test_dataloaders", "testing", "train_dataloader", "training",
    "val_check_interval", "val_dataloaders", "validate", "validating", "world_size",
}  # fmt: skip


def test_the_trainer_and_the_run_have_few_public_names():
    trainer = sg.Trainer(logger=False, enable_checkpointing=False)
    names = {name for name in dir(trainer) if not name.startswith("_")}
    assert names >= OF_LIGHTNING
    assert len(names - OF_LIGHTNING) <= 24
    seen_by_hooks = {*dir(RunContext), *RunContext.__annotations__}
    assert len([name for name in dir(sg.Run) if not name.startswith("_") and name not in seen_by_hooks]) <= 30


@pytest.mark.parametrize("below", ["", "runs/first"])
def test_a_root_that_is_a_file_is_refused_at_once(tmp_path, below):
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError, match=r"default_root_dir is .*a_file.* \(code\), and .*a_file is a file"):
        sg.Trainer(default_root_dir=tmp_path / "a_file" / below, accelerator="cpu")


def test_a_copy_of_a_trainer_trains_as_well():
    trainer = copy.deepcopy(sg.Trainer(max_steps=2, enable_model_summary=False, **QUIET))
    trainer.fit(Net(), DataLoader(TensorDataset(*data()), batch_size=16))

    assert trainer.global_step == 2
