"""Editors and notebooks can complete arguments: signatures name every argument, with its type and its default."""

from __future__ import annotations

import inspect
import pickle

import attrs
import jedi
import pytest

import stratagem as sg
from stratagem.api.options import options
from stratagem.config.settings import RunSettings, added_arguments, option_names
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem_testing.reference import Net, joined_batches
from stratagem_trainer.api import TrainerView
from stratagem_trainer.metrics import LogOptions
from stratagem_trainer.option_texts import option_docs
from stratagem_trainer.settings import TrainerSettings

QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
#: Arguments that may be anything.
ANYTHING = {"plugins"}


@pytest.mark.parametrize(("owner", "settings"), [(sg.Trainer, TrainerSettings), (sg.Run, RunSettings)])
def test_constructors_have_every_setting_with_its_default_and_a_type(owner, settings):
    parameters = {
        name: parameter for name, parameter in inspect.signature(owner).parameters.items() if name != "settings"
    }
    known = {field.name: field for field in attrs.fields(settings) if field.init}

    assert {each.kind for each in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert set(parameters) == set(option_names(settings))
    assert {name for name, each in parameters.items() if each.annotation == "Any"} == ANYTHING
    for name, field in known.items():
        default = None if isinstance(field.default, attrs.Factory) else field.default
        assert parameters[name].default == default, name


@pytest.mark.parametrize("settings", [TrainerSettings, RunSettings])
def test_every_argument_is_documented(settings):
    documented = option_docs(settings)

    assert [field.name for field in attrs.fields(settings) if field.init and not documented.get(field.name)] == []
    assert [name for name in added_arguments(settings) if not registry.kinds()[name].doc] == []


@pytest.mark.parametrize("method", [sg.Module.log, sg.Module.log_dict, sg.Trainer.log_metric, TrainerView.log_metric])
def test_methods_that_log_have_every_option_with_its_default_and_type(method):
    parameters = inspect.signature(method).parameters.values()
    shown = [(each.name, each.default, each.annotation) for each in parameters if each.default is not each.empty]
    of_log = {name: each for name, each in inspect.signature(sg.Module.log).parameters.items() if name != "self"}

    assert shown == [(name, each.default, each.annotation) for name, each in [*of_log.items()][2:]]
    for option, default in LogOptions._field_defaults.items():
        annotation = LogOptions.__annotations__[option]
        assert (of_log[option].default, of_log[option].annotation) == (
            default,
            getattr(annotation, "__forward_arg__", annotation),
        )


def plugin_classes() -> list[type]:
    found = [entry.load() for entry in registry.entries() if entry.kind in registry.kinds()]
    return list(dict.fromkeys(target for target in found if isinstance(target, type)))


@pytest.mark.parametrize("cls", plugin_classes())
def test_the_signature_of_a_plugin_has_its_options(cls):
    given = inspect.signature(cls).parameters.items()
    parameters = {name: each for name, each in given if each.kind is not each.VAR_KEYWORD}
    positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]

    assert set(parameters) == set(options(cls))
    assert positional == list(cls.positional)


#: Code with ``|`` where something is completed, and some of what is offered.
COMPLETED = [
    ("import stratagem as sg\nsg.Trainer(|", {"strategy=", "devices=", "max_epochs=", "barebones="}),
    ("import stratagem as sg\nsg.Run(|", {"strategy=", "comm_hook=", "deterministic="}),
    (
        "import stratagem as sg\nclass Mine(sg.Module):\n    def training_step(self, batch, batch_idx):\n"
        "        self.log(|",
        {"name=", "value=", "prog_bar=", "on_epoch=", "sync_dist=", "rank_zero_only="},
    ),
]


@pytest.mark.slow
@pytest.mark.every_push("log")
@pytest.mark.parametrize(("source", "expected"), COMPLETED, ids=["Trainer", "Run", "log"])
def test_an_editor_completes_arguments(source, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(jedi.settings, "cache_directory", str(tmp_path))  # other processes write to the usual one
    before, _, _ = source.partition("|")
    script = jedi.Script(before)
    position = before.count("\n") + 1, len(before.rpartition("\n")[2])
    (signature,) = script.get_signatures(*position)
    offered = {completion.name for completion in script.complete(*position)}

    assert expected <= offered
    assert all(each.description.partition(":")[2] for each in signature.params if each.name not in ("self", "settings"))


class LogsWith(Net):
    def __init__(self, method, options):
        super().__init__()
        self.method, self.options = method, options

    def training_step(self, batch, batch_idx):
        if self.method == "log_dict":
            self.log_dict({"a": 1.0}, **self.options)
        else:
            owner = self if self.method == "log" else self.trainer
            getattr(owner, self.method)("a", 1.0, **self.options)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("method", "call"), [("log", r"log\('a'\)"), ("log_dict", r"log_dict\(\)"), ("log_metric", r"log_metric\('a'\)")]
)
def test_an_unknown_option_of_a_log_names_the_nearest(method, call):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    with pytest.raises(
        ConfigError, match=f"^{call} got on_epok; expected options prog_bar, .*; did you mean 'on_epoch'"
    ):
        trainer.fit(LogsWith(method, {"on_epok": True}), joined_batches(1, 8))


@pytest.mark.parametrize("method", ["log", "log_dict", "log_metric"])
def test_options_reach_the_metric(method):
    trainer = sg.Trainer(max_epochs=1, **QUIET)
    trainer.fit(LogsWith(method, {"on_step": True, "on_epoch": True, "reduce_fx": "sum"}), joined_batches(3, 8))

    assert (float(trainer.callback_metrics["a_step"]), float(trainer.callback_metrics["a_epoch"])) == (1.0, 3.0)


def test_a_run_refuses_arguments_of_other_trainers_with_what_to_write():
    with pytest.raises(ConfigError, match="Run has no argument 'gpus'; .*use accelerator=\"gpu\" and devices"):
        sg.Run(gpus=2)


def test_a_run_that_is_sent_to_another_process_has_its_settings():
    run = pickle.loads(pickle.dumps(sg.Run(accelerator="cpu", strategy="single_device")))

    assert run.settings.origins == {"accelerator": "code", "strategy": "code"}
