"""A module's own `optimizer_step`, `backward` and their siblings: called as Lightning calls them, with exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Double,
    Lbfgs,
    Net,
    joined_batches,
    loss_of,
    relative_difference,
    square,
    window_size,
)
from stratagem_testing.training import outcome, share, weights_of
from stratagem_trainer import fit_state

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
LR, LIMIT = 5e-3, 1.0


class Custom(Net):
    """Doubles the loss, warms up the learning rate, clips with torch's own function."""

    def __init__(self):
        super().__init__()
        self.norms, self.zeroed = [], []

    def backward(self, loss):
        super().backward(2 * loss)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = LR * (self.trainer.global_step + 1) / 4
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zeroed.append(batch_idx)
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        norm = nn.utils.clip_grad_norm_(self.parameters(), LIMIT)
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))


def custom_plainly(batches, accumulate=1):
    """Train as `Custom` does, without a trainer; return the weights and the norms before clipping."""
    module, norms = Net(), []
    optimizer = module.configure_optimizers()
    for index, (x, y) in enumerate(batches):
        (2 * loss_of(module(x), y) / window_size(index, len(batches), accumulate)).backward()
        if (index + 1) % accumulate == 0 or index + 1 == len(batches):
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), LIMIT)))
            for group in optimizer.param_groups:
                group["lr"] = LR * len(norms) / 4
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict(), norms


def fit(module, batches, **arguments):
    trainer = sg.Trainer(**({"max_epochs": 1, "devices": 1, "strategy": "single_device"} | QUIET | arguments))
    trainer.fit(module, share(trainer, batches))
    return trainer


# --- Numbers -----------------------------------------------------------------------------------------------------


def _train(rank, world_size, strategy, accumulate, arguments):
    module = Custom()
    trainer = fit(
        module,
        joined_batches(5, 16),
        strategy=strategy,
        devices=world_size,
        accumulate_grad_batches=accumulate,
        **arguments,
    )
    return weights_of(trainer), module.norms, module.zeroed, trainer.global_step


@pytest.mark.slow
@pytest.mark.every_push("single_device 16-mixed-1", "fsdp 16-mixed-2")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "world_size", "arguments", "tolerance"),
    [
        ("single_device", 1, {}, 1e-6),
        ("ddp", 2, {}, 1e-5),
        ("fsdp", 2, {}, 1e-5),
        ("dp", 1, {}, 1e-6),
        ("ddp", 2, {"comm_hook": "bf16_compress"}, 2e-2),
        ("single_device", 1, {"precision": "bf16-mixed"}, 2e-2),
        ("single_device", 1, {"precision": {"name": "16-mixed", "init_scale": 256.0}}, 1e-2),
        ("ddp", 2, {"precision": {"name": "16-mixed", "init_scale": 256.0}}, 1e-2),
        ("fsdp", 2, {"precision": {"name": "16-mixed", "init_scale": 256.0}}, 1e-2),
    ],
    ids=[
        "single_device", "ddp", "fsdp", "dp", "ddp bf16_compress", "single_device bf16-mixed", "single_device 16-mixed",
        "ddp 16-mixed", "fsdp 16-mixed",
    ],
)  # fmt: skip
def test_custom_methods_train_as_plain_pytorch_does(strategy, world_size, arguments, tolerance, accumulate):
    reference, norms = custom_plainly(joined_batches(5, 16), accumulate)
    assert min(norms) > LIMIT

    for weights, seen, zeroed, steps in run_in_processes(_train, world_size, strategy, accumulate, arguments):
        assert relative_difference(weights, reference) < tolerance
        assert seen == pytest.approx(norms, rel=max(tolerance, 1e-5))
        assert zeroed == list(range(0, 5, accumulate))
        assert steps == len(norms)


def test_ddp_sharded_calls_all_but_clipping():
    class Unclipped(Custom):
        configure_gradient_clipping = sg.Module.configure_gradient_clipping

    def train(rank, world_size, module):
        trainer = fit(module(), joined_batches(5, 16), strategy="ddp_sharded", devices=2, gradient_clip_val=LIMIT)
        return weights_of(trainer)

    reference, _ = custom_plainly(joined_batches(5, 16))
    for weights in run_in_processes(train, 2, Unclipped):
        assert relative_difference(weights, reference) < 1e-5
    with pytest.raises(ConfigError, match="Custom defines configure_gradient_clipping, which strategy 'ddp_sharded'"):
        sg.Trainer(strategy="ddp_sharded", devices=2, **QUIET).fit(Custom(), joined_batches(1, 8))


def test_a_step_every_other_batch():
    """The closure of Lightning's GAN guide: gradients of the batches between are computed and dropped."""

    class EveryOther(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    batches, module = joined_batches(6, 8), EveryOther()
    trainer = fit(module, batches)

    reference = Net()
    optimizer = reference.configure_optimizers()
    for x, y in batches[1::2]:
        optimizer.zero_grad()
        loss_of(reference(x), y).backward()
        optimizer.step()
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6
    assert trainer.global_step == 6  # as in Lightning: once for each call


def test_gradients_that_are_zeroed_every_other_batch_add_up():
    class Adds(Net):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    batches, module = joined_batches(4, 8), Adds()
    fit(module, batches)

    reference = Net()
    optimizer = reference.configure_optimizers()
    for index, (x, y) in enumerate(batches):
        if index % 2 == 0:
            optimizer.zero_grad()
        loss_of(reference(x), y).backward()
        optimizer.step()
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


def test_the_closure_may_be_called_several_times():
    class Twice(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            assert float(optimizer_closure()) == pytest.approx(float(optimizer_closure()))
            optimizer.step(optimizer_closure)

    batches, module = joined_batches(3, 8), Twice()
    fit(module, batches)

    reference = fit(Net(), batches).module
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


def test_an_optimizer_that_evaluates_the_model_keeps_its_numbers():
    class Counted(Lbfgs):
        events = ()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            self.events += ("step",)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def on_before_zero_grad(self, optimizer):
            self.events += ("zero",)

        def on_after_backward(self):
            self.events += ("backward",)

    batches = [tuple(tensor.double() for tensor in batch) for batch in joined_batches(3, 16)]
    custom, plain = Counted(), Lbfgs()
    fit(custom, batches)
    fit(plain, batches)

    assert relative_difference(custom.state_dict(), plain.state_dict()) < 1e-12
    assert custom.events.count("step") == 3
    assert custom.events.count("zero") == custom.events.count("backward") > 3


def test_events_of_the_step_reach_modules_with_an_optimizer_that_evaluates_the_model():
    class Told(Lbfgs):
        events = ()

        def on_before_zero_grad(self, optimizer):
            self.events += ("zero",)

        def on_after_backward(self):
            self.events += ("backward",)

    module = Told()
    fit(module, [tuple(tensor.double() for tensor in batch) for batch in joined_batches(1, 16)])

    assert module.events.count("zero") == module.events.count("backward") > 1


def test_resuming_within_a_window_repeats_custom_steps(tmp_path):
    batches = joined_batches(6, 8)
    whole = Custom()
    fit(whole, batches, accumulate_grad_batches=3)

    first = Custom()
    saver = sg.Trainer(
        max_epochs=1, accumulate_grad_batches=3, limit_train_batches=6, plugins=[Saves(tmp_path / "a.ckpt", 4)], **QUIET
    )
    saver.fit(first, batches)
    second = Custom()
    trainer = sg.Trainer(max_epochs=1, accumulate_grad_batches=3, **QUIET)
    trainer.fit(second, batches, ckpt_path=tmp_path / "a.ckpt")

    assert relative_difference(second.state_dict(), whole.state_dict()) == 0
    assert trainer.global_step == 2


class Saves:
    def __init__(self, path, after):
        self.path, self.after = path, after

    @sg.hookimpl
    def on_train_batch_end(self, trainer, batch_idx):
        if batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


def test_a_skipped_batch_leaves_no_old_gradient():
    class Skips(Net):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx != 1 else None

    batches, module = joined_batches(3, 8), Skips()
    fit(module, batches)

    reference = Net()
    optimizer = reference.configure_optimizers()
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        if index != 1:
            loss_of(reference(x), y).backward()
        optimizer.step()
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


# --- Clipping ----------------------------------------------------------------------------------------------------


def test_clip_gradients_by_hand_and_in_configure_gradient_clipping():
    class ByHand(Net):
        automatic_optimization = False
        norms = ()

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self(batch[0]), batch[1]))
            self.norms += (float(self.clip_gradients(optimizer, 0.5, "norm")),)
            optimizer.step()

    class Half(Net):
        given = ()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.given += ((gradient_clip_val, gradient_clip_algorithm),)
            self.clip_gradients(optimizer, gradient_clip_val / 2, gradient_clip_algorithm)

    batches = joined_batches(4, 8)
    reference = fit(Net(), batches, gradient_clip_val=0.5).module
    by_hand, half = ByHand(), Half()
    fit(by_hand, batches)
    fit(half, batches, gradient_clip_val=1.0)

    assert relative_difference(by_hand.state_dict(), reference.state_dict()) < 1e-6
    assert min(by_hand.norms) > 0.5
    assert relative_difference(half.state_dict(), reference.state_dict()) < 1e-6
    assert half.given == ((1.0, "norm"),) * 4


def test_clip_gradients_refuses_what_it_cannot_do():
    class Wrong(Net):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, 1.0, "agc")

    with pytest.raises(ConfigError, match='gradient_clip_algorithm=\'agc\'; expected "norm" or "value"'):
        fit(Wrong(), joined_batches(1, 8))


# --- What cannot be called, or is called wrongly -----------------------------------------------------------------


def test_a_step_without_its_closure_is_an_error():
    class Forgets(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step()

    with pytest.raises(ConfigError, match="Forgets.optimizer_step did not call its closure"):
        fit(Forgets(), joined_batches(1, 8))


def test_a_step_that_needs_a_closure_and_gets_none_is_an_error():
    class Evaluates(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    class Custom(Evaluates):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            optimizer.step()

    class Manual(Evaluates):
        automatic_optimization = False

        def training_step(self, batch):
            self.manual_backward(loss_of(self(batch[0]), batch[1]))
            self.optimizers().step()

    for kind in (Custom, Manual):
        with pytest.raises(ConfigError, match=r"LBFGS.step was called without a closure; .*call step\(closure\)"):
            fit(kind(), joined_batches(1, 8))


def test_a_step_past_the_loss_scale_is_an_error():
    class Raw(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            optimizer.optimizer.step()

    class Handle(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            self.optimizers().step()

    class Every(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure() if batch_idx % 2 else optimizer.step(closure=optimizer_closure)

    fit(raw := Raw(), joined_batches(1, 8))  # without a loss scale it is an ordinary step
    assert relative_difference(raw.state_dict(), Net().state_dict()) > 0
    module = Raw()
    with pytest.raises(ConfigError, match="SGD.step was called on the optimizer that configure_optimizers made"):
        fit(module, joined_batches(1, 8), precision="16-mixed")
    assert relative_difference(module.state_dict(), Net().state_dict()) == 0
    for allowed in (Handle, Every):
        fit(allowed(), joined_batches(2, 8), precision="16-mixed")
    optimizer = module.trainer.run.optimizers[0]
    optimizer.step()  # nothing of the check is left behind


@pytest.mark.parametrize("name", ["backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"])
def test_a_strategy_that_cannot_call_a_method_says_so(name):
    class Central(sg.Strategy):
        @sg.hookimpl
        def wrap_model(self, module):
            return module

    module = Net()
    setattr(module, name, getattr(Custom(), name))  # an attribute counts, too

    for strategy in (Central(), "deepspeed"):
        with pytest.raises(
            ConfigError, match=f"Net defines {name}, which strategy '[cC]?.*' cannot call; expected a strategy"
        ):
            sg.Trainer(strategy=strategy, **QUIET).fit(module, joined_batches(1, 8))


def test_methods_that_manual_optimization_does_not_call_are_named():
    class ByHand(Custom):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss_of(self(batch[0]), batch[1]))
            optimizer.step()

    by_hand, reference = ByHand(), Net()
    with pytest.warns(UserWarning, match="ByHand defines optimizer_step, optimizer_zero_grad, configure_gradient_cl"):
        fit(by_hand, joined_batches(2, 8))
    optimizer = reference.configure_optimizers()
    for x, y in joined_batches(2, 8):
        optimizer.zero_grad()
        (2 * loss_of(reference(x), y)).backward()  # its own backward is called
        optimizer.step()

    assert relative_difference(by_hand.state_dict(), reference.state_dict()) < 1e-6


# --- Schedulers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_lr_scheduler_step_steps_the_scheduler(interval):
    class Steps(Net):
        calls = ()

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += (metric,)
            scheduler.step()
            scheduler.step()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

    module = Steps()
    trainer = fit(module, joined_batches(2, 8))

    count = 2 if interval == "step" else 1
    assert module.calls == (None,) * count
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(LR * 0.25**count)


def test_lr_scheduler_step_gets_the_metric_of_a_plateau():
    class Plateau(Net):
        calls = ()

        def lr_scheduler_step(self, scheduler, metric):
            self.calls += (float(metric),)
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}

    module = Plateau()
    trainer = fit(module, joined_batches(2, 8))

    assert module.calls == (pytest.approx(float(trainer.callback_metrics["train_loss"])),)


# --- Skipping the rest of an epoch -------------------------------------------------------------------------------


class Skipping(Net):
    """Ends the first epoch before its third batch, in the middle of a window."""

    def __init__(self, ranks=(0, 1)):
        super().__init__()
        self.ranks, self.seen = ranks, []

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == 3 and self.global_rank in self.ranks:
            return -1
        self.seen.append(batch_idx)
        return None

    def on_train_epoch_end(self):
        self.seen.append("end")


def _skip(rank, world_size, ranks):
    fit_state.BARRIER_TIMEOUT_S = 60.0 if len(ranks) == world_size else 2.0
    module = Skipping(ranks)
    trainer = sg.Trainer(max_epochs=2, strategy="ddp", devices=2, accumulate_grad_batches=2, **QUIET)
    said = outcome(lambda: trainer.fit(module, share(trainer, joined_batches(5, 8))))
    return said, module.seen, trainer.global_step, {n: p.detach().clone() for n, p in module.named_parameters()}


def test_minus_one_skips_the_rest_of_the_epoch():
    class Reference(Net):
        pass

    module, batches = Skipping(), joined_batches(5, 8)
    trainer = fit(module, batches, max_epochs=2, accumulate_grad_batches=2)
    reference = Net()
    optimizer = reference.configure_optimizers()
    for window in (batches[:2], batches[:2], batches[2:4], batches[4:]):
        optimizer.zero_grad()
        for x, y in window:
            (loss_of(reference(x), y) / len(window)).backward()
        optimizer.step()

    assert module.seen == [0, 1, 2, "end", 0, 1, 2, 3, 4, "end"]
    assert trainer.global_step == 4
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


@pytest.mark.slow
def test_minus_one_on_all_ranks_skips_and_on_one_is_an_error():
    for said, seen, steps, _ in run_in_processes(_skip, 2, (0, 1)):
        assert (said, steps) == ("nothing", 4)
        assert seen == [0, 1, 2, "end", 0, 1, 2, 3, 4, "end"]

    said = [result[0] for result in run_in_processes(_skip, 2, (0,))]

    assert "on_train_batch_start returned -1 at batch 3 on rank 0, not on all ranks" in said[0]
    assert "nothing" not in said


def test_minus_one_at_the_first_batch_is_an_epoch_without_batches():
    class Nothing(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    trainer = fit(Nothing(), joined_batches(2, 8), max_epochs=2)

    assert (trainer.current_epoch, trainer.global_step) == (2, 0)


@pytest.mark.parametrize("answer", [np.int64(-1), torch.tensor(-1), -1])
def test_any_number_that_is_minus_one_skips(answer):
    class Skips(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return answer if batch_idx == 1 else None

    assert fit(Skips(), joined_batches(3, 8)).global_step == 1


def test_what_plugins_answer_means_nothing():
    class Answers(sg.Callback):
        @sg.hookimpl
        def on_train_batch_start(self):
            return -1

    class Silent(Net):
        def on_train_batch_start(self, batch, batch_idx):
            pass

    for module in (Net(), Silent()):
        assert fit(module, joined_batches(2, 8), callbacks=[Answers()]).global_step == 2


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_what_lr_scheduler_step_logs_is_kept(interval):
    class Logs(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}

        def lr_scheduler_step(self, scheduler, metric):
            scheduler.step()
            self.log("rate", scheduler.get_last_lr()[0])

    trainer = fit(Logs(), joined_batches(2, 8), max_epochs=2)

    assert float(trainer.callback_metrics["rate"]) == pytest.approx(trainer.run.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("answer", [0, True, "skip", 1.5])
def test_another_answer_than_minus_one_is_refused(answer):
    class Wrong(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return answer

    with pytest.raises(ConfigError, match="on_train_batch_start returned .* at batch 0; expected None, or -1"):
        fit(Wrong(), joined_batches(1, 8))


@pytest.mark.parametrize("limits", [{"max_epochs": -1, "max_steps": 5}, {"max_epochs": None, "max_steps": 5}])
def test_epochs_that_are_all_skipped_without_a_limit_are_an_error(limits):
    class Nothing(Net):
        seen = 0

        def on_train_batch_start(self, batch, batch_idx):
            self.seen += 1
            assert self.seen < 9, "it would go on forever"
            return -1

    class Once(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.trainer.current_epoch % 2 == 0 else None

    with (
        pytest.warns(UserWarning, match="at the first batch of epoch 0: nothing was trained"),
        pytest.raises(ConfigError, match="-1 at the first batch of epochs 0 and 1, and max_epochs sets no limit"),
    ):
        fit(Nothing(), joined_batches(2, 8), **limits)
    assert fit(Once(), joined_batches(2, 8), **limits).global_step == 5


def test_double_precision_closures_stay_exact():
    class Steps(Double):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    batches = [tuple(tensor.double() for tensor in batch) for batch in joined_batches(3, 8)]
    module, reference = Steps(), Double()
    fit(module, batches)
    optimizer = reference.configure_optimizers()
    for x, y in batches:
        optimizer.zero_grad()
        square(reference(x), y).backward()
        optimizer.step()

    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-14


class Super(Net):
    """Defines the methods of the step as `Module` does."""

    def optimizer_step(self, *arguments):
        super().optimizer_step(*arguments)

    def optimizer_zero_grad(self, *arguments):
        super().optimizer_zero_grad(*arguments)

    def backward(self, loss):
        super().backward(loss)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}])
def test_an_outer_strategy_trains_the_same_with_methods_that_only_call_super(arguments):
    def train(rank, world_size, make):
        trainer = fit(
            make(), joined_batches(7, 16), strategy={"name": "local_sgd", "period": 2}, devices=2, **arguments
        )
        return weights_of(trainer), trainer.global_step

    plain, custom = run_in_processes(train, 2, Net), run_in_processes(train, 2, Super)

    assert [relative_difference(a[0], b[0]) for a, b in zip(plain, custom, strict=True)] == [0, 0]
    assert [result[1] for result in plain] == [result[1] for result in custom]


class ByHand(Net):
    """Steps the optimizer that it made, rather than the one that it is given."""

    automatic_optimization = False

    def configure_optimizers(self):
        self.made = super().configure_optimizers()
        return self.made

    def training_step(self, batch, batch_idx):
        self.made.zero_grad()
        self.manual_backward(loss_of(self(batch[0]), batch[1]))
        self.made.step()


def test_a_step_of_the_optimizer_itself_counts():
    module = ByHand()
    trainer = fit(module, joined_batches(3, 8))
    reference = Net()
    optimizer = reference.configure_optimizers()
    for x, y in joined_batches(3, 8):
        optimizer.zero_grad()
        loss_of(reference(x), y).backward()
        optimizer.step()

    assert trainer.global_step == 3
    assert relative_difference(module.state_dict(), reference.state_dict()) < 1e-6


def test_a_step_of_the_optimizer_itself_is_refused_where_a_plugin_steps_it():
    message = "SGD.step was called on the optimizer that configure_optimizers made, and precision '16-mixed' steps it"
    with pytest.raises(ConfigError, match=message):
        fit(ByHand(), joined_batches(1, 8), precision="16-mixed")
