"""Mistakes in the constructor of a plugin, or in the name of its class, get the answer that a mapping of options gets."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import sys
from abc import ABC, abstractmethod

import attrs
import pytest
from attrs import define, field
from omegaconf import OmegaConf

import stratagem as sg
from programs import scripts
from stratagem.api.options import options
from stratagem.api.validators import at_least
from stratagem.discovery import registry
from stratagem.errors import ConfigError, StratagemError

#: Values for options without a default.
REQUIRED = {"monitor": "loss", "dirpath": "x", "scheduling": {0: 2}, "on": {"on_fit_start": print}, "swa_lrs": 0.1,
            "policy": "Linear", "samples": 8}  # fmt: skip


def plugin_classes() -> list[type]:
    found = [entry.load() for entry in registry.entries() if entry.kind in registry.kinds()]
    return list(dict.fromkeys(target for target in found if isinstance(target, type)))


@pytest.mark.parametrize("cls", plugin_classes())
def test_an_unknown_option_of_an_instance_names_the_nearest(cls):
    known = options(cls)
    needed = {name: REQUIRED[name] for name, option in known.items() if option.default is attrs.NOTHING}
    with pytest.raises(ConfigError, match=f"option {cls.__name__}.nothing_like_it is unknown; expected"):
        cls(**needed, nothing_like_it=1)

    for name in known:
        with pytest.raises(ConfigError, match=f"option {cls.__name__}.{name}x is unknown; .*did you mean"):
            cls(**needed, **{f"{name}x": 1})


@pytest.mark.parametrize("cls", plugin_classes())
def test_a_value_without_a_name_is_told_which_option_to_name(cls):
    with pytest.raises(
        ConfigError, match=f"^{cls.__name__} .*'value'.* without a name; expected options by name"
    ) as caught:
        cls(*["value"] * (len(cls.positional) + 1))

    if required := required_options(cls):
        assert f"write {cls.__name__}({required[0]}='value')" in str(caught.value)


def test_options_that_lightning_users_give_by_position():
    from stratagem.callbacks import EarlyStopping, ModelCheckpoint
    from stratagem.loggers import CSVLogger

    stops = EarlyStopping("val_loss", 0.1, mode="max")
    assert (stops.monitor, stops.min_delta, stops.mode) == ("val_loss", 0.1, "max")
    assert ModelCheckpoint("folder", "{epoch}").filename == "{epoch}"
    assert CSVLogger("logs", "mine").name == "mine"
    with pytest.raises(ConfigError, match="'val_loss' without a name"):
        EarlyStopping("val_loss", monitor="loss")


@pytest.mark.parametrize("cls", [cls for cls in plugin_classes() if cls.positional])
def test_what_is_given_by_position_is_an_option(cls):
    assert set(cls.positional) <= set(options(cls))


def test_a_constructor_of_the_authors_own_gets_what_it_was_given():
    class Mine(sg.Callback):
        positional = ("first",)

        def __init__(self, *values, **named):
            self.given = values, named

    assert Mine(1, second=2).given == ((1,), {"second": 2})


def required_options(cls):
    return [name for name, option in options(cls).items() if option.default is attrs.NOTHING]


@pytest.mark.parametrize("cls", [cls for cls in plugin_classes() if required_options(cls)])
def test_a_missing_option_is_named(cls):
    required = required_options(cls)
    entry = next(entry for entry in registry.entries() if entry.kind in registry.kinds() and entry.load() is cls)
    with pytest.raises(
        ConfigError,
        match=rf"{cls.__name__} lacks the option '{required[0]}'; .*write {cls.__name__}\({required[0]}=\.\.\.\)",
    ):
        cls()
    with pytest.raises(
        ConfigError, match=rf"lacks the option '{required[0]}'.*\"name\": \"{entry.name}\", \"{required[0]}\""
    ):
        sg.Trainer(accelerator="cpu", **{f"{entry.kind}s": [entry.name]})


def test_a_class_of_a_third_party_answers_as_well():
    class Mixin(ABC):
        @abstractmethod
        def work(self): ...

    @define(eq=False, kw_only=True)
    class Mine(sg.Callback, Mixin):
        depth: int = field(validator=at_least(1))
        breadth: int = 2

        def work(self): ...

    class Derived(Mine):
        pass

    class Own(sg.Callback):
        def __init__(self, anything):
            self.anything = anything

    with pytest.raises(ConfigError, match=r"option Derived\.dept is unknown; .*did you mean 'depth'"):
        Derived(dept=1)
    with pytest.raises(ConfigError, match=r"Mine\.depth is 0; expected at least 1"):
        Mine(depth=0)
    with pytest.raises(TypeError):  # its author's own signature
        Own()
    mine = copy.deepcopy(pickle.loads(pickle.dumps(sg.Callback())))
    assert isinstance(mine, sg.Callback)
    assert attrs.evolve(Mine(depth=1), breadth=3).breadth == 3
    assert Own(3).anything == 3


def test_a_type_error_of_the_authors_own_code_is_left_alone():
    @define(eq=False, kw_only=True)
    class Broken(sg.Callback):
        def __attrs_post_init__(self):
            len(3)

    with pytest.raises(TypeError, match="has no len"):
        Broken()


@pytest.mark.parametrize("kind", registry.kinds().values(), ids=registry.kinds())
def test_a_misspelt_class_is_an_import_error_that_names_the_nearest(kind):
    module = importlib.import_module(f"stratagem.{kind.module}")
    classes = [name for name in dir(module) if isinstance(getattr(module, name), type)]
    assert classes

    for name in classes:
        with pytest.raises(
            ImportError, match=rf"{kind.name} plugin provides a class '{name}x'; .*did you mean"
        ) as caught:
            exec(f"from stratagem.{kind.module} import {name}x")
        assert isinstance(caught.value, StratagemError)
    assert not hasattr(module, "Typo")
    assert getattr(module, "Typo", None) is None
    with pytest.raises(AttributeError, match="provides a class 'Typo'"):
        _ = module.Typo


@pytest.mark.parametrize(
    ("kind", "name", "instead"),
    [
        ("strategy", "HivemindStrategy", "run `pip install stratagem-hivemind`"),
        ("strategy", "DDPSequentialPlugin", 'use strategy="ddp_sequential"'),
        ("strategy", "TPUSpawnStrategy", 'use strategy="xla"; run `pip install stratagem-xla`'),
        ("precision", "TransformerEnginePrecision", "run `pip install stratagem-transformer-engine`"),
        ("precision", "BitsandbytesPrecision", "run `pip install stratagem-bitsandbytes`, and choose nf4, "),
    ],
)
def test_a_class_of_another_trainer_leads_to_the_plugin_or_its_package(kind, name, instead):
    with pytest.raises(ImportError, match=re.escape(f"; {instead}")):
        exec(f"from stratagem.{registry.kinds()[kind].module} import {name}")


@pytest.mark.slow
def test_a_misspelt_class_is_named_in_a_traceback():
    script = "from stratagem.strategies import DDPStrateg"
    result = scripts.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=False)

    assert "did you mean 'DDPStrategy'" in result.stderr


class WithAttributes(sg.Callback):
    def __init__(self, folder):
        self.folder = folder


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda plugin: pickle.loads(pickle.dumps(plugin))])
def test_attributes_that_are_not_options_are_copied_and_pickled(duplicate):
    """A callback that a user writes has them, and a launcher may send it to another process."""
    assert duplicate(WithAttributes("here")).folder == "here"


def test_lists_and_mappings_of_a_configuration_library_choose_plugins():
    given = OmegaConf.create(
        {"callbacks": ["model_summary", {"name": "early_stopping", "monitor": "loss"}], "logger": ["csv"]}
    )
    trainer = sg.Trainer(accelerator="cpu", enable_progress_bar=False, callbacks=given.callbacks, logger=given.logger)

    assert trainer.early_stopping_callback.monitor == "loss"
    assert type(trainer.logger).__name__ == "CSVLogger"
