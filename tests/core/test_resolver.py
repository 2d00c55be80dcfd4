"""Names, mappings, instances and options become an ordered stack of plugins, without a process."""

from __future__ import annotations

import pytest
import torch
from attrs import define

import stratagem as sg
from stratagem.api import SHARDED_PARAMETERS, Accelerator, Capabilities, PrecisionPolicy, hookimpl
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.config.settings import Source, gather
from stratagem.errors import ConfigError, PluginError
from stratagem.stack.resolver import resolve
from stratagem.strategies import DDPStrategy
from stratagem_trainer.api import Callback
from stratagem_trainer.settings import TrainerSettings, with_callbacks

LOCAL = {"accelerator": "cpu", "environment": "local"}


def settings(*sources, **arguments):
    return gather(TrainerSettings, LOCAL | arguments, sources)


def resolved(*sources, **arguments):
    return resolve(settings(*sources, **arguments))


def names(choices):
    return [choice.name for choice in choices]


@define(eq=False, kw_only=True)
class Counts(Callback):
    """Counts batches."""

    #: A larger one counts less.
    every: int = 1

    @hookimpl
    def on_train_batch_end(self):
        pass


@define(eq=False, kw_only=True)
class CountsMore(Counts):
    """Counts more batches."""


class Anything:
    """An object with hooks, of no kind."""

    @hookimpl
    def on_fit_start(self):
        pass


@define(eq=False, kw_only=True)
class Absent(Accelerator):
    """An accelerator without devices."""

    def count(self):
        return 0


@define(eq=False, kw_only=True)
class Engines(Accelerator):
    """An accelerator whose devices `ddp` cannot use."""

    capabilities = Capabilities(provides={"device:cpu"})

    def count(self):
        return 4

    def device(self, index):
        return torch.device("cpu")

    def default_strategy(self, num_devices):
        return "dp" if num_devices > 1 else None


# --- Defaults ----------------------------------------------------------------------------------------------------


def test_one_process_gets_the_default_of_every_kind():
    stack = resolved()

    assert names(stack.strategies) == ["single_device"]
    assert stack.strategies[0].reason == "the default for one process"
    assert stack.precision.name == "32-true"
    assert stack.checkpoint.name == "full"
    assert stack.of("comm_hook") == []
    assert stack.devices == (0,)
    assert not stack.devices_given


@pytest.mark.parametrize("arguments", [{"devices": 2}, {"num_nodes": 2}], ids=["devices", "nodes"])
def test_several_processes_get_a_distributed_strategy(arguments):
    stack = resolved(**arguments)

    assert names(stack.strategies) == ["ddp"]
    assert stack.strategies[0].reason == "the default for several processes"


def test_an_accelerator_may_choose_the_strategy():
    several = resolved(accelerator=Engines(), devices=2)
    assert names(several.strategies) == ["dp"]
    assert several.strategies[0].reason == "the default of accelerator 'Engines' with 2 devices"
    assert several.num_processes == 1

    assert names(resolved(accelerator=Engines(), devices=1).strategies) == ["single_device"]
    assert names(resolved(accelerator=Engines(), devices=2, strategy="ddp").strategies) == ["ddp"]


def test_plugins_act_in_the_order_of_their_kinds():
    stack = resolved(
        strategy=["local_sgd", "ddp"], comm_hook=["powersgd", "fp16_compress"], devices=2, callbacks=Counts(),
        plugins=Anything(), logger="csv", enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    kinds = list(dict.fromkeys(choice.kind for choice in stack.choices()))

    assert kinds == [
        "strategy", "precision", "comm_hook", "environment", "launcher", "accelerator", "checkpoint", "plugin",
        "callback", "logger",
    ]  # fmt: skip
    assert names(stack.strategies) == ["local_sgd", "ddp"]
    assert names(stack.of("comm_hook")) == ["powersgd", "fp16_compress"]
    assert stack.strategy is stack.strategies[-1].plugin


def test_an_outer_strategy_alone_gets_one_inside():
    stack = resolved(strategy="local_sgd", devices=2)

    assert names(stack.strategies) == ["local_sgd", "single_device"]
    assert "the default inside" in stack.strategies[1].reason


# --- Names, mappings, instances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "DDP", "stratagem-ddp:ddp", {"name": "ddp"}, DDPStrategy()], ids=str)
def test_a_plugin_has_one_name_however_it_is_chosen(name):
    assert names(resolved(strategy=name, devices=2).strategies) == ["ddp"]


def test_options_keep_where_they_came_from():
    file = Source("file run.yaml", {"strategy": {"name": "ddp", "bucket_cap_mb": 5.0}})
    line = Source("command line", options={"strategy": {"static_graph": "true"}}, text=True)
    (choice,) = resolved(file, line, devices=2).strategies

    assert dict(choice.origins) == {"bucket_cap_mb": "file run.yaml", "static_graph": "command line"}
    assert choice.plugin.bucket_cap_mb == 5.0
    assert choice.plugin.static_graph is True


def test_of_an_instance_only_changed_options_have_an_origin():
    (choice,) = resolved(strategy=DDPStrategy(static_graph=True, bucket_cap_mb=25.0), devices=2).strategies

    assert dict(choice.origins) == {"static_graph": "code"}
    assert choice.reason == "given as an instance"


def test_options_apply_to_a_default_too():
    line = Source("command line", options={"checkpoint": {"async_save": "true"}}, text=True)

    assert resolved(line).checkpoint.plugin.async_save is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": []}, "strategy is an empty list"),
        ({"strategy": {"bucket_cap_mb": 5}}, 'expected a mapping with a "name"'),
        ({"strategy": DDPStrategy}, "strategy is the class DDPStrategy; expected an instance; call the class"),
        ({"strategy": 3}, "expected a name, a mapping or an instance of stratagem.Strategy"),
        ({"strategy": "dpp"}, "did you mean 'd"),
        ({"strategy": ["ddp", "single_device"]}, "cannot wrap another strategy"),
        ({"callbacks": ["early_stoping"]}, "did you mean 'early_stopping'"),
        ({"precision": "float16"}, 'use precision="16-mixed"'),
        ({"comm_hook": "fp16_compress"}, "needs 'gradient-buckets', which strategy 'single_device' does not provide"),
        ({"strategy": "ddp_spawn", "devices": 2, "launcher": "fork"}, "needs the launcher 'spawn'"),
        ({"accelerator": Absent()}, "finds no device on this machine"),
        ({"profiler": "simpel"}, "did you mean 'simple'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_choices_that_cannot_work_are_refused(arguments, message):
    with pytest.raises((ConfigError, PluginError)) as refused:
        resolved(**arguments)

    assert message in str(refused.value)


@pytest.mark.parametrize("strategy", [DDPStrategy(), ["local_sgd", "ddp"]], ids=["an instance", "several plugins"])
def test_an_option_that_no_plugin_takes_is_refused(strategy):
    line = Source("command line", options={"strategy": {"static_graph": "true"}}, text=True)

    with pytest.raises(ConfigError, match=r"strategy.static_graph is set \(command line\).* expected one plugin"):
        resolved(line, strategy=strategy, devices=2)


def test_a_bad_option_names_its_source():
    file = Source("file run.yaml", {"strategy": {"name": "ddp", "bucket_cap_mb": "large"}})

    with pytest.raises(ConfigError, match=r"bucket_cap_mb is 'large' \(file run.yaml\)"):
        resolved(file, devices=2)


# --- plugins= ----------------------------------------------------------------------------------------------------


def test_plugins_are_added_to_their_kind():
    stack = resolved(plugins=["timer", {"name": "bf16-mixed"}, Counts(every=2), Anything()])

    assert stack.precision.name == "bf16-mixed"
    assert {"timer", "Counts"} <= set(names(stack.callbacks))
    assert names(stack.others) == ["Anything"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plugins": "fp16_compres"}, "did you mean 'fp16_compress'"),
        ({"plugins": 3}, "plugins[0] is 3; expected a name, a mapping, or an object with @hookimpl methods"),
        ({"plugins": "deepspeed"}, "plugins[0] 'deepspeed' is the name of a "),
        ({"plugins": "bf16-mixed", "precision": "16-mixed"}, "precision is chosen more than once: '16-mixed' and"),
    ],
    ids=["unknown", "a number", "two kinds", "twice"],
)
def test_plugins_that_fit_no_kind_are_refused(arguments, message):
    with pytest.raises((ConfigError, PluginError)) as refused:
        resolved(**arguments)

    assert message in str(refused.value)


# --- Callbacks and loggers ---------------------------------------------------------------------------------------


def test_standard_callbacks_come_unless_one_of_their_class_is_listed():
    assert names(resolved(enable_model_summary=True).callbacks) == ["progress", "model_checkpoint", "model_summary"]
    assert names(resolved(callbacks=ModelCheckpoint(save_last=True), enable_progress_bar=False).callbacks) == [
        "model_checkpoint"
    ]
    assert names(resolved(callbacks="tqdm", enable_checkpointing=False).callbacks) == ["tqdm"]
    by_package = resolved(callbacks="stratagem-callbacks:Progress", enable_checkpointing=False)
    assert names(by_package.callbacks) == ["progress"]


def test_barebones_and_a_fast_run_have_fewer_plugins():
    bare, fast = resolved(barebones=True), resolved(fast_dev_run=True, logger="csv")

    assert (bare.callbacks, bare.loggers) == ([], [])
    assert names(fast.callbacks) == ["progress"]
    assert fast.loggers == []


@pytest.mark.parametrize(("logger", "expected"), [(True, ["csv"]), (False, []), (["csv", "tensorboard"], None)])
def test_loggers(logger, expected):
    assert names(resolved(logger=logger).loggers) == (expected if expected is not None else logger)


def test_a_profiler_does_not_add_what_plugins_adds_again():
    assert names(resolved(plugins=[ModelCheckpoint()], profiler="simple").callbacks) == [
        "model_checkpoint", "simple_profiler", "progress",
    ]  # fmt: skip


def test_a_profiler_is_the_callback_of_that_name():
    assert "simple_profiler" in names(resolved(profiler="simple").callbacks)
    assert "Counts" in names(resolved(profiler=Counts()).callbacks)


def test_callbacks_of_a_module_replace_those_of_their_class_and_come_before_checkpoints():
    given = settings(callbacks=[Counts(), EarlyStopping(monitor="loss"), ModelCheckpoint()])
    stack = resolve(given)
    callbacks = with_callbacks(stack, given, [CountsMore(every=3), "timer"])

    assert names(callbacks) == ["progress", "CountsMore", "timer", "early_stopping", "model_checkpoint"]
    assert names(stack.callbacks) == ["Counts", "model_checkpoint", "progress", "early_stopping"]


# --- Precision ---------------------------------------------------------------------------------------------------


def test_an_absorbed_precision_is_not_active():
    absorbed = resolved(strategy="fsdp", precision="bf16-mixed", devices=2)
    wrapped = resolved(strategy="ddp", precision="bf16-mixed", devices=2)

    assert absorbed.precision_absorbed
    assert absorbed.precision not in absorbed.active()
    assert wrapped.precision in wrapped.active()


class _ReplacesLayers(sg.Precision):
    replaces_layers = True

    def policy(self):
        return PrecisionPolicy(compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_1"])
def test_a_precision_that_replaces_layers_stays_active(strategy):
    stack = resolved(strategy=strategy, precision=_ReplacesLayers(), devices=2)

    assert not stack.precision_absorbed
    assert stack.precision in stack.active()


class _OwnState(sg.Precision):
    @hookimpl
    def load_model_state(self):
        return True


class _NoShards(sg.Precision):
    capabilities = Capabilities(conflicts={SHARDED_PARAMETERS})


@pytest.mark.parametrize(
    ("precision", "found"),
    [
        (_OwnState(), r"'_OwnState' cannot be used with strategy 'fsdp': both answer hook 'load_model_state'; expected a "
         r"strategy that leaves it to precision '_OwnState'"),
        (_NoShards(), r"'_NoShards' cannot be used with strategy 'fsdp', which provides 'sharded-parameters'"),
    ],
)  # fmt: skip
def test_a_precision_and_a_strategy_that_exclude_each_other_name_other_strategies(precision, found):
    with pytest.raises(ConfigError, match=rf"precision {found}; choose strategy 'ddp' or ") as refused:
        resolved(strategy="fsdp", precision=precision, devices=2)

    assert "'fsdp'" not in refused.value.do
    assert "'single_device'" not in refused.value.do  # two processes
    assert refused.value.do.endswith(f"or drop precision '{type(precision).__name__}'")


def test_options_of_an_absorbed_precision_are_refused():
    with pytest.raises(ConfigError, match="applies the precision itself"):
        resolved(strategy="deepspeed_stage_1", precision={"name": "16-mixed", "init_scale": 2.0}, devices=2)


def test_the_trainer_has_what_was_resolved():
    trainer = sg.Trainer(**LOCAL, strategy="ddp", devices=2, logger=False, enable_progress_bar=False)

    assert type(trainer.strategy) is DDPStrategy


# --- Paths of options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"compile": {"bakend": "eager"}}, "option compile.bakend is unknown"),
        ({"compile": {"dynamic": "maybe"}}, "compile.dynamic is 'maybe'"),
        ({"profiler": {"name": "simple", "wrte": True}}, "option profiler.wrte is unknown"),
        (
            {"callbacks": [{"name": "early_stopping", "monitr": "a"}]},
            "option callbacks.early_stopping.monitr is unknown",
        ),
        ({"callbacks": {"name": "early_stopping", "monitor": 3}}, "callbacks.early_stopping.monitor is 3"),
        ({"logger": {"name": "csv", "folder": "x"}}, "option logger.csv.folder is unknown"),
    ],
)
def test_errors_name_options_as_the_user_typed_them(arguments, path):
    with pytest.raises(ConfigError) as refused:
        resolved(**arguments)

    assert str(refused.value).startswith(path)
