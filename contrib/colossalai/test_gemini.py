"""Gemini: its engine on emulated device memory against plain PyTorch, its options, and its tests on GPUs."""

import copy
import inspect

import pytest
import torch
from stratagem_colossalai import ColossalAIStrategy, engine

import stratagem
from stratagem.errors import ConfigError
from stratagem_testing import run_in_processes
from stratagem_testing.processes import ProcessesFailed
from stratagem_testing.reference import Net, joined_batches, loss_of, relative_difference
from stratagem_testing.training import QUIET, share, train, weights_of, weights_on_all_ranks

pytest_plugins = ["stratagem_testing.pytest_plugin"]
BATCHES = joined_batches(8, 24)
#: Shards the kit's model of 1665 parameters in chunks of 1056 or more elements; else a rank has it whole.
SHARDED = {"min_chunk_size_m": 0.001, "search_range_m": 0.0005, "hidden_dim": 32}
LAYOUTS = {"sharded": SHARDED, "whole": {}}


@pytest.fixture(scope="module", autouse=True)
def _imported_once():
    """Processes are forked from this one; the import takes seconds."""
    engine.load("cpu")


class AdamNet(Net):
    """Trains with an Adam that Gemini accepts."""

    def __init__(self, frozen=False):
        super().__init__(lr=0.01)
        self.net[0].requires_grad_(not frozen)

    def configure_optimizers(self):
        from host_gemini import HostAdam

        optimizer = HostAdam(self.parameters(), lr=self.lr, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class FrozenAdamNet(AdamNet):
    def __init__(self):
        super().__init__(frozen=True)


def host_gemini(**options):
    from host_gemini import HostGemini

    return HostGemini(enable_async_reduce=False, **options)


def trained_in_bf16(module, batches, accumulate=1, max_norm=None):
    """Train bf16 copies of fp32 masters in one process; return the masters and the norms of gradients."""
    masters, copy_ = module, copy.deepcopy(module).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=module.lr, weight_decay=0.1)
    norms = []
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        for x, y in window:
            (loss_of(copy_(x.bfloat16()), y.bfloat16()) / len(window)).backward()
        for master, rounded in zip(masters.parameters(), copy_.parameters(), strict=True):
            master.grad = None if rounded.grad is None else rounded.grad.float()
            rounded.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.parameters(), max_norm or float("inf"))))
        optimizer.step()
        with torch.no_grad():
            for master, rounded in zip(masters.parameters(), copy_.parameters(), strict=True):
                rounded.copy_(master)
    return {name: value.detach() for name, value in masters.state_dict().items()}, norms


def fit_with(rank, size, make, layout, arguments):
    return train(rank, size, make, BATCHES, {"strategy": host_gemini(**layout), "accelerator": "cpu", **arguments})


def trained(make=AdamNet, layout=SHARDED, size=2, **arguments):
    chosen = {"precision": "bf16-mixed", "devices": size, **arguments}
    return weights_on_all_ranks(run_in_processes(fit_with, size, make, layout, chosen))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_two_processes_train_as_one(layout, accumulate, clip):
    start = Net(lr=0.01).state_dict()
    reference, norms = trained_in_bf16(Net(lr=0.01), BATCHES, accumulate, clip)
    weights = trained(layout=LAYOUTS[layout], accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    moved = {name: value - start[name] for name, value in weights.items()}
    expected = {name: value - start[name] for name, value in reference.items()}

    assert relative_difference(moved, expected) < 0.05
    assert max(norms) > 1


def test_one_process_trains_with_frozen_parameters():
    reference, _ = trained_in_bf16(frozen(Net(lr=0.01)), BATCHES)
    weights = trained(FrozenAdamNet, size=1)

    assert relative_difference(weights, reference) < 0.01
    assert torch.equal(weights["net.0.weight"], Net().state_dict()["net.0.weight"])  # not rounded to bf16


def frozen(module):
    module.net[0].requires_grad_(False)
    return module


def in_parts(rank, size, parts, path):
    """Fit with one strategy after another, each from the checkpoint of the one before; return the last weights."""
    state = None
    for layout, steps in parts:
        strategy = "ddp" if layout is None else host_gemini(**LAYOUTS[layout])
        precision = "32-true" if layout is None else "bf16-mixed"
        limits = QUIET | {"max_epochs": -1, "max_steps": steps, "precision": precision}
        trainer = stratagem.Trainer(strategy=strategy, devices=size, accelerator="cpu", **limits)
        trainer.fit(AdamNet(), share(trainer, BATCHES), ckpt_path=path if state else None)
        trainer.save_checkpoint(path)
        weights = weights_of(trainer)
        state = torch.load(path, weights_only=True)
        trainer.run.close()
        assert all(torch.equal(state["state_dict"][name], weights[name]) for name in weights)
    return weights, state["optimizers"][0]["state"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_begin_with_the_weights_of_the_model(layout, tmp_path):
    weights, _ = run_in_processes(in_parts, 2, [(layout, 0)], str(tmp_path / "one.ckpt"))[0]

    assert all(torch.equal(weights[name], value) for name, value in Net().state_dict().items())  # not rounded to bf16


@pytest.mark.parametrize("last", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_a_fit_in_two_parts_equals_one_bit_for_bit(first, last, tmp_path):
    whole, _ = run_in_processes(in_parts, 2, [(first, 8)], str(tmp_path / "whole.ckpt"))[0]
    parts, _ = run_in_processes(in_parts, 2, [(first, 3), (last, 8)], str(tmp_path / "parts.ckpt"))[0]

    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["to ddp", "from ddp"])
def test_checkpoints_go_to_ddp_and_back_without_rounding(order, layout, tmp_path):
    names = [(layout, None)[index] for index in order]
    before = run_in_processes(in_parts, 2, [(names[0], 3)], str(tmp_path / "one.ckpt"))[0]
    after = run_in_processes(in_parts, 2, [(names[0], 3), (names[1], 3)], str(tmp_path / "two.ckpt"))[0]
    moved = run_in_processes(in_parts, 2, [(names[0], 3), (names[1], 8)], str(tmp_path / "three.ckpt"))[0]

    for name in before[0]:
        assert torch.equal(before[0][name], after[0][name])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(before[1][name][key], after[1][name][key])
    assert int(before[1]["net.0.weight"]["step"]) == 3
    assert int(moved[1]["net.0.weight"]["step"]) == 8


class Overflows(AdamNet):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx == 3 else 1.0)


def skipped_steps(rank, size, layout):
    strategy = host_gemini(initial_scale=64.0, hysteresis=1, **LAYOUTS[layout])
    trainer = stratagem.Trainer(strategy=strategy, devices=size, accelerator="cpu", precision="16-mixed", **QUIET)
    trainer.fit(Overflows(), share(trainer, BATCHES))
    return trainer.position.skipped_steps, trainer.run.strategy.state_dict()["scale"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_skips_one_step_and_lowers_the_scale(layout):
    assert run_in_processes(skipped_steps, 2, layout) == [(1, 32.0)] * 2


def trainer_of(layout, size):
    options = QUIET | {"devices": size, "accelerator": "cpu", "precision": "bf16-mixed"}
    return stratagem.Trainer(strategy=host_gemini(**LAYOUTS[layout]), **options)


def fit_and_test(rank, size, layout):
    first, second, module = trainer_of(layout, size), trainer_of(layout, size), AdamNet()
    mine = share(first, BATCHES)
    first.fit(module, mine, mine[:2])
    trained = weights_of(first)
    loss = first.test(module, mine)[0]["test_loss"]
    second.fit(module, mine)
    again = weights_of(second)
    second.run.close()
    first.run.close()
    return trained, again, loss, [type(each).__name__ for each in module.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_is_tested_and_fitted_again(layout):
    trained, again, loss, kinds = run_in_processes(fit_and_test, 2, layout)[0]
    plain = Net(lr=0.01)
    plain.load_state_dict(trained)
    x, y = (torch.cat(each) for each in zip(*BATCHES, strict=True))
    expected = float(loss_of(plain(x), y).detach())
    reference, _ = trained_in_bf16(plain, BATCHES)

    assert loss == pytest.approx(expected, rel=0.02)
    assert relative_difference(again, reference) < 0.01
    assert set(kinds) == {"Parameter"}


def fit_closed_and_again(rank, size):
    module = AdamNet()
    for _ in range(2):
        trainer = trainer_of("sharded", size)
        trainer.fit(module, share(trainer, BATCHES))
        trainer.run.close()


def test_a_model_that_was_sharded_by_a_run_that_has_ended_is_refused():
    with pytest.raises(ProcessesFailed, match=r"has no elements: Gemini sharded AdamNet in a run .* load a checkpoint"):
        run_in_processes(fit_closed_and_again, 2)


class Unused(AdamNet):
    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Linear(64, 64)


def test_a_parameter_without_gradient_is_named():
    with pytest.raises(ProcessesFailed, match=r"ConfigError: .*idle.* got no gradient, and Gemini waits for it"):
        trained(Unused)


def own_loop(rank, size, accumulates):
    strategy = host_gemini(enable_gradient_accumulation=accumulates, **SHARDED)
    with stratagem.Run(strategy=strategy, accelerator="cpu", devices=size, precision="bf16-mixed") as run:
        module = AdamNet()
        (optimizer,), _ = module.configure_optimizers()
        model, optimizer = run.setup(module, optimizer)
        norms = []
        for number, (x, y) in enumerate(BATCHES[:4]):
            if number == 2:  # gradients that are dropped before the step
                run.backward(loss_of(model(-x), y))
                optimizer.zero_grad()
            for _ in range(2 if accumulates else 1):
                run.backward(loss_of(model(x), y) / (2 if accumulates else 1))
            norms.append(float(run.clip_gradients(optimizer, max_norm=0.5)))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()
        return norms


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_loop_of_your_own_drops_gradients_and_gets_norms(accumulates):
    _, norms = trained_in_bf16(Net(lr=0.01), BATCHES[:4], max_norm=0.5)

    assert run_in_processes(own_loop, 2, accumulates)[0] == pytest.approx(norms, rel=0.05)


def two_backwards(rank, size):
    strategy = host_gemini(**SHARDED)
    with stratagem.Run(strategy=strategy, accelerator="cpu", devices=size, precision="bf16-mixed") as run:
        module = AdamNet()
        model, _ = run.setup(module, module.configure_optimizers()[0][0])
        for x, y in BATCHES[:2]:
            run.backward(loss_of(model(x), y))


def test_accumulation_that_was_not_asked_for_is_refused():
    with pytest.raises(ProcessesFailed, match=r"between backward and .*; expected .*enable_gradient_accumulation=True"):
        run_in_processes(two_backwards, 1)


def step_without_gradients(rank, size):
    with stratagem.Run(strategy=host_gemini(**SHARDED), accelerator="cpu", devices=size, precision="bf16-mixed") as run:
        module = AdamNet()
        model, optimizer = run.setup(module, module.configure_optimizers()[0][0])
        run.backward(loss_of(model(BATCHES[0][0]), BATCHES[0][1]))
        optimizer.zero_grad()
        run.optimizer_step(optimizer)


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ProcessesFailed, match="requested without a backward since the last one; expected a backward"):
        run_in_processes(step_without_gradients, 1)


class ClipsInStep(AdamNet):
    def on_before_optimizer_step(self, optimizer):
        self.trainer.run.clip_gradients(optimizer, max_norm=0.5)


def test_clipping_that_was_not_asked_for_is_refused():
    with pytest.raises(ProcessesFailed, match=r"clipped and gradient_clip_val is not set: .*; expected gradient_clip"):
        trained(ClipsInStep, size=1)


# --- Options and refusals ----------------------------------------------------------------------------------------


def test_gemini_is_refused_on_a_cpu_before_anything_starts():
    with pytest.raises(ConfigError) as caught:
        stratagem.Trainer(strategy={"name": "colossalai", "plugin": "gemini"}, accelerator="cpu", devices=2)

    assert str(caught.value) == (
        "strategy 'colossalai' needs 'device:cuda', which accelerator 'cpu' does not provide; choose strategy=\"fsdp\" "
        'or "deepspeed_stage_3", which shard as Gemini does, or set strategy.colossalai.plugin to "low_level_zero".'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_chunk": False}, "use_chunk is False; expected true: Gemini of Colossal-AI 0.5 always uses chunks; drop"),
        ({"enable_distributed_storage": False}, "enable_distributed_storage is False; .*set shard_param_frac to 0"),
        ({"chunk_search_n_grids": 4096}, "chunk_search_n_grids is 4096, which Colossal-AI 0.5 does not have; expected"),
        ({"chunk_search_range": 1, "search_range_m": 1.0}, "chunk_search_range and .*search_range_m are both set"),
        ({"placement_policy": "auto", "shard_param_frac": 0.5}, "shard_param_frac is 0.5, and .* is 'auto', under"),
        ({"gpu_margin_mem_ratio": 0.5}, "gpu_margin_mem_ratio is 0.5, and .*placement_policy is 'static', under which"),
        ({"placement_policy": "cpu", "offload_optim_frac": 0.5}, "offload_optim_frac is 0.5, and .* is 'cpu', under"),
        ({"offload_param_frac": 1.0}, "offload_param_frac is 1.0, and not all optimizer state is offloaded"),
        ({"stage": 2}, r"stage is 2, and strategy.colossalai.plugin is 'gemini'; .* set plugin='low_level_zero'"),
    ],
)
def test_an_option_without_effect_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ColossalAIStrategy(plugin="gemini", **options)


def test_options_of_lightning_become_arguments_of_today():
    made = ColossalAIStrategy(
        plugin="gemini", use_chunk=True, enable_distributed_storage=True, placement_policy="cpu",
        chunk_search_range=64 * 2**20, min_chunk_size=32 * 2**20, force_outputs_fp32=True, initial_scale=2.0**10,
    ).gemini_arguments(4)  # fmt: skip

    assert made == {
        "placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0, "search_range_m": 64,
        "min_chunk_size_m": 32, "force_outputs_fp32": True, "initial_scale": 1024.0,
    }  # fmt: skip


def test_a_chunk_size_of_lightning_is_given_to_the_engine():
    strategy = ColossalAIStrategy(plugin="gemini", chunk_size=1024)

    assert strategy.gemini_arguments(4)["chunk_config_dict"] == {4: {"chunk_size": 1024, "keep_gathered": False}}
    with pytest.raises(ConfigError, match="chunk_size is 1024; expected a positive multiple of the number of ranks, 3"):
        strategy.gemini_arguments(3)


def test_every_option_is_an_argument_of_the_engine():
    from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
    from stratagem_colossalai.options import _GEMINI, _ZERO

    assert set(_GEMINI) <= set(inspect.signature(GeminiPlugin).parameters)
    assert set(_ZERO) <= set(inspect.signature(LowLevelZeroPlugin).parameters)


def test_an_option_of_gemini_without_the_plugin_is_answered_with_it():
    with pytest.raises(ConfigError, match=r"placement_policy is 'auto', and .*plugin is 'ddp'; .* set plugin='gemini'"):
        ColossalAIStrategy(placement_policy="auto")


# --- On GPUs -----------------------------------------------------------------------------------------------------


class CudaNet(Net):
    def __init__(self):
        super().__init__(lr=0.01)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)


def fit_on_gpus(rank, size, options, arguments):
    chosen = {"strategy": {"name": "colossalai", "plugin": "gemini", **options}, "accelerator": "cuda", **arguments}
    return train(rank, size, CudaNet, BATCHES, {"precision": "bf16-mixed", **chosen})


def compare_on_gpus(size, options, accumulate=1, clip=None):
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    weights = weights_on_all_ranks(run_in_processes(fit_on_gpus, size, options, arguments))
    reference, _ = trained_in_bf16(Net(lr=0.01), BATCHES, accumulate, clip)

    assert relative_difference(weights, reference) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("options", [{}, {"placement_policy": "auto"}, {"placement_policy": "cpu"}], ids=str)
def test_one_gpu_trains_as_plain_pytorch(options, clip, accumulate):
    compare_on_gpus(1, SHARDED | options, accumulate, clip)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_train_as_plain_pytorch(layout, clip, accumulate):
    compare_on_gpus(2, LAYOUTS[layout], accumulate, clip)
