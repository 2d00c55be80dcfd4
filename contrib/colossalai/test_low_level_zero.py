"""LowLevelZero trains as plain PyTorch on a CPU, and moves checkpoints from and to `ddp`."""

from pathlib import Path

import pytest
import torch
from stratagem_colossalai import ColossalAIStrategy, engine
from test_gemini import trained_in_bf16

import stratagem
from stratagem.errors import ConfigError
from stratagem_testing import StrategyConformance, run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference, train_module_plainly
from stratagem_testing.training import QUIET, share, train, weights_of, weights_on_all_ranks

pytest_plugins = ["stratagem_testing.pytest_plugin"]
BATCHES = joined_batches(8, 24)
ZERO = {"name": "colossalai", "plugin": "low_level_zero"}
OPTIONS = {
    "stage 1": {},
    "stage 2": {"stage": 2},
    "small buckets": {"stage": 2, "reduce_bucket_size_in_m": 0, "overlap_allgather": True},
    "offloaded": {"cpu_offload": True, "master_weights": True},
}


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    """Processes are forked from this one; the import takes seconds."""
    engine.load("cpu")


class TestLowLevelZero(StrategyConformance):
    plugin = ZERO
    unplannable = "whose engines read values"


class TestStage2(StrategyConformance):
    plugin = ZERO | {"stage": 2}
    unplannable = "whose engines read values"
    world_sizes = (2,)


def trained(make=Net, size=2, options=None, **arguments):
    chosen = {"strategy": ZERO | (options or {}), "accelerator": "cpu"} | arguments
    return weights_on_all_ranks(run_in_processes(train, size, make, BATCHES, chosen))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_processes_train_as_one(options, accumulate, clip):
    reference, norms = train_module_plainly(Net(), BATCHES, accumulate=accumulate, max_norm=clip)
    weights = trained(
        size=3 if accumulate == 3 else 2, options=OPTIONS[options], accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )  # fmt: skip

    assert relative_difference(weights, reference) < 1e-6
    assert max(norms) > 1


class AdamNet(Net):
    def __init__(self, frozen=False):
        super().__init__(lr=0.01)
        self.net[0].requires_grad_(not frozen)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


class FrozenAdamNet(AdamNet):
    def __init__(self):
        super().__init__(frozen=True)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_bf16_trains_fp32_masters(stage, accumulate, clip):
    start = Net(lr=0.01).state_dict()
    reference, norms = trained_in_bf16(Net(lr=0.01), BATCHES, accumulate, clip)
    weights = trained(
        AdamNet, options={"stage": stage}, precision="bf16-mixed", accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )  # fmt: skip
    moved = {name: value - start[name] for name, value in weights.items()}
    expected = {name: value - start[name] for name, value in reference.items()}

    assert relative_difference(moved, expected) < 0.05
    assert max(norms) > 1


def test_frozen_parameters_are_not_rounded():
    weights = trained(FrozenAdamNet, precision="bf16-mixed")

    assert torch.equal(weights["net.0.weight"], Net().state_dict()["net.0.weight"])
    assert weights["net.2.weight"].dtype is torch.float32


class Overflows(AdamNet):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)


def skipped_steps(rank, size, stage, path):
    strategy = ZERO | {"stage": stage, "initial_scale": 64.0, "hysteresis": 1}
    found = []
    for make, resume in ((Overflows, None), (AdamNet, path)):
        limits = QUIET | {"max_epochs": 1 if resume is None else 2, "precision": "16-mixed"}
        trainer = stratagem.Trainer(strategy=strategy, devices=size, accelerator="cpu", **limits)
        trainer.fit(make(), share(trainer, BATCHES), ckpt_path=resume)
        found.append((trainer.position.skipped_steps, trainer.run.strategy.state_dict()["scale"]))
        trainer.save_checkpoint(path)
        trainer.run.close()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_an_overflow_skips_one_step_and_the_scale_is_resumed(stage, tmp_path):
    results = run_in_processes(skipped_steps, 2, stage, str(tmp_path / "one.ckpt"))

    assert results == [[(1, 32.0), (1, 32.0)]] * 2


def in_parts(rank, size, parts, path):
    """Fit with one strategy after another, each from the checkpoint of the one before, if any; return the weights."""
    for strategy, steps, precision in parts:
        limits = QUIET | {"max_epochs": -1, "max_steps": steps, "precision": precision}
        trainer = stratagem.Trainer(strategy=strategy, devices=size, accelerator="cpu", **limits)
        trainer.fit(AdamNet(), share(trainer, BATCHES), ckpt_path=path if Path(path).exists() else None)
        trainer.save_checkpoint(path)
        weights = weights_of(trainer)
        trainer.run.close()
    return weights


def plainly(batches):
    model = Net(lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("to_ddp", [True, False], ids=["to ddp", "from ddp"])
def test_checkpoints_go_to_ddp_and_back(stage, to_ddp, tmp_path):
    names = [ZERO | {"stage": stage}, "ddp"]
    first, last = names if to_ddp else reversed(names)
    parts = [(first, 4, "32-true"), (last, 8, "32-true")]
    weights = run_in_processes(in_parts, 2, parts, str(tmp_path / "one.ckpt"))[0]

    assert relative_difference(weights, plainly(BATCHES)) < 1e-5


def test_masters_begin_with_the_weights_of_the_model(tmp_path):
    weights = run_in_processes(in_parts, 2, [(ZERO, 0, "bf16-mixed")], str(tmp_path / "one.ckpt"))[0]

    assert all(torch.equal(weights[name], value) for name, value in Net().state_dict().items())  # not rounded to bf16


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1)])
def test_masters_and_state_go_to_another_number_of_ranks_without_rounding(sizes, tmp_path):
    path, parts = str(tmp_path / "one.ckpt"), [(ZERO, 4, "bf16-mixed")]
    before = run_in_processes(in_parts, sizes[0], parts, path)[0]
    saved = torch.load(path, weights_only=True)["optimizers"]
    after = run_in_processes(in_parts, sizes[1], parts, path)[0]  # resumes after its last step
    again = torch.load(path, weights_only=True)["optimizers"]

    assert all(torch.equal(before[name], after[name]) for name in before)
    for name, entry in saved[0]["state"].items():
        assert all(torch.equal(value, again[0]["state"][name][key]) for key, value in entry.items())


def test_a_bf16_fit_in_two_parts_equals_one_bit_for_bit(tmp_path):
    whole = run_in_processes(in_parts, 2, [(ZERO, 8, "bf16-mixed")], str(tmp_path / "whole.ckpt"))[0]
    both = [(ZERO, 4, "bf16-mixed"), (ZERO, 8, "bf16-mixed")]
    parts = run_in_processes(in_parts, 2, both, str(tmp_path / "parts.ckpt"))[0]

    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def fit_test_and_fit(rank, size):
    options = QUIET | {"devices": size, "accelerator": "cpu", "precision": "bf16-mixed"}
    first, second, module = stratagem.Trainer(strategy=ZERO, **options), None, AdamNet()
    mine = share(first, BATCHES)
    first.fit(module, mine, mine[:2])
    trained = weights_of(first)
    first.test(module, mine)
    second = stratagem.Trainer(strategy=ZERO, **options)
    second.fit(module, mine)
    again = weights_of(second)
    second.run.close()
    first.run.close()
    return trained, again, {str(each.dtype) for each in module.parameters()}


def test_a_model_is_tested_and_fitted_again_from_its_masters():
    trained, again, dtypes = run_in_processes(fit_test_and_fit, 2)[0]
    plain = Net(lr=0.01)
    plain.load_state_dict(trained)
    reference, _ = trained_in_bf16(plain, BATCHES)

    assert relative_difference(again, reference) < 0.005
    assert dtypes == {"torch.float32"}


class Factored(Net):
    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class Sparse(Net):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 2, sparse=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Factored, "returned Adafactor, which computes with whole layers, and Colossal-AI gives it flat shards"),
        (Sparse, "table has sparse gradients, and Colossal-AI flattens gradients"),
    ],
)
def test_what_cannot_be_sharded_is_refused(make, message):
    with pytest.raises(ProcessesFailed, match=message):
        trained(make)


def compared_after_rank_1_lost_a_gradient(rank, size):
    with stratagem.Run(strategy=ZERO, accelerator="cpu", devices=size) as run:
        module = Net()
        model, _ = run.setup(module, module.configure_optimizers())
        x, y = BATCHES[0]
        run.backward(loss_of(model(x), y))
        zero = run.stack.strategy._engine
        zero._compare(run)
        if rank == 1:
            (store,) = zero.optimizer.pg_to_grad_store.values()
            del store._grads_of_params[0][id(module.net[0].weight)]
        zero._compare(run)


def test_ranks_that_use_different_parameters_with_overlap_are_told():
    with pytest.raises(ProcessesFailed, match=r"'net.0.weight' got a gradient on 1 of 2 ranks, and .*overlap_comm"):
        run_in_processes(compared_after_rank_1_lost_a_gradient, 2)


def test_overlap_is_refused_on_a_cpu():
    with pytest.raises(ProcessesFailed, match="overlap_communication is true, and the device is a CPU; expected false"):
        trained(options={"overlap_communication": True})


def test_what_another_plugin_provides_is_answered_with_it():
    with pytest.raises(ConfigError, match=r"by value needs 'clip-by-value', .*; set strategy.colossalai.plugin to \"d"):
        stratagem.Trainer(strategy=ZERO, accelerator="cpu", gradient_clip_val=1, gradient_clip_algorithm="value")


def test_arguments_of_the_engine():
    strategy = ColossalAIStrategy(plugin="low_level_zero", stage=2, communication_dtype="bfloat16", cpu_offload=True)

    assert strategy.zero_arguments() == {
        "initial_scale": 2.0**16, "overlap_communication": False, "stage": 2, "cpu_offload": True,
        "communication_dtype": torch.bfloat16,
    }  # fmt: skip


# --- On GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("options", [{}, {"stage": 2}, {"overlap_communication": True}, {"cpu_offload": True}], ids=str)
def test_two_gpus_train_as_plain_pytorch(options, clip, accumulate, precision):
    weights = trained(
        AdamNet, options=options, accelerator="cuda", precision=precision, accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )  # fmt: skip
    reference, _ = trained_in_bf16(Net(lr=0.01), BATCHES, accumulate, clip)

    assert relative_difference(weights, reference) < 0.02
