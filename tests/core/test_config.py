"""Options are filled strictly in code and files, and parsed by type from text."""

from __future__ import annotations

import enum
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import define, field
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stratagem as sg
from stratagem.api.options import check, convert, describe, structure
from stratagem.api.validators import at_least
from stratagem.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"


@define(eq=False, kw_only=True)
class Options:
    flag: bool = False
    count: int = field(default=1, validator=at_least(1))
    share: float | None = None
    mode: Literal["min", "max"] = "min"
    wait: timedelta = timedelta(seconds=1)
    layers: set[type] | Callable[..., Any] | None = None
    numbers: list[int] = field(factory=list)
    pair: tuple[int, str] = (1, "a")
    table: dict[str, float] = field(factory=dict)
    either: int | str = 1
    colour: Colour = Colour.RED
    folder: Path | None = None
    anything: Any = None


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("flag", True, True),
        ("share", 1, 1.0),
        ("mode", "MAX", "max"),
        ("wait", 30, timedelta(seconds=30)),
        ("layers", {int}, {int}),
        ("layers", print, print),
        ("numbers", (1, 2), [1, 2]),
        ("pair", [2, "b"], (2, "b")),
        ("table", {"a": 1}, {"a": 1.0}),
        ("either", "x", "x"),
        ("colour", "red", Colour.RED),
        ("folder", "here", Path("here")),
        ("anything", object, object),
    ],
)
def test_a_value_of_the_right_type_is_taken(option, value, expected):
    assert getattr(structure(Options, {option: value}, "kind.name"), option) == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("flag", "false", r"kind\.name\.flag is 'false'; expected true or false"),
        ("flag", 1, "true or false"),
        ("count", "3", "count is '3'; expected an integer"),
        ("count", True, "an integer"),
        ("count", 0, r"kind\.name\.count is 0; expected at least 1"),
        ("share", True, "a number or None"),
        ("share", float("nan"), "a number or None"),
        ("mode", "mean", "'min' or 'max'"),
        ("layers", 3, "a set or a callable or None"),
        ("numbers", ["1"], "a list"),
        ("pair", (1,), "a tuple|a list"),
        ("table", {1: 2}, "a mapping"),
        ("either", 1.5, "an integer or text"),
        ("colour", "blue", "'red'"),
        ("folder", 3, "a path or None"),
        ("flagg", True, "unknown; .*did you mean 'flag'"),
    ],
)
def test_anything_else_is_refused_with_its_path(option, value, message):
    with pytest.raises(ConfigError, match=message):
        structure(Options, {option: value}, "kind.name")


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("flag", "false", False),
        ("flag", "ON", True),
        ("count", "3", 3),
        ("share", "none", None),
        ("share", "0.5", 0.5),
        ("wait", "1.5", timedelta(seconds=1.5)),
        ("numbers", "1,2", [1, 2]),
        ("numbers", "[3]", [3]),
        ("table", '{"a": 1}', {"a": 1.0}),
        ("either", "4", 4),
        ("mode", "max", "max"),
    ],
)
def test_text_is_parsed_by_the_type_of_its_option(option, text, expected):
    assert getattr(structure(Options, {option: text}, "kind.name", text=True), option) == expected


@pytest.mark.parametrize(("option", "text"), [("flag", "maybe"), ("count", "1.5"), ("numbers", "[1"), ("table", "a,b")])
def test_text_that_does_not_parse_is_refused(option, text):
    with pytest.raises(ConfigError, match=option):
        structure(Options, {option: text}, "kind.name", text=True)


def test_the_option_name_of_a_plugin_is_beside_the_name_that_chooses_it(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("accelerator: cpu\nlogger: {name: csv, version: 1, init_args: {name: digits}}\n")
    for trainer in (
        sg.Trainer.from_config(path),
        sg.Trainer(
            accelerator="cpu", logger=["tensorboard", {"name": "csv", "version": 1, "init_args": {"name": "digits"}}]
        ),
    ):
        assert (trainer.loggers[-1].name, trainer.loggers[-1].version) == ("digits", 1)
    for wrong in ({"name": "csv", "init_args": 1}, {"name": "csv", "init_args": {"init_args": {}}}):
        with pytest.raises(ConfigError, match="logger.csv.init_args is unknown"):
            sg.Trainer(accelerator="cpu", logger=wrong)


def test_an_instance_built_in_code_is_checked_too():
    with pytest.raises(ConfigError, match="Options.flag is 'yes'; expected true or false"):
        check(Options(flag="yes"), "Options")


def test_types_are_described_in_words():
    assert describe(int | None) == "an integer or None"
    assert describe(Literal["a", "b"]) == "'a' or 'b'"


@pytest.mark.slow
@pytest.mark.xdist_group("hypothesis")
@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    option=st.sampled_from([*(f.name for f in Options.__attrs_attrs__), "nothing"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    text=st.booleans(),
)
def test_garbage_is_taken_or_refused_with_one_sentence(option, value, text):
    try:
        structure(Options, {option: value}, "kind.name", text=text)
    except ConfigError as error:
        assert option in str(error)


def test_none_of_the_conversions_change_the_value_given():
    numbers = [1, 2]
    structure(Options, {"numbers": numbers}, "x").numbers.append(3)

    assert numbers == [1, 2]
    assert convert(numbers, list[int], "x") == [1, 2]
