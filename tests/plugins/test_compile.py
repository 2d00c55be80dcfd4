"""`compile=` changes how a model computes, and nothing else, under every strategy."""

from __future__ import annotations

import functools
import pickle
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import stratagem as sg
from stratagem.errors import ConfigError
from stratagem.strategies import SingleDeviceStrategy
from stratagem_testing import run_in_processes
from stratagem_testing.reference import Net, joined_batches, relative_difference, train_module_plainly
from stratagem_testing.training import share, train, weights_of
from stratagem_transforms import compilation
from stratagem_transforms.compilation import MODES, Compile, chosen
from stratagem_transforms.wrap_policy import repeated

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: The rounding of torch's own kernels, which inductor's differ from.
TOLERANCE = 1e-6
#: inductor adds in another order, and joins multiplications with additions.
INDUCTOR_TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.out(torch.tanh(self.linear(x)))


class Interrupted(Block):
    def forward(self, x):
        shape = x.shape[:-1]
        hidden = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        mean = hidden.mean(-1, keepdim=True)
        return x + self.out(hidden - mean + mean).reshape(*shape, -1)


class Deep(Net):
    block = Block

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.net = nn.Sequential(nn.Linear(16, 32), self.block(), self.block(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def parallel_plan(self):
        return {"net.*.linear": "colwise", "net.*.out": "rowwise"}


class InterruptedBlocks(Deep):
    block = Interrupted


class ByHand(Deep):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.criterion(self(batch[0]), batch[1]))
        optimizer.step()


def counting(graphs):
    def backend(graph, example):
        graphs.append(graph)
        return aot_eager(graph, example)

    return backend


def _train(rank, world_size, make, batches, arguments):
    graphs = []
    wanted = {"backend": counting(graphs)} | arguments["compile"]
    weights = train(rank, world_size, make, batches, arguments | {"compile": wanted})["weights"]
    return weights, len(graphs)


def compiled(wanted=None, world_size=2, accumulate=1, max_norm=None, make=Deep, **arguments):
    """Train with ``compile=wanted`` and plainly; return the difference of the weights, and the graphs of each rank."""
    batches = joined_batches(6, 16)
    plain, _ = train_module_plainly(Deep(), batches, accumulate, max_norm)
    arguments |= {"compile": wanted or {}, "accumulate_grad_batches": accumulate, "gradient_clip_val": max_norm}
    results = run_in_processes(_train, world_size, make, batches, arguments)
    return max(relative_difference(weights, plain) for weights, _ in results), [graphs for _, graphs in results]


FSDP = {"name": "fsdp", "auto_wrap_policy": {Block}}


# --- It trains the same ------------------------------------------------------------------------------------------


@pytest.mark.every_push("steps in fsdp-3-0.5")
@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "max_norm"), [(1, None), (3, 0.5)])
@pytest.mark.parametrize(
    ("strategy", "wanted"),
    [("ddp", {}), ("ddp", {"per_block": True}), (FSDP, {}), ("fsdp", {})],
    ids=["steps in ddp", "blocks in ddp", "units of fsdp", "steps in fsdp"],
)
def test_training_is_the_same(strategy, wanted, accumulate, max_norm):
    difference, graphs = compiled(wanted, 2, accumulate, max_norm, strategy=strategy)

    assert difference < TOLERANCE
    assert min(graphs) > 0


@pytest.mark.every_push("pipeline")
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp_sharded", [{"name": "local_sgd", "period": 1, "team_size": 1}, "ddp"], {"name": "parallel", "pipeline": 2},
        {"name": "parallel", "shard": 2, "auto_wrap_policy": {Block}}, {"name": "parallel", "replicate": 2},
    ],
    ids=["ddp_sharded", "local_sgd", "pipeline", "shard", "replicate"],
)  # fmt: skip
def test_blocks_compile_under_other_strategies(strategy):
    has_units = isinstance(strategy, dict) and "replicate" not in strategy
    wanted = {} if has_units else {"modules": {Block}}
    difference, graphs = compiled(wanted, strategy=strategy, make=InterruptedBlocks)

    assert difference < TOLERANCE
    assert min(graphs) > 1


@pytest.mark.when_changed("plugins/deepspeed/", guard="tests/plugins/test_compile.py::test_training_is_the_same")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_steps_compile_under_deepspeed(deepspeed_preloaded, stage):
    difference, graphs = compiled({"modules": {Block}}, strategy=f"deepspeed_stage_{stage}")

    assert difference < TOLERANCE
    assert min(graphs) > 0


@pytest.mark.when_changed("plugins/callbacks/", guard="tests/plugins/test_compile.py::test_training_is_the_same")
@pytest.mark.every_push("offload-ddp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_with_activation_checkpointing(strategy, mode):
    checkpointing = {"policy": {Block}, "mode": mode}
    difference, graphs = compiled({"modules": {Block}}, strategy=strategy, activation_checkpointing=checkpointing)

    assert difference < TOLERANCE
    assert min(graphs) > 0


@pytest.mark.when_changed("plugins/callbacks/", guard="tests/plugins/test_compile.py::test_training_is_the_same")
@pytest.mark.every_push("fsdp")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", FSDP], ids=["ddp", "fsdp"])
def test_with_manual_optimization(strategy):
    difference, graphs = compiled({"modules": {Block}}, make=ByHand, strategy=strategy)

    assert difference < TOLERANCE
    assert min(graphs) > 0


@pytest.mark.sweep(guard="tests/plugins/test_compile.py::test_training_is_the_same")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "wanted"), [("ddp", {}), (FSDP, {"mode": "default"})], ids=["steps in ddp", "units of fsdp"]
)
def test_inductor_trains_the_same_within_its_rounding(strategy, wanted):
    difference, _ = compiled({"backend": "inductor"} | wanted, 2, 3, 0.5, strategy=strategy)

    assert difference < INDUCTOR_TOLERANCE


@pytest.mark.when_changed("plugins/callbacks/", guard="tests/plugins/test_compile.py::test_training_is_the_same")
@pytest.mark.every_push("bf16-true")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_every_precision(precision):
    batches, results = joined_batches(4, 16), []
    if precision.startswith("64"):
        batches = [(x.double(), y) for x, y in batches]
    for wanted in (False, {"backend": "aot_eager", "modules": {Block}}):
        model = Deep()
        sg.Trainer(max_epochs=1, precision=precision, compile=wanted, **QUIET).fit(model, batches)
        results.append(model.state_dict())

    assert relative_difference(*results) < 1e-2 if "16" in precision else 1e-12


# --- What is compiled --------------------------------------------------------------------------------------------


def fit(wanted, model=None, num_batches=2, **arguments):
    graphs, model = [], model or Deep()
    wanted = {"backend": counting(graphs)} | wanted
    trainer = sg.Trainer(max_epochs=1, compile=wanted, **(QUIET | arguments))
    trainer.fit(model, joined_batches(num_batches, 16))
    return trainer, model, graphs


@pytest.mark.slow
def test_names_in_checkpoints_and_classes_stay(tmp_path):
    trainer, model, graphs = fit({"per_block": True})
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)

    assert graphs
    assert list(saved["state_dict"]) == list(Deep().state_dict())
    assert type(model.net[1]) is Block
    other = Deep()
    sg.Trainer(max_epochs=2, **QUIET).fit(other, joined_batches(2, 16), ckpt_path=tmp_path / "a.ckpt")
    pickle.loads(pickle.dumps(model))


@pytest.mark.slow
def test_a_second_fit_does_not_compile_again():
    trainer, model, graphs = fit({"per_block": True})
    first = len(graphs)
    trainer.max_epochs = 2
    trainer.fit(model, joined_batches(2, 16))

    assert first == len(graphs) > 0


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({Block}, ["net.1", "net.2"]), ("Block", ["net.1", "net.2"]), (["net.[12]"], ["net.1", "net.2"]),
        ("net.*", ["net.0", "net.1", "net.2", "net.3"]), ("net.*.linear", ["net.1.linear", "net.2.linear"]),
        ({Block, "net.1.linear"}, ["net.1", "net.2"]), (["net.0", Block], ["net.0", "net.1", "net.2"]),
        (lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block), ["net.1", "net.2"]),
    ],
)  # fmt: skip
def test_every_way_to_say_which_parts(wanted, names):
    model = Deep()
    found = {id(part): name for name, part in model.named_modules()}

    assert [found[id(part)] for part in chosen(model, wanted)] == names


def test_blocks_are_the_layers_of_one_class():
    model = Deep()

    assert repeated(model) == [model.net[1], model.net[2]]


def test_disable_compiles_nothing():
    assert fit({"disable": True})[2] == []


@pytest.mark.slow
def test_validation_alone_is_compiled_too():
    graphs, model = [], Deep()
    trainer = sg.Trainer(compile={"backend": counting(graphs), "modules": {Block}}, **QUIET)
    trainer.validate(model, joined_batches(2, 16))

    assert graphs


class Logging(Deep):
    def training_step(self, batch, batch_idx):
        loss = self.criterion(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("v", self.criterion(self.net(batch[0]), batch[1]))


class Counting(Deep):
    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1]) * (1 + self.global_step / 100 + self.current_epoch)


@pytest.mark.every_push("Logging")
@pytest.mark.slow
@pytest.mark.parametrize("make", [Logging, Counting, ByHand])
def test_what_the_trainer_counts_does_not_compile_steps_again(make):
    torch._dynamo.reset()
    graphs, batches, model = [], joined_batches(12, 16), make()
    trainer = sg.Trainer(max_epochs=2, compile={"backend": counting(graphs)}, num_sanity_val_steps=0, **QUIET)
    trainer.fit(model, batches, batches if make is Logging else None)
    plain = make()
    sg.Trainer(max_epochs=2, num_sanity_val_steps=0, **QUIET).fit(plain, batches, batches if make is Logging else None)

    assert 0 < len(graphs) <= 2  # a step each of training and validation; a new one for each batch before
    assert relative_difference(model.state_dict(), plain.state_dict()) < TOLERANCE


@pytest.mark.every_push("one module")
@pytest.mark.parametrize(
    ("wanted", "left"),
    [({"disable": True}, []), ({"modules": "net.1"}, ["net.1"]), ({}, [])],
    ids=["nothing", "one module", "the whole"],
)
def test_a_later_run_compiles_only_what_it_chooses(wanted, left):
    model = Deep()
    fit({"backend": "eager", "per_block": True}, model)
    fit({"backend": "eager"} | wanted, model)

    assert [name for name, part in model.named_modules() if part._compiled_call_impl is not None] == left


@pytest.mark.slow
def test_a_loop_of_your_own():
    graphs, batches = [], joined_batches(4, 16)
    run = sg.Run(accelerator="cpu", compile={"backend": counting(graphs)})
    module = Deep()
    plain, _ = train_module_plainly(Deep(), batches)

    def main(run):
        model, optimizer = run.setup(module, module.configure_optimizers())
        for x, y in run.dataloader(batches):
            run.backward(module.criterion(model(x), y))
            run.optimizer_step(optimizer)
            optimizer.zero_grad()

    run.launch(main)

    assert graphs
    assert relative_difference(module.state_dict(), plain) < TOLERANCE


@pytest.mark.slow
def test_a_model_that_is_built_without_values():
    def _compiled(rank, world_size):
        graphs = []
        trainer = sg.Trainer(
            strategy=FSDP, devices=world_size, max_epochs=1, compile={"backend": counting(graphs)}, **QUIET
        )
        with trainer.init_module(empty_init=True):
            model = Deep()
        trainer.fit(model, share(trainer, joined_batches(2, 16)))
        return weights_of(trainer), len(graphs)

    results = run_in_processes(_compiled, 2)

    assert all(graphs > 0 and all(value.isfinite().all() for value in weights.values()) for weights, graphs in results)


@pytest.mark.when_changed(
    "plugins/callbacks/", "docs/", guard="tests/plugins/test_compile.py::test_training_is_the_same"
)
@pytest.mark.slow
def test_what_the_docs_show():
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    first, second, third = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {
        "sg": types.SimpleNamespace(Trainer=functools.partial(sg.Trainer, **QUIET)),
        "batches": joined_batches(1, 8),
    }
    exec(first, names | {"model": Net()})
    exec(second, names | {"model": Net()})
    exec(third, space := {"sg": sg})
    model = Deep()
    model.blocks = model.net[1:3]
    fit({"backend": "eager"}, model, strategy=space["BlockByBlock"]())

    assert model.net[1]._compiled_call_impl is not None


class Halves(sg.Strategy):
    """A strategy of a third party, with units of its own."""

    @sg.hookimpl
    def units(self, module):
        return [module.net[1]]

    @sg.hookimpl
    def wrap_model(self, module, run):
        return module.to(run.device)


@pytest.mark.slow
def test_units_of_a_third_party():
    model = fit({}, strategy=Halves())[1]

    assert model.net[1]._compiled_call_impl is not None
    assert model.net[2]._compiled_call_impl is None


# --- What is refused, before any process starts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("max-autotun", r"compile.mode is 'max-autotun'; expected .*; did you mean 'max-autotune'"),
        ({"mode": "max-autotune", "options": {"max_autotune": True}}, "compile.mode and compile.options are both set"),
        ({"bakend": "eager"}, r"option compile.bakend is unknown; .*did you mean 'backend'"),
        ({"backend": "inducter"}, r"compile.backend is 'inducter'; .*did you mean 'inductor'"),
        ({"options": {"max_autotun": True}}, r"compile.options.max_autotun is True.*did you mean 'max_autotune'"),
        (
            {"options": {"max_autotune": "yes"}},
            r"compile.options.max_autotune is 'yes'; expected a value such as inductor's own, False\.$",
        ),
        ({"dynamic": "maybe"}, "compile.dynamic is 'maybe'; expected true or false or None"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "compile.mode is 'max-autotune' and compile.backend is"),
        ({"modules": []}, "compile.modules is "),
        ({"modules": {Block}, "per_block": True}, "compile.modules and compile.per_block are both set"),
        (3, "compile is 3; expected true or false, a mode, or a mapping of options"),
    ],
)
def test_mistakes_are_one_sentence(wanted, told):
    with pytest.raises(ConfigError) as error:
        sg.Trainer(compile=wanted, **QUIET)

    assert re.search(told, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_the_modes_are_torchs():
    from torch._inductor import list_mode_options

    assert set(list_mode_options()) <= set(MODES)


@pytest.mark.parametrize(
    ("text", "mode"), [("true", None), ("max-autotune", "max-autotune"), ('{"dynamic": true}', None)]
)
def test_from_the_command_line(text, mode):
    trainer = sg.Trainer.from_cli(["--compile", text, "--accelerator", "cpu"])
    (callback,) = [each for each in trainer.callbacks if isinstance(each, Compile)]

    assert callback.mode == mode
    assert callback.dynamic is (True if "dynamic" in text else None)


@pytest.mark.parametrize("wanted", [None, False])
def test_nothing_is_added_without_it(wanted):
    assert not any(isinstance(each, Compile) for each in sg.Trainer(compile=wanted, **QUIET).callbacks)


def test_the_callback_is_what_the_argument_adds():
    with pytest.raises(ConfigError, match="compile is set, and callback 'compile' is listed"):
        sg.Trainer(compile=True, callbacks=["compile"], **QUIET)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [({"modules": {"Blok"}}, "did you mean 'Block'"), ({"modules": "net.7"}, r"names 'net.7', and Deep has no such")],
)
def test_parts_that_the_model_lacks(wanted, told):
    with pytest.raises(ConfigError, match=told):
        fit(wanted)


def test_blocks_of_a_model_without_any():
    with pytest.raises(ConfigError, match="compile.per_block is True, and Net has no ModuleList or Sequential"):
        fit({"per_block": True}, Net())


def test_steps_of_a_strategy_with_units():
    with pytest.raises(ConfigError, match="compile.per_block is False, and the strategy gathers or calls 1 units"):
        fit({"per_block": False}, strategy=Halves())


class InTwo(Halves):
    @sg.hookimpl
    def units(self, module):
        return [module.net[1].linear, module.net[1]]


def test_units_that_are_layers_of_torch():
    with pytest.raises(
        ConfigError, match=r"innermost units of the strategy are layers of torch \(Linear\), which gain"
    ):
        fit({}, strategy=InTwo())


@pytest.mark.slow
def test_layers_of_torch_are_compiled_where_they_are_named():
    assert fit({"modules": {nn.Linear}})[2]


@pytest.mark.slow
def test_selective_activation_checkpointing_is_compiled_with_its_blocks():
    graphs, checkpointing = [], {"policy": {Block}, "mode": "selective"}
    module, batches = Deep(), joined_batches(3, 16)
    trainer = sg.Trainer(
        max_epochs=1, compile={"backend": counting(graphs), "modules": {Block}, "fullgraph": True},
        activation_checkpointing=checkpointing, **QUIET,
    )  # fmt: skip
    trainer.fit(module, batches)

    assert relative_difference(weights_of(trainer), train_module_plainly(Deep(), batches)[0]) < TOLERANCE
    (names,) = [{str(node.target) for node in graph.graph.nodes} for graph in graphs]
    assert any("checkpoint" in name for name in names)

    sg.Trainer(max_epochs=1, activation_checkpointing=checkpointing, **QUIET).fit(eager := Deep(), batches)
    with pytest.raises(ConfigError, match="a run without it has set activation_checkpointing.mode"):
        sg.Trainer(max_epochs=1, compile=True, activation_checkpointing=checkpointing, **QUIET).fit(eager, batches)


def test_a_module_that_is_compiled_already():
    with pytest.raises(ConfigError, match="compile is set, and Deep is compiled already"):
        sg.Trainer(max_epochs=1, compile={"backend": "eager"}, **QUIET).fit(
            torch.compile(Deep(), backend="eager"), joined_batches(1, 16)
        )


def _no_backend(graph, example):
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"backend": "cudagraphs"},
        {"options": {"triton.cudagraphs": True}},
    ],
)  # fmt: skip
def test_graphs_are_refused_where_a_strategy_moves_parameters(options):
    module = Deep()
    run = types.SimpleNamespace(
        device=torch.device("cuda"), shards_parameters=True, ask=lambda _, module: [module.net[1]]
    )
    with pytest.raises(ConfigError, match=r"records CUDA graphs.*use compile=.max-autotune-no-cudagraphs"):
        compilation._check_graphs(Compile(**options), module, run)
    compilation._check_graphs(Compile(mode="max-autotune-no-cudagraphs"), module, run)
    run.ask = lambda _, module: []
    compilation._check_graphs(Compile(**options), module, run)


@pytest.mark.every_push("reduce-overhead", "cudagraphs")
@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"mode": "reduce-overhead"}, "compile.mode is 'reduce-overhead', which is for CUDA graphs, and the device is"),
        ({"backend": "cudagraphs"}, "compile.backend is 'cudagraphs', which is for CUDA graphs"),
        ({"backend": _no_backend}, "compile.backend is the function _no_backend, which failed"),
        ({"backend": "eager", "fullgraph": True}, "compile.fullgraph is True, and the code cannot be compiled as one"),
    ],
    ids=["reduce-overhead", "cudagraphs", "own backend", "fullgraph"],
)
def test_what_torch_would_ignore_or_refuse_at_a_step_is_one_sentence(wanted, told):
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=told) as error:
        sg.Trainer(max_epochs=1, compile=wanted, **QUIET).fit(Deep(), joined_batches(1, 16))

    assert "\n" not in str(error.value)


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "no-such-compiler")
    from torch._inductor import config, cpp_builder

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    with pytest.raises(ConfigError, match=r"this machine has no C\+\+ compiler.*expected g\+\+"):
        sg.Trainer(max_epochs=1, compile=True, **QUIET).fit(Deep(), joined_batches(1, 16))


def test_strategies_that_cannot_be_compiled():
    told = 'choose strategy="fsdp" or "deepspeed_stage_2": stage 3 gathers'
    with pytest.raises(ConfigError, match=f"strategy .* cannot be used with callback 'compile', .*{told}"):
        sg.Trainer(strategy="deepspeed_stage_3", devices=2, compile=True, **QUIET)


# --- The hook wrap_backend ------------------------------------------------------------------------------------------


class Watching(SingleDeviceStrategy):
    @sg.hookimpl
    def wrap_backend(self, backend):
        self.graphs = []

        def compiled(graph, inputs):
            self.graphs.append(graph)
            return backend(graph, inputs)

        return compiled


@pytest.mark.slow
@pytest.mark.when_changed("plugins/callbacks/", cases=("inductor",))
@pytest.mark.parametrize(
    "options", [{"backend": "aot_eager"}, {"options": {"max_autotune": False}}], ids=["", "inductor"]
)
def test_a_strategy_may_wrap_the_backend_that_was_chosen(options):
    plain, _ = train_module_plainly(Net(), joined_batches(3, 8))
    strategy = Watching()
    trainer = sg.Trainer(
        strategy=strategy, compile=options, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Net(), joined_batches(3, 8))

    assert strategy.graphs
    assert relative_difference(weights_of(trainer), plain) < 1e-5
