"""Parameters are stepped in backward, to the bits of a step after it, and gradients never exist at once."""

from __future__ import annotations

import functools
import inspect

import pytest
import schedulefree
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import stratagem as sg
from stratagem.callbacks import BackboneFinetuning, LearningRateFinder, OptimizerInBackward
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import (
    ByHand,
    CustomClipping,
    CustomStep,
    Lbfgs,
    Net,
    Scalar,
    Scheduled,
    Tied,
    data,
    joined_batches,
    loss_of,
    relative_difference,
    train_module_plainly,
)
from stratagem_testing.training import share, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 16)
IN_BACKWARD = "optimizer_in_backward"
#: Arguments of each of torch's optimizers that steps without a closure; `Matrices` makes their parameters.
OPTIMIZERS = {
    "ASGD": {"t0": 2}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {"lr_decay": 0.1}, "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1}, "Adamax": {}, "Muon": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True}, "SparseAdam": {},
}  # fmt: skip


class Matrices(Net):
    """Two groups of parameters that are matrices, and the same of an embedding with sparse gradients for SparseAdam."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(*(nn.Linear(each.in_features, each.out_features, bias=False) if index % 2 == 0
                                   else each for index, each in enumerate(self.net)))  # fmt: skip
        for number, parameter in enumerate(self.net.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number), std=0.3)
        self.table = nn.Embedding(8, 16, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, x):
        if self.optimizer != "SparseAdam":
            return super().forward(x)
        return super().forward(x * self.table((x[:, 0] > 0).long()))

    def configure_optimizers(self):
        is_sparse = self.optimizer == "SparseAdam"
        parameters = [self.table.weight] if is_sparse else list(self.net.parameters())
        self.net.requires_grad_(not is_sparse)
        groups = [{"params": parameters[:1], "lr": 0.03}, {"params": parameters[1:]}][: 1 if is_sparse else 2]
        return getattr(torch.optim, self.optimizer)(groups, lr=0.01, **OPTIMIZERS[self.optimizer])


def fit(module, batches=BATCHES, *callbacks, ckpt_path=None, **options):
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1, "callbacks": [IN_BACKWARD, *callbacks]} | options))
    trainer.fit(module, share(trainer, batches) if trainer.world_size > 1 else batches, ckpt_path=ckpt_path)
    return trainer


def _train_plainly(module):
    """As `train_module_plainly`, also with sparse gradients."""
    optimizer, norms = module.configure_optimizers(), []
    for batch in BATCHES:
        loss_of(module(batch[0]), batch[1]).backward()
        gradients = [each.grad.to_dense() for each in module.parameters() if each.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict(), norms


def assert_same_bits(trainer, weights):
    for name, value in weights_of(trainer).items():
        assert torch.equal(value, weights[name]), name


# --- One process -------------------------------------------------------------------------------------------------


def test_every_optimizer_of_torch_is_compared():
    found = {name for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    assert found - {"LBFGS", "Optimizer"} == set(OPTIMIZERS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_a_plain_loop_to_the_bit(optimizer):
    expected, norms = _train_plainly(Matrices(optimizer))
    trainer = fit(Matrices(optimizer))

    assert_same_bits(trainer, expected)
    assert max(norms) > 1
    assert trainer.global_step == len(BATCHES)
    plain = sg.Trainer(**QUIET, max_epochs=1)
    plain.fit(Matrices(optimizer), BATCHES)
    states = [each.optimizers[0].state_dict() for each in (trainer, plain)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


class Watched(Net):
    """Notes how many gradients there are whenever another one is computed."""

    def __init__(self):
        super().__init__()
        self.most = 0
        for parameter in self.parameters():
            parameter.register_hook(self.note)

    def note(self, gradient):
        self.most = max(self.most, sum(each.grad is not None for each in self.parameters()))


def test_gradients_never_exist_at_once():
    module, plain = Watched(), Watched()
    fit(module)
    fit(plain, callbacks=[])

    assert (module.most, plain.most) == (0, 5)


class Seldom(Scheduled):
    """Skips a batch, and its scheduler steps with each optimizer step."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:training_step returned None")
@pytest.mark.parametrize("make", [Seldom, Tied])
def test_schedules_skipped_batches_and_shared_layers_are_as_without_it(make):
    plain = sg.Trainer(**QUIET, max_epochs=2)
    plain.fit(make(), BATCHES)
    trainer = fit(make(), max_epochs=2)

    assert_same_bits(trainer, weights_of(plain))
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (plain, trainer)]
    assert rates[0] == rates[1]
    assert trainer.global_step == plain.global_step


@pytest.mark.parametrize("first", [[IN_BACKWARD], []])
def test_a_checkpoint_resumes_with_and_without_it(first, tmp_path):
    whole = sg.Trainer(**QUIET, max_epochs=2)
    whole.fit(Matrices("AdamW"), BATCHES)
    begun = fit(Matrices("AdamW"), callbacks=first)
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    other = [] if first else [IN_BACKWARD]
    resumed = fit(Matrices("AdamW"), callbacks=other, max_epochs=2, ckpt_path=tmp_path / "begun.ckpt")

    assert_same_bits(resumed, weights_of(whole))


class Recomputed(Tied):
    """The block that is used twice is recomputed in backward."""

    reentrant = False

    def forward(self, x):
        for layer in self.net:
            if isinstance(layer, nn.Sequential):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return x


class Reentrant(Recomputed):
    reentrant = True


class Twice(Net):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx).backward()
        return super().training_step(batch, batch_idx)


def test_a_shared_layer_that_is_recomputed_is_stepped_once():
    expected, _ = train_module_plainly(Recomputed(), BATCHES)

    assert_same_bits(fit(Recomputed()), expected)


@pytest.mark.parametrize("make", [Reentrant, Twice])
def test_a_second_gradient_of_a_parameter_in_one_step_is_refused(make):
    with pytest.raises(ConfigError, match=r"a parameter of shape \(.*\) got a second gradient before the step was"):
        fit(make())


class Thawed(Net):
    def __init__(self):
        super().__init__()
        self.backbone = self.net[:4]

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[4].parameters(), lr=self.lr, momentum=0.9)


def test_parameters_that_are_thawed_later_are_stepped_in_backward():
    weights, modules = [], []
    for callbacks in ([], [IN_BACKWARD]):
        module = Thawed()
        thaws = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        weights.append(weights_of(fit(module, callbacks=[*callbacks, thaws], max_epochs=3)))
        modules.append(module)

    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    assert modules[1].backbone[0].weight._post_accumulate_grad_hooks == {}  # those of the fit are removed
    assert len(modules[1].trainer.optimizers[0].param_groups) == 2


class Halves(Net):
    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net[:2].parameters(), lr=self.lr, momentum=0.9),
            torch.optim.SGD(self.net[2:].parameters(), lr=self.lr, momentum=0.9),
        ]


def test_several_optimizers_step_their_own_parameters():
    expected, _ = train_module_plainly(Net(), BATCHES)

    assert_same_bits(fit(Halves()), expected)


class Free(Net):
    def configure_optimizers(self):
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.02, warmup_steps=3)


def test_what_an_optimizer_counts_in_its_groups_counts_once_a_step():
    plain = sg.Trainer(**QUIET, max_epochs=1)
    plain.fit(Free(), BATCHES)
    trainer = fit(Free(), callbacks=OptimizerInBackward(any_optimizer=True))

    assert_same_bits(trainer, weights_of(plain))
    assert trainer.optimizers[0].param_groups[0]["k"] == len(BATCHES)


def test_a_learning_rate_that_is_found_is_that_without_it():
    found = []
    for callbacks in ([], [IN_BACKWARD]):
        finder = LearningRateFinder(num_training_steps=20)
        fit(Net(), joined_batches(24, 16), callbacks=[*callbacks, finder])
        found.append(finder.suggestion)

    assert found[0] == found[1]


# --- Refused -----------------------------------------------------------------------------------------------------


class Hooked(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class Mine(torch.optim.SGD):
    pass


class OwnOptimizer(Net):
    def configure_optimizers(self):
        return Mine(self.parameters(), lr=self.lr)


class Reads(Net):
    def on_before_optimizer_step(self, optimizer):
        self.log("norm", nn.utils.get_total_norm([p.grad for p in self.parameters()]))


class Counts(Net):
    def training_step(self, batch, batch_idx):
        return {"loss": 16 * loss_of(self(batch[0]), batch[1]), "count": 16}


@pytest.mark.parametrize(("make", "options", "found"), [
    (Net, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2; expected 1"),
    (Net, {"accumulate_grad_batches": {0: 1, 1: 2}}, r"accumulate_grad_batches is \{0: 1, 1: 2\}"),
    (Net, {"gradient_clip_val": 1.0}, "gradient_clip_val is 1.0, which needs all gradients"),
    (Net, {"precision": "16-mixed"}, "precision '16-mixed', which provides 'loss-scaling'"),
    (Net, {"checks": {"name": "finite", "action": "skip"}}, "callback 'finite' cannot be used with .*in_backward"),
    (ByHand, {}, "ByHand.automatic_optimization is False"),
    (CustomStep, {}, "CustomStep defines optimizer_step"),
    (CustomClipping, {}, "CustomClipping defines configure_gradient_clipping"),
    (Reads, {}, "Reads defines on_before_optimizer_step"),
    (Lbfgs, {}, "LBFGS evaluates the model itself"),
    (Hooked, {}, "SGD has hooks before its step"),
    (OwnOptimizer, {}, "Mine is not torch's.*; set optimizer_in_backward.any_optimizer"),
    (Counts, {}, "training_step returned a 'count'"),
])  # fmt: skip
def test_what_needs_gradients_after_backward_is_refused(make, options, found):
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError, match=found):
        fit(module, **options)

    if make is not Counts:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("other", [
    "auto_microbatch", "gradient_norms", {"name": "gradient_accumulation_scheduler", "scheduling": {2: 4}},
    {"name": "global_batch_size", "samples": 32},
])  # fmt: skip
def test_callbacks_that_use_gradients_are_refused(other):
    module = Net()
    before = module.net[0].weight.clone()
    with pytest.raises(ConfigError, match="optimizer_in_backward|steps parameters in backward"):
        loader = DataLoader(TensorDataset(*data(32)), 16)
        fit(module, loader, callbacks=[other, IN_BACKWARD], logger="csv")

    assert torch.equal(module.net[0].weight, before)


def test_a_count_that_is_meant_as_a_number_is_left_alone():
    trainer = fit(Counts(), loss_normalization="batches", max_steps=2)

    assert trainer.global_step == 2


# --- Several processes -------------------------------------------------------------------------------------------

SHARDED = {
    "fsdp": {"strategy": "fsdp"},
    "shard": {"strategy": {"name": "parallel", "shard": 2, "replicate": 1}},
    "tensor": {"strategy": {"name": "parallel", "tensor": 2, "replicate": 1}},
}


@pytest.mark.slow
@pytest.mark.when_changed(
    "plugins/callbacks/",
    "plugins/libraries/",
    cases=(
        "sgd-fsdp",
        "sgd-shard",
        "sgd-tensor",
    ),
)
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_shards_are_stepped_in_backward_to_the_same_bits(strategy, optimizer):
    results = run_in_processes(_with_and_without, 2, SHARDED[strategy], optimizer)
    expected, norms = train_module_plainly(OfKind(optimizer), BATCHES)

    assert max(norms) > 1
    for without, in_backward, most in results:
        assert most == 0
        for name, value in without.items():
            assert torch.equal(value, in_backward[name]), name
        assert relative_difference(in_backward, expected) < 1e-5


class OfKind(Net):
    """Notes how many parameters have a gradient after backward."""

    def __init__(self, optimizer):
        super().__init__()
        self.kind, self.most = optimizer, 0

    def on_before_zero_grad(self, optimizer):
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        self.most = sum(each is not None for each in gradients)

    def configure_optimizers(self):
        return super().configure_optimizers() if self.kind == "sgd" else torch.optim.AdamW(self.parameters(), lr=0.01)


def _with_and_without(rank, world_size, options, optimizer):
    weights = []
    for callbacks in ([], [IN_BACKWARD]):
        module = OfKind(optimizer)
        weights.append(weights_of(fit(module, callbacks=callbacks, devices=world_size, **options)))
    return *weights, module.most


@pytest.mark.slow
def test_a_sharded_checkpoint_resumes_with_and_without_it(tmp_path):
    for whole, resumed in run_in_processes(_resumed, 2, str(tmp_path / "begun.ckpt")):
        assert relative_difference(resumed, whole) == 0


def _resumed(rank, world_size, path):
    make, options = functools.partial(OfKind, "adamw"), {"strategy": "fsdp", "devices": world_size}
    whole = fit(make(), callbacks=[], max_epochs=3, **options)
    fit(make(), **options).save_checkpoint(path)
    fit(make(), callbacks=[], max_epochs=2, ckpt_path=path, **options).save_checkpoint(path)
    resumed = fit(make(), max_epochs=3, ckpt_path=path, **options)
    return weights_of(whole), weights_of(resumed)


class WithMuon(Matrices):
    def __init__(self):
        super().__init__("Muon")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "strategy", "found"), [
    (Net, "ddp", "strategy 'ddp', which provides 'gradient-buckets'"),
    (Net, "ddp_sharded", "strategy 'ddp_sharded', which provides 'gradient-buckets'"),
    (Net, "local_sgd", "strategy 'local_sgd', which provides 'teams'"),
    (Net, {"name": "fsdp", "sharding_strategy": "NO_SHARD"}, "which provides 'gradient-buckets'"),
    (Net, {"name": "parallel", "context": 2, "replicate": 1}, "strategy 'parallel' averages gradients of replicas"),
    (Net, {"name": "parallel", "pipeline": 2, "replicate": 1}, "needs 'custom-step', which strategy 'parallel' does not provide"),
    (Scalar, "fsdp", "strategy 'fsdp' averages 'gain' after backward, since it is not sharded"),
    (WithMuon, "fsdp", "Muon computes over whole matrices, which strategy 'fsdp' cuts"),
])  # fmt: skip
def test_gradients_that_are_averaged_later_are_refused_on_all_ranks(make, strategy, found):
    for text in run_in_processes(_refused, 2, make, strategy):
        assert found in text, text


def _refused(rank, world_size, make, strategy):
    try:
        fit(make(), devices=world_size, strategy=strategy)
    except ConfigError as error:
        return str(error)
    return ""


def test_replicas_in_one_process_and_engines_are_refused():
    (text,) = run_in_processes(_refused, 1, Net, "deepspeed")
    assert "callback 'optimizer_in_backward'" in text
    with pytest.raises(ConfigError, match="strategy 'dp' averages gradients of replicas"):
        fit(Net(), strategy="dp", devices=2)
