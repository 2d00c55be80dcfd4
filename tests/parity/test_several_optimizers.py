"""Several optimizers after one backward equal plain PyTorch, under every strategy; Muon orthogonalizes whole matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import _muon

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import joined_batches, part, relative_difference
from stratagem_testing.training import weights_of

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_epochs": 1}
BATCHES = joined_batches(8, 16)


class Matrices(sg.Module):
    """Its matrices are stepped by Muon, the rest by AdamW."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        layers = [nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1)]
        self.net = nn.Sequential(*layers)

    @property
    def sequential_module(self):
        return self.net

    def parallel_plan(self):
        return {"net.0": "colwise", "net.2": "rowwise"}

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 4 * ((self.net(x) - y) ** 2).mean()  # norms of gradients above 1

    def configure_optimizers(self):
        matrices = [self.net[0].weight, self.net[2].weight]
        rest = [p for p in self.parameters() if all(p is not each for each in matrices)]
        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
        halved = torch.optim.lr_scheduler.StepLR(muon, 2, gamma=0.5)
        return [muon, adamw], [{"scheduler": halved, "interval": "step"}]


@pytest.fixture
def exact_products(monkeypatch):
    """Muon computes in float64: in its bfloat16 a last bit of a gradient becomes a difference of a percent."""

    def orthogonalized(grad, coefficients, steps, eps):
        a, b, c = coefficients
        matrix = grad.double().T if grad.size(0) > grad.size(1) else grad.double()
        matrix = matrix / matrix.norm().clamp(min=eps)
        for _ in range(steps):
            gram = matrix @ matrix.T
            matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
        return (matrix.T if grad.size(0) > grad.size(1) else matrix).to(grad.dtype)

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", orthogonalized)


def plain(max_norm=None, accumulate=1):
    model = Matrices()
    optimizers, schedulers = model.configure_optimizers()
    for start in range(0, len(BATCHES), accumulate):
        for batch in BATCHES[start : start + accumulate]:
            (model.training_step(batch, 0) / accumulate).backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        schedulers[0]["scheduler"].step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def trained(rank, world_size, strategy, shares_samples, arguments):
    trainer = sg.Trainer(strategy=strategy, devices=world_size, enable_checkpointing=False, **QUIET, **arguments)
    trainer.fit(Matrices(), BATCHES if shares_samples else part(BATCHES, rank, world_size))
    return weights_of(trainer), trainer.global_step


CASES = {
    "plain": ({}, {}),
    "clipped": ({"gradient_clip_val": 0.5}, {"max_norm": 0.5}),
    "accumulated": ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"max_norm": 0.5, "accumulate": 2}),
}


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.every_push("fsdp-accumulated", "tensor-clipped", "ddp_sharded-plain", "pipeline-plain")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("strategy", "shares_samples"),
    [
        pytest.param("ddp", False, id="ddp"),
        pytest.param("ddp_sharded", False, id="ddp_sharded"),
        pytest.param("fsdp", False, id="fsdp"),
        pytest.param({"name": "parallel", "shard": 2}, False, id="shard"),
        pytest.param({"name": "parallel", "tensor": 2}, True, id="tensor"),
        pytest.param({"name": "parallel", "pipeline": 2}, True, id="pipeline"),
    ],
)
def test_they_equal_one_process(strategy, shares_samples, case):
    arguments, reference = CASES[case]
    (first, steps), (second, _) = run_in_processes(trained, 2, strategy, shares_samples, arguments)

    assert steps == (4 if case == "accumulated" else 8)
    assert relative_difference(first, plain(**reference)) < 1e-6
    assert relative_difference(first, second) == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", {"name": "parallel", "shard": 2}])
def test_muon_rounds_as_in_one_process(strategy):
    """Both ranks have the same samples, so that the mean of their gradients is exact."""
    (weights, _), _ = run_in_processes(trained, 2, strategy, True, {})

    assert relative_difference(weights, plain()) == 0


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_they_resume(tmp_path, precision):
    def fit(path=None, **limit):
        trainer = sg.Trainer(default_root_dir=tmp_path, precision=precision, **QUIET, **limit)
        trainer.fit(Matrices(), BATCHES, ckpt_path=path)
        return trainer

    whole = weights_of(fit())
    fit(max_steps=3).save_checkpoint(tmp_path / "third.ckpt")

    assert relative_difference(weights_of(fit(tmp_path / "third.ckpt")), whole) == 0


class StepsByItself(Matrices):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(optimizer_closure)


class Evaluating(Matrices):
    def configure_optimizers(self):
        return [torch.optim.LBFGS([self.net[0].weight]), torch.optim.SGD([self.net[2].weight], lr=0.1)]


@pytest.mark.parametrize(
    ("module", "message"),
    [(StepsByItself, "2 optimizers with StepsByItself.optimizer_step"), (Evaluating, "2 optimizers with LBFGS")],
)
def test_what_steps_one_by_one_is_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        sg.Trainer(enable_checkpointing=False, **QUIET).fit(module(), BATCHES)


class Poisoned(sg.Module):
    """The gradients of its first optimizer alone are not finite in batch 3; plain SGD, so that a batch may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = 4 * ((self.second(torch.tanh(self.first(x))) - y) ** 2).mean()
        zero = self.first.bias.sum() - self.first.bias.sum()  # its square root has an infinite gradient
        return loss + zero.sqrt() if batch_idx == 3 else loss

    def configure_optimizers(self):
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.second, self.first)]
        return optimizers, [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(each, 0.7), "interval": "step"} for each in optimizers
        ]


def without_the_poisoned_batch(max_norm=None):
    model = Poisoned()
    optimizers, schedulers = model.configure_optimizers()
    for index, batch in enumerate(BATCHES):
        if index == 3:
            continue
        model.training_step(batch, index).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or torch.inf)
        assert norm > 1 or index
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler["scheduler"].step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        pytest.param({"precision": {"name": "16-mixed", "init_scale": 8.0}, "checks": None}, 3e-3, id="16-mixed"),
        pytest.param({"checks": {"name": "finite", "action": "skip"}}, 1e-6, id="finite"),
    ],
)
def test_what_one_overflows_none_steps(options, tolerance, max_norm):
    """Neither do schedulers, and it counts as one step."""
    trainer = sg.Trainer(enable_checkpointing=False, gradient_clip_val=max_norm, **QUIET, **options)
    trainer.fit(Poisoned(), BATCHES)

    assert (trainer.global_step, trainer.position.skipped_steps) == (8, 1)
    assert relative_difference(weights_of(trainer), without_the_poisoned_batch(max_norm)) < tolerance


def _fit_with_hooks(rank, world_size):
    found = []
    for hook in ("fp16_compress", {"name": "topk", "ratio": 1.0}):
        trainer = sg.Trainer(
            strategy={"name": "ddp", "bucket_cap_mb": 0.001}, devices=world_size, comm_hook=hook, checks=None,
            enable_checkpointing=False, **QUIET,
        )  # fmt: skip
        trainer.fit(Poisoned(), part(BATCHES, rank, world_size))
        found.append((weights_of(trainer), trainer.position.skipped_steps))
    return found


@pytest.mark.filterwarnings("ignore:comm_hook")
def test_what_a_comm_hook_skips_no_optimizer_steps():
    for found in run_in_processes(_fit_with_hooks, 2):
        for weights, skipped in found:
            assert skipped == 1
            assert relative_difference(weights, without_the_poisoned_batch()) < 3e-3


class CountsSteps(sg.Callback):
    steps = 0

    @sg.hookimpl(wrapper=True)
    def step_optimizers(self):
        self.steps += 1
        return (yield)


def test_they_are_one_event():
    counts = CountsSteps()
    sg.Trainer(enable_checkpointing=False, callbacks=[counts], **QUIET).fit(Matrices(), BATCHES)

    assert counts.steps == len(BATCHES)


def test_a_loop_of_your_own_steps_them_together():
    run = sg.Run(accelerator="cpu", precision={"name": "16-mixed", "init_scale": 8.0})
    with run:
        module = Poisoned()
        model, *optimizers = run.setup(module, *module.configure_optimizers()[0])
        stepped = []
        for index, batch in enumerate(BATCHES):
            before = [p.detach().clone() for p in module.parameters()]
            run.backward(model.training_step(batch, index))
            stepped.append(run.optimizer_step(optimizers))
            moved = [not torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True)]
            assert moved == [stepped[-1]] * 4
            for optimizer in optimizers:
                optimizer.zero_grad()

    assert stepped == [index != 3 for index in range(8)]
