"""Whatever is written into any option of any plugin, the answer is a run or one sentence: no traceback, no hang."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.api.options import options
from stratagem.discovery import registry
from stratagem.errors import ConfigError
from stratagem.stack.construction import make
from stratagem_trainer.settings import TrainerSettings

CPU = {"accelerator": "cpu"}


def targets() -> list[tuple[str, str, str]]:
    """Every option of every installed plugin: kind, name, option; and some that do not exist."""
    found = []
    for entry in registry.entries():
        if entry.kind not in registry.kinds() or entry.kind == "accelerator":
            continue
        try:
            plugin = make(entry, {})
        except sg.StratagemError:
            continue  # a required option; covered as a callback below
        names = [*options(type(plugin)), "no_such_option"]
        found += [(entry.kind, entry.name, option) for option in names]
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = {"callback": "callbacks"}


def outcome(make_trainer) -> str:
    """Return "made", or the sentence; anything else that is raised fails the test."""
    try:
        make_trainer()
    except sg.StratagemError as error:
        assert str(error).strip()
        assert "Traceback" not in str(error)
        return str(error)
    return "made"


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(target=st.sampled_from(targets()), value=JSON)
def test_plugin_options_in_code(target, value):
    kind, name, option = target
    said = outcome(lambda: sg.Trainer(**CPU, **{ARGUMENTS.get(kind, kind): {"name": name, option: value}}))

    assert said == "made" or option in said or kind in said or name in said


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(target=st.sampled_from([t for t in targets() if t[0] != "callback"]), text=st.text(max_size=12))
def test_plugin_options_as_text(target, text):
    kind, name, option = target
    clean = text.replace("\x00", "").encode("utf-8", "ignore").decode()
    argv = ["--accelerator", "cpu", f"--{kind}={name}", f"--{kind}.{option}={clean}"]
    try:
        sg.Trainer.from_cli(argv)
    except SystemExit as stop:
        assert stop.code == 1


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    argument=st.sampled_from([*options(TrainerSettings), "no_such_argument"]),
    value=JSON | st.sampled_from(["ddp", -1, 0, 1, 2, "auto", 10**9, float("nan"), [], {}, object()]),
)
def test_trainer_arguments_in_code(argument, value):
    outcome(lambda: sg.Trainer(**{**CPU, argument: value}))


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(argument=st.sampled_from(list(options(TrainerSettings))), text=st.text(max_size=12))
def test_trainer_arguments_in_the_environment(argument, text):
    clean = text.replace("\x00", "").encode("utf-8", "ignore").decode()
    with mock.patch.dict(os.environ, {f"STRATAGEM_TRAINER_{argument.upper()}": clean}):
        outcome(sg.Trainer)


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "ignore")))
@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_files(content, suffix, tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / f"run.{suffix}"
    path.write_bytes(content)
    try:
        sg.Trainer.from_config(path, **CPU)
    except ConfigError as error:
        assert "\n" not in str(error)
    except sg.StratagemError:
        pass
