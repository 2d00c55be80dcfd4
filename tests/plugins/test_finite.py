"""finite names the rank and the batch of a loss or a gradient that is not finite, and all ranks end with that."""

import math
import sys

import pytest
import torch
from torch import nn

import stratagem as sg
from programs import scripts
from stratagem.callbacks import Finite, LearningRateFinder
from stratagem.errors import ConfigError, PluginError
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, part, relative_difference, train_plainly
from stratagem_testing.training import outcome, weights_of

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
BATCHES = joined_batches(6, 8)
GRADIENTS = {"name": "finite", "gradients": True}


class Bad(Net):
    """The loss, or a gradient alone, of the last rank is not finite in batch 3."""

    def __init__(self, value=math.nan, batches=(3,)):
        super().__init__()
        self.value, self.batches = value, batches

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in self.batches or self.trainer.global_rank + 1 < self.trainer.world_size:
            return loss
        if self.value == "gradient":
            return loss + 0 * (0 * next(self.parameters())).sqrt().sum()
        return loss + self.value


def fit(model, batches=BATCHES, **options):
    trainer = sg.Trainer(**(QUIET | {"max_epochs": 1} | options))
    trainer.fit(model, batches)
    return trainer


# --- One process -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_loss_that_is_not_finite_is_an_error_before_the_step(value):
    model = Bad(value)

    with pytest.raises(sg.StratagemError) as raised:
        fit(model)

    said = (
        f"the loss of rank 0 is {value} in batch 3 of epoch 0, after 3 steps, for the first time in this fit; expected"
    )
    assert str(raised.value).startswith(said)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_weights_that_a_gradient_has_made_so_are_named():
    with pytest.raises(
        sg.StratagemError, match=r"in batch 4 .*; the parameter '\w.*' is not finite either; .*gradients"
    ):
        fit(Bad("gradient"))


def test_gradients_are_named_where_they_appear():
    first = next(name for name, _ in Net().named_parameters())
    with pytest.raises(sg.StratagemError, match=rf"the gradient of '{first}' is not finite on rank 0 in batch 3 of"):
        fit(Bad("gradient"), checks=GRADIENTS)


class Sparse(Bad):
    def __init__(self):
        super().__init__("gradient")
        self.table = nn.Embedding(4, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        rows = self.table(torch.tensor([1, 1]))
        return Net.training_step(self, batch, batch_idx) + 0 * (rows * (batch_idx != 3)).square().sum().sqrt()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_sparse_gradients_are_read_too():
    with pytest.raises(sg.StratagemError, match=r"the gradient of 'table.weight' is not finite on rank 0 in batch 3"):
        fit(Sparse(), checks=GRADIENTS)


@pytest.mark.filterwarnings("error")
def test_none_trains_on():
    assert fit(Bad(), checks=None).global_step == 6
    bare = sg.Trainer(max_epochs=1, accelerator="cpu", barebones=True)
    bare.fit(Bad(), BATCHES)
    assert bare.global_step == 6


def test_a_warning_comes_once():
    with pytest.warns(UserWarning, match="the loss of rank 0 is nan") as found:
        trainer = fit(Bad(batches=(3, 4, 5)), checks={"name": "finite", "action": "warn"})

    assert trainer.global_step == 6
    assert len([each for each in found if "the loss of rank" in str(each.message)]) == 1


def test_a_loss_scale_may_skip_some_steps_and_not_all():
    assert fit(Bad(), precision="16-mixed").global_step == 6
    with pytest.raises(sg.StratagemError, match=r"nan in batch 21 of epoch 0, after 21 steps, as in 19 batches before"):
        fit(Bad(batches=range(2, 99)), joined_batches(40, 8), precision="16-mixed")


class Root(Net):
    def training_step(self, batch, batch_idx):
        return (super().training_step(batch, batch_idx) - 100).sqrt()


def test_anomalies_are_found_first_and_other_losses_after_their_backward():
    with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"):
        fit(Root(), detect_anomaly=True)
    with pytest.raises(sg.StratagemError, match="the loss of rank 0 is inf in batch 3 of epoch 0, after 3 steps"):
        fit(Bad(math.inf), detect_anomaly=True)
    with pytest.raises(sg.StratagemError, match="the loss of rank 0 is inf in batch 5 of epoch 0"):
        fit(Bad(math.inf, (5,)), detect_anomaly=True)  # no batch follows


def test_a_trial_may_diverge():
    found = LearningRateFinder(num_training_steps=20, min_lr=1e-3, max_lr=1e30, early_stop_threshold=None)
    assert fit(Net(), callbacks=found).global_step == 6


class ByHand(Bad):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def test_losses_of_manual_optimization_are_checked():
    with pytest.raises(sg.StratagemError, match="the loss of rank 0 is nan in batch 3"):
        fit(ByHand())


def test_a_listed_callback_takes_the_place_of_the_check():
    def names(**options):
        trainer = sg.Trainer(**QUIET, **options)
        return [
            (choice.name, choice.plugin.action) for choice in trainer.run.stack.choices() if choice.name == "finite"
        ]

    assert names() == [("finite", "error")]
    assert names(checks="finite", callbacks=Finite(action="warn")) == [("finite", "warn")]
    assert names(callbacks={"name": "finite", "action": "warn"}) == [("finite", "warn")]
    assert names(checks=()) == []
    assert sg.Trainer.from_cli(["--checks", "null", "--accelerator", "cpu"]).settings.checks is None


def test_arguments_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"barebones is True \(code\), and checks is 'finite' \(code\)"):
        sg.Trainer(barebones=True, checks="finite")
    with pytest.raises(PluginError, match="callback 'finit' is unknown.*did you mean 'finite'"):
        sg.Trainer(checks="finit")
    with pytest.raises(ConfigError, match="finite.gradients is True and a loss scale lets them overflow"):
        fit(Net(), checks=GRADIENTS, precision="16-mixed")


# --- Skipped steps -----------------------------------------------------------------------------------------------

SKIP = {"name": "finite", "action": "skip"}


def _fit_with_optimizer(kind, bad, **options):
    torch.manual_seed(1)
    model = kind("gradient", bad)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = fit(model, [batch for number, batch in enumerate(BATCHES) if bad or number != 3], checks=SKIP, **options)
    return weights_of(trainer), trainer.position.skipped_steps


class Closes(Bad):
    """Steps by hand, with a closure that computes the gradients."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = Bad.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class SparseRows(Bad):
    """Has an embedding with sparse gradients, one row of which is not finite in the bad batch."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.table = nn.Embedding(4, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        rows = self.table(torch.tensor([0, 1, 1]))
        loss = Net.training_step(self, batch, batch_idx) + rows.square().sum()
        return loss + 0 * (0 * rows[0]).sqrt().sum() if batch_idx in self.batches else loss


@pytest.mark.filterwarnings("ignore:the loss of rank")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Closes, {}), (SparseRows, {}), (Bad, {"gradient_clip_val": 0.01}),
        (Bad, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ],
)  # fmt: skip
def test_a_skipped_step_changes_nothing(kind, options):
    fitted, without = (_fit_with_optimizer(kind, bad, **options) for bad in ((3,), ()))

    assert (fitted[1], without[1]) == (1, 0)
    assert relative_difference(fitted[0], without[0]) == 0


def test_steps_of_an_optimizer_that_evaluates_the_model_itself_cannot_be_skipped():
    model = Net()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())

    with pytest.raises(ConfigError, match="finite.action is 'skip' and LBFGS moves the weights before it has all grad"):
        fit(model, checks=SKIP)


# --- Several ranks -----------------------------------------------------------------------------------------------


def _fit_part(rank, world_size, strategy, value, checks):
    batches = part(BATCHES, rank, world_size)
    return outcome(lambda: fit(Bad(value), batches, strategy=strategy, devices=world_size, checks=checks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("ddp", 3), ("fsdp", 2), ("parallel", 2), ("ddp_sharded", 2), ("deepspeed_stage_2", 2),
        pytest.param("local_sgd", 2, marks=pytest.mark.sweep),
        *(pytest.param(each, 3, marks=pytest.mark.sweep) for each in ("fsdp", "parallel", "ddp_sharded")),
    ],
)  # fmt: skip
def test_all_ranks_end_with_the_rank_whose_loss_is_not_finite(strategy, world_size):
    *others, last = run_in_processes(_fit_part, world_size, strategy, math.nan, "finite")

    sentence = f"the loss of rank {world_size - 1} is nan in batch 3 of epoch 0, after 3 steps"
    assert last.startswith(f"refused: {sentence}")
    assert all(f"rank {world_size - 1} failed with StratagemError: {sentence}" in other for other in others)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_sharded", "parallel"])
def test_the_gradient_of_one_rank_is_found_before_it_is_averaged(strategy):
    first, second = run_in_processes(_fit_part, 2, strategy, "gradient", GRADIENTS)

    assert "is not finite on rank 1 in batch 3 of epoch 0" in second
    assert "rank 1 failed with StratagemError: the gradient of " in first


def _fit_and_skip(rank, world_size, strategy):
    batches, model = part(BATCHES, rank, world_size), Bad("gradient")
    checks = {"name": "finite", "action": "skip"}
    trainer = fit(model, batches, strategy=strategy, devices=world_size, checks=checks)
    return weights_of(trainer), trainer.global_step, trainer.position.skipped_steps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss of rank")
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [
        ("ddp", 2), ("fsdp", 2), pytest.param("auto", 1, marks=pytest.mark.sweep),
        pytest.param("parallel", 2, marks=pytest.mark.sweep),
    ],
)  # fmt: skip
def test_a_step_is_skipped_on_all_ranks(strategy, world_size):
    reference, norms = train_plainly([batch for number, batch in enumerate(BATCHES) if number != 3])

    for weights, steps, skipped in run_in_processes(_fit_and_skip, world_size, strategy):
        assert (steps, skipped) == (6, 1)
        assert relative_difference(weights, reference) < 1e-6
    assert max(norms) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": "16-mixed"}, "a loss scale skips such steps"),
        ({"strategy": "deepspeed_stage_2"}, "keeps the gradients to itself"),
    ],
)
def test_steps_that_others_skip_or_cannot_be_skipped_are_refused(options, why):
    with pytest.raises(ConfigError, match=f"finite.action is 'skip' and .*{why}; expected 'error' or 'warn'"):
        fit(Net(), checks={"name": "finite", "action": "skip"}, **options)


def test_sharded_gradients_are_refused():
    for said in run_in_processes(_fit_part, 2, "fsdp", "gradient", GRADIENTS):
        assert "finite.gradients is True and strategy 'fsdp' shards parameters" in said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "subprocess"])
def test_a_launched_run_ends_with_the_same_sentence(tmp_path, launcher):
    script = tmp_path / "train.py"
    script.write_text(
        "import math\nimport stratagem as sg\nfrom stratagem_testing.reference import Net, joined_batches\n"
        "class Bad(Net):\n    def training_step(self, batch, batch_idx):\n"
        "        loss = super().training_step(batch, batch_idx)\n"
        "        return loss + math.nan if self.global_rank == 1 and batch_idx == 3 else loss\n"
        "if __name__ == '__main__':\n"
        f"    sg.Trainer(max_epochs=1, strategy='ddp', devices=3, accelerator='cpu', launcher='{launcher}',\n"
        "        use_distributed_sampler=False, default_root_dir='.').fit(Bad(), joined_batches(6, 8))\n"
    )
    done = scripts.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1]
        .partition("; ")[0]
        .endswith("the loss of rank 1 is nan in batch 3 of epoch 0, after 3 steps, for the first time in this fit")
    )
    assert "training ended at step 3 in epoch 1" in done.stdout
