"""Each precision trains as plain PyTorch does in it, alone and in two processes."""

from __future__ import annotations

import os

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem.precisions import FullPrecision, ScaledPrecision, TruePrecision
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    Gan,
    Net,
    critic_loss,
    generator_loss,
    joined_batches,
    loss_of,
    net,
    part,
    relative_difference,
    train_plainly,
)

#: Small enough for the gradients of these models; torch's 65536 overflows on the first steps, as it is meant to.
SCALE = 1024.0
SCALED = {"name": "16-mixed", "init_scale": SCALE}
QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}


def fit(batches, precision, model=None, **arguments):
    model = Net() if model is None else model
    trainer = sg.Trainer(max_epochs=1, precision=precision, **(QUIET | arguments))
    trainer.fit(model, part(batches, int(os.environ.get("RANK", "0")), trainer.world_size))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, trainer


def mixed_reference(batches, dtype, max_norm=None, init_scale=65536.0):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=dtype is torch.float16)
    skipped = 0
    for x, y in batches:
        with torch.autocast("cpu", dtype):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return {f"net.{name}": tensor for name, tensor in model.state_dict().items()}, skipped


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.bfloat16), ("bf16", torch.bfloat16), ("16-mixed", torch.float16), (16, torch.float16)],
)
def test_mixed_precision_equals_autocast_by_hand(precision, dtype, max_norm):
    batches = joined_batches(10, 16)
    reference, _ = mixed_reference(batches, dtype, max_norm)

    weights, _ = fit(batches, precision, gradient_clip_val=max_norm)

    assert relative_difference(weights, reference) < 1e-6
    assert relative_difference(weights, train_plainly(batches, max_norm=max_norm)[0]) > 1e-6, "not mixed at all"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("64-true", torch.float64), (64, torch.float64), ("16-true", torch.float16), ("bf16-true", torch.bfloat16)],
)
def test_true_precision_equals_a_converted_model(precision, dtype):
    batches = joined_batches(6, 16)
    converted = [tuple(tensor.to(dtype) for tensor in batch) for batch in batches]
    reference, _ = train_plainly(converted, model=net().to(dtype))

    weights, _ = fit(batches, precision)

    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert relative_difference(weights, reference) < 1e-6
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("precision", ["32-true", "32", 32, None])
def test_full_precision_leaves_everything_alone(precision):
    batches = joined_batches(6, 16)

    assert relative_difference(fit(batches, precision)[0], train_plainly(batches)[0]) < 1e-7


def test_true_precision_keeps_integers_and_containers():
    strategy = sg.Run(precision="bf16-true", accelerator="cpu")
    with strategy as run:
        moved = run.transfer({"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.long), "pair": (torch.ones(1), "a")})

    assert moved["x"].dtype == torch.bfloat16
    assert moved["ids"].dtype == torch.long
    assert moved["pair"][0].dtype == torch.bfloat16
    assert moved["pair"][1] == "a"


def test_true_precision_converts_packed_sequences_and_leaves_their_lengths():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    trainer = sg.Trainer(precision="64-true", accelerator="cpu", logger=False)
    trainer.run.connect()
    (cast,) = trainer.run.transfer([packed])

    assert cast.data.dtype == torch.float64
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)


def test_true_precision_converts_subclasses_of_containers_and_keeps_their_type():
    class Batch(dict):
        pass

    with sg.Run(precision="64-true", accelerator="cpu") as run:
        moved = run.transfer(Batch(x=[torch.ones(2)]))

    assert type(moved) is Batch
    assert moved["x"][0].dtype == torch.float64


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_true_precision_does_not_make_complex_numbers_real(precision):
    module = net()
    module.register_parameter("phase", torch.nn.Parameter(torch.tensor([1 + 2j])))

    sg.Run(precision=precision, accelerator="cpu").prepare(module)

    assert module.phase.tolist() == [1 + 2j]
    assert module[0].weight.dtype != torch.float32


def test_complex_parameters_are_refused_where_the_loss_is_scaled():
    module = net()
    module.register_parameter("phase", torch.nn.Parameter(torch.tensor([1 + 2j])))

    with pytest.raises(ConfigError, match="phase is complex64 under precision '16-mixed'.*bf16-mixed"):
        sg.Run(precision="16-mixed", accelerator="cpu").prepare(module)


def test_models_are_built_in_true_precision_and_the_default_dtype_returns_after_an_error():
    trainer = sg.Trainer(precision="bf16-true", **QUIET)

    with pytest.raises(RuntimeError, match="on purpose"), trainer.init_module():
        assert torch.nn.Linear(1, 1).weight.dtype == torch.bfloat16
        raise RuntimeError("on purpose")
    assert torch.get_default_dtype() == torch.float32


class Overflowing(Net):
    """The gradient of one batch is infinite."""

    def __init__(self, bad_batch, bad_rank=0):
        super().__init__()
        self.bad_batch, self.bad_rank = bad_batch, bad_rank

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == self.bad_batch and self.global_rank == self.bad_rank:
            loss = loss * float("inf")
        return loss


def test_an_overflow_skips_the_step_and_halves_the_scale():
    batches = joined_batches(5, 16)
    reference, skipped = mixed_reference(batches[:2] + batches[3:], torch.float16, init_scale=SCALE)

    weights, trainer = fit(batches, SCALED, Overflowing(2))

    assert skipped == 0
    assert trainer.position.skipped_steps == 1
    assert trainer.precision.scaler.get_scale() == SCALE / 2
    assert relative_difference(weights, reference) < 1e-6


def test_too_large_a_scale_costs_steps_until_it_fits():
    batches = joined_batches(12, 16)
    reference, skipped = mixed_reference(batches, torch.float16, init_scale=2.0**22)

    weights, trainer = fit(batches, {"name": "16-mixed", "init_scale": 2.0**22})

    assert 0 < skipped < 12
    assert trainer.position.skipped_steps == skipped
    assert relative_difference(weights, reference) < 1e-6


def _overflow(rank, world_size, batches):
    weights, trainer = fit(batches, SCALED, Overflowing(2, bad_rank=1), strategy="ddp", devices=world_size)
    return weights, trainer.position.skipped_steps, trainer.precision.scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    batches = joined_batches(5, 16)
    reference, _ = train_plainly(batches[:2] + batches[3:])

    (first, *first_state), (second, *second_state) = run_in_processes(_overflow, 2, batches)

    assert first_state == second_state == [1, SCALE / 2]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert relative_difference(first, reference) < 1e-2


class AlwaysScaled(sg.Strategy):
    """Keeps gradients local, as a sharded strategy does: an overflow on one rank stays there unless the scaler agrees."""

    capabilities = sg.Capabilities(provides={"multi-process"})

    @sg.hookimpl
    def wrap_model(self, module):
        return module


def _local_overflow(rank, world_size, batches):
    weights, trainer = fit(batches, SCALED, Overflowing(2, bad_rank=1), strategy=AlwaysScaled(), devices=world_size)
    return trainer.position.skipped_steps


def test_ranks_agree_on_an_overflow_that_only_one_can_see():
    assert run_in_processes(_local_overflow, 2, joined_batches(5, 16)) == [1, 1]


def _one_rank_without_gradients(rank, world_size):
    with sg.Run(strategy=AlwaysScaled(), devices=world_size, precision=SCALED, accelerator="cpu") as run:
        module = net()
        model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), lr=5e-3))
        if rank == 0:
            run.backward(model(torch.ones(2, 16)).sum() * float("inf"))
        stepped = run.optimizer_step(optimizer)
        return stepped, run.stack.precision.plugin.scaler.get_scale()


def test_a_rank_without_gradients_agrees_with_the_others():
    assert run_in_processes(_one_rank_without_gradients, 2) == [(False, SCALE / 2)] * 2


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 3e-2), (SCALED, 3e-3)])
def test_two_processes_equal_one_within_the_tolerance_of_the_precision(precision, tolerance):
    batches = joined_batches(10, 16)
    reference, _ = train_plainly(batches, max_norm=1.0)

    (first, second) = run_in_processes(_mixed_ddp, 2, batches, precision)

    assert all(torch.equal(first[name], second[name]) for name in first)
    assert relative_difference(first, reference) < tolerance


def _mixed_ddp(rank, world_size, batches, precision):
    return fit(batches, precision, strategy="ddp", devices=world_size, gradient_clip_val=1.0)[0]


def gan_reference(batches):
    """Both optimizers under one scaler, updated once a batch, as torch's notes on autocast advise."""
    generator, critic = net(2)[:3], net(3)[2:]
    optimizers = [torch.optim.SGD(half.parameters(), lr=1e-2, momentum=0.9) for half in (critic, generator)]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for x, _ in batches:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            made = generator(x)
            for_critic = critic_loss(critic, torch.cat([x, x], 1), made.detach())
        optimizers[0].zero_grad()
        scaler.scale(for_critic).backward()
        scaler.step(optimizers[0])
        optimizers[1].zero_grad()
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            for_generator = generator_loss(critic, made)
        scaler.scale(for_generator).backward()
        scaler.step(optimizers[1])
        scaler.update()
    halves = {"generator": generator, "critic": critic}
    return {f"{half}.{name}": tensor for half, m in halves.items() for name, tensor in m.state_dict().items()}


def test_two_optimizers_share_one_scaler():
    batches = joined_batches(6, 16)
    weights, trainer = fit(batches, SCALED, Gan())

    assert trainer.global_step == 12
    assert trainer.position.skipped_steps == 0
    assert relative_difference(weights, gan_reference(batches)) < 1e-6


def test_both_losses_of_a_batch_are_scaled_alike_also_after_an_overflow():
    scales = []

    class Watched(Gan):
        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in (first, second):
                scales.append(self.trainer.precision.scaler.get_scale())
                optimizer.zero_grad()
                loss = self.critic(torch.cat([batch[0], batch[0]], 1)).sum() + self.generator(batch[0]).sum()
                self.manual_backward(loss * (float("inf") if batch_idx == 0 and optimizer is first else 1))
                optimizer.step()

    fit(joined_batches(3, 16), {"name": "16-mixed", "init_scale": 64.0}, Watched())

    assert scales == [64, 64, 32, 32, 32, 32]


def test_an_overflow_in_the_last_batch_is_part_of_the_saved_scale():
    class Overflowing(Gan):
        def training_step(self, batch, batch_idx):
            for factor, optimizer in zip((float("inf"), 1), self.optimizers(), strict=True):
                optimizer.zero_grad()
                loss = self.critic(torch.cat([batch[0], batch[0]], 1)).sum() + self.generator(batch[0]).sum()
                self.manual_backward(loss * factor)
                optimizer.step()

    _, trainer = fit(joined_batches(1, 16), SCALED, Overflowing())

    assert trainer.precision.state_dict()["scale"] == SCALE / 2


@pytest.mark.parametrize("missing", [0, 2])
def test_training_goes_on_after_a_batch_without_a_loss(missing):
    class Skipping(Net):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == missing else super().training_step(batch, batch_idx)

    batches = joined_batches(5, 16)
    reference, _ = mixed_reference(batches[:missing] + batches[missing + 1 :], torch.float16, init_scale=SCALE)

    weights, _ = fit(batches, SCALED, Skipping())

    assert relative_difference(weights, reference) < 1e-6


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_fused_optimizer_steps_as_a_plain_one(max_norm):
    class Fused(Overflowing):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, fused=True)

    batches = joined_batches(6, 16)
    reference, _ = mixed_reference(batches[:2] + batches[3:], torch.float16, max_norm, init_scale=SCALE)

    weights, trainer = fit(batches, SCALED, Fused(2), gradient_clip_val=max_norm)

    assert trainer.position.skipped_steps == 1
    assert relative_difference(weights, reference) < 1e-6


def own_loop(batches):
    """Yield a run, its optimizer and the loss of each batch, for loops that do more than clip once and step."""
    with sg.Run(precision=SCALED, accelerator="cpu") as run:
        module = net()
        model, optimizer = run.setup(module, torch.optim.SGD(module.parameters(), lr=5e-3, momentum=0.9))
        for x, y in run.dataloader(batches):
            yield run, optimizer, loss_of(model(x), y)


def plain_norms(batches):
    return train_plainly(batches)[1]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_clipped_and_dropped_leave_the_next_ones_scaled(set_to_none):
    batches = joined_batches(1, 16) * 3
    norms = []

    for run, optimizer, loss in own_loop(batches):
        run.backward(loss)
        norms.append(float(run.clip_gradients(optimizer, max_norm=1e9)))
        optimizer.zero_grad(set_to_none)

    assert norms == pytest.approx(plain_norms(batches)[:1] * 3, rel=1e-2)


def test_clipping_twice_unscales_once():
    batches = joined_batches(1, 16)

    for run, optimizer, loss in own_loop(batches):
        run.backward(loss)
        first = float(run.clip_gradients(optimizer, max_norm=1e9))
        run.clip_gradients(optimizer, max_value=1e9)
        second = float(run.clip_gradients(optimizer, max_norm=1e9))

    assert first == second == pytest.approx(plain_norms(batches)[0], rel=1e-2)


def test_adding_to_clipped_gradients_is_refused():
    with pytest.raises(ConfigError, match="SGD were clipped, then another backward ran.*step or zero_grad"):
        for run, optimizer, loss in own_loop(joined_batches(2, 16)):
            run.backward(loss)
            run.clip_gradients(optimizer, max_norm=1.0)


def test_gradients_of_a_loss_that_was_not_scaled_are_refused():
    with pytest.raises(ConfigError, match=r"did not scale; expected manual_backward\(loss\) or run.backward"):
        for run, optimizer, loss in own_loop(joined_batches(1, 16)):
            loss.backward()
            run.optimizer_step(optimizer)


def test_parameters_in_half_precision_are_refused_under_loss_scaling():
    with pytest.raises(ConfigError, match='parameter net.0.weight is float16.*precision="16-true"'):
        fit(joined_batches(1, 16), "16-mixed", Net().half())


def test_lbfgs_is_refused_under_loss_scaling():
    class Lbfgs(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ConfigError, match="'16-mixed' cannot step LBFGS"):
        fit(joined_batches(1, 16), "16-mixed", Lbfgs())


def test_the_scale_survives_a_restart():
    first = ScaledPrecision(init_scale=8.0)
    first.prepare_module(net(), sg.Run(accelerator="cpu"))
    second = ScaledPrecision()
    second.load_state_dict(first.state_dict())
    second.prepare_module(net(), sg.Run(accelerator="cpu"))

    assert second.scaler.get_scale() == 8.0


def test_policies():
    assert ScaledPrecision().policy().loss_scaling
    assert TruePrecision(dtype="bf16").policy().param_dtype is torch.bfloat16
    assert FullPrecision().policy().param_dtype is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("8-mixed", "precision '8-mixed' is unknown.*did you mean '16-mixed'"),
        ({"name": "16-mixed", "init_scale": 0}, "precision.16-mixed.init_scale is 0.0; expected more than 0"),
        ({"name": "bf16-mixed", "init_scale": 2.0}, "precision.bf16-mixed.init_scale is unknown"),
        (1.5, "precision is 1.5"),
    ],
)
def test_bad_choices_are_refused(choice, message):
    with pytest.raises(sg.StratagemError, match=message):
        sg.Trainer(precision=choice, **QUIET)


# --- Replaced layers ---------------------------------------------------------------------------------------------


class _Rounds(sg.Precision):
    """Replaces layers, as precisions of 8 and 4 bits do."""

    replaces_layers = True

    @sg.hookimpl
    def prepare_module(self, module):
        module.net[0] = torch.nn.Linear(16, 32)


def test_layers_that_a_precision_replaced_train_with_it_or_not_at_all():
    batches, model = joined_batches(2, 8), Net()
    fit(batches, _Rounds(), model)

    with pytest.raises(
        ConfigError, match="'_Rounds' replaced layers of this Net in an earlier run, and precision is '3"
    ):
        fit(batches, "32-true", model)
    fit(batches, _Rounds(), model)
    sg.Trainer(**QUIET).predict(model, joined_batches(1, 8))


class _HalvesInputs(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x / 2)


class _Halves(sg.Callback):
    """Replaces layers in place, as a callback for quantization-aware training does."""

    replaces_layers = True

    @sg.hookimpl
    def prepare_module(self, module):
        module.net[0].__class__ = _HalvesInputs


def test_layers_that_a_callback_replaced_train_with_it_or_not_at_all(tmp_path):
    batches, model = joined_batches(2, 8), Net()
    fit(batches, "32-true", model, callbacks=[_Halves()])
    torch.save(model, tmp_path / "model.pt")

    for kept in (model, torch.load(tmp_path / "model.pt", weights_only=False)):
        with pytest.raises(
            ConfigError, match="callback '_Halves' replaced layers of this Net in an earlier run, and this run has no"
        ):
            fit(batches, "32-true", kept)
    fit(batches, "32-true", model, callbacks=[_Halves()])
    with pytest.raises(ConfigError, match="no such callback"):  # known after a second run, too
        fit(batches, "32-true", model)
    sg.Trainer(**QUIET).predict(model, joined_batches(1, 8))
    model.net[0].__class__ = torch.nn.Linear
    fit(batches, "32-true", model)


def test_two_plugins_that_replace_layers_are_refused():
    with pytest.raises(ConfigError, match="'_Halves' cannot be used with precision '_Rounds': both replace layers"):
        sg.Trainer(precision=_Rounds(), callbacks=[_Halves()], **QUIET)
    with pytest.raises(ConfigError, match="callback '_Halves' cannot be used with callback '_Halves': both replace"):
        sg.Trainer(callbacks=[_Halves(), _Halves()], **QUIET)


@pytest.mark.parametrize("first", ["bf16-true", "64-true"])
@pytest.mark.parametrize("second", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_module_in_the_dtype_of_an_earlier_run_is_refused(first, second):
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Net()
    sg.Trainer(precision=first, max_epochs=1, **quiet).fit(module, joined_batches(1, 4))

    again = sg.Trainer(precision=second, max_epochs=1, **quiet)
    with pytest.raises(ConfigError, match=f"precision '{first}' of an earlier run converted this Net to .* '{second}'"):
        again.fit(module, joined_batches(1, 4))
    again.fit(module.float(), joined_batches(1, 4))


def test_backward_frees_the_16_bit_copies_of_weights():
    saved, left = [], []

    def keep(tensor):
        if tensor.dtype is torch.bfloat16:
            saved.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    class Watched(Net):
        def training_step(self, batch, batch_idx):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return super().training_step(batch, batch_idx)

        def on_after_backward(self):
            left.append(sum(not reference.expired() for reference in saved))

    fit(joined_batches(1, 16), "bf16-mixed", Watched())
    assert saved
    assert left == [0]
