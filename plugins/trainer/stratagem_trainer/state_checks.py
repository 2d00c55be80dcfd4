"""Check what a resumed fit is about to apply: its progress, schedulers, numbers, and the position in a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.checkpoint.state_checks import DO, check_similar, is_number, wrong
from stratagem.errors import CheckpointError


def check_scheduler(state: Mapping[str, Any], scheduler: Any, where: str) -> None:
    """Check that `state` has values like the current state of `scheduler`.

    Raises:
        CheckpointError: names the entry.
    """
    now = scheduler.state_dict()
    if "last_epoch" in now and "last_epoch" not in state:
        raise CheckpointError(f"{where} has no 'last_epoch'", expected="the state of a scheduler", do=DO)
    check_similar(now, state, where)


def check_like(state: Mapping[str, Any], now: Mapping[str, Any], where: str) -> None:
    """Check that `state` has every key of `now`, with values of the same kind.

    Raises:
        CheckpointError: names the key.
    """
    for key, value in now.items():
        if key not in state:
            raise CheckpointError(f"{where} has no {key!r}", expected=f"one like {value!r}", do=DO)
    check_similar(now, state, where)
    for key, value in now.items():
        if type(value) is int and (type(state[key]) is not int or state[key] < 0):
            raise CheckpointError(f"{where}.{key} is {state[key]!r}", expected="a whole number, 0 or more", do=DO)


def check_numbers(state: Mapping[str, Any], where: str) -> None:
    """Check that all values of `state` are numbers.

    Raises:
        CheckpointError: names the key.
    """
    for key, value in state.items():
        if not is_number(value):
            raise wrong("", f"{where}[{key!r}]", value, "a number")


def check_batches(state: Mapping[str, Any], where: str) -> None:
    """Check the saved state of one rank's `ResumableBatches`.

    Raises:
        CheckpointError: names the key.
    """
    if not state:
        return
    check_like(state, {"marks": {}, "accumulate": 1}, where)
    for number, replay_state in state["marks"].items():
        if type(number) is not int:
            raise wrong("", f"{where}.marks: a key", number, "the number of a batch")
        if not isinstance(replay_state, Mapping):
            raise wrong(where, f"marks[{number}]", replay_state, "a mapping")
    if "window" in state:
        if not isinstance(state["window"], Mapping):
            raise wrong(where, "window", state["window"], "a mapping")
        check_like(state["window"], {"start": 0, "buffers": {}}, f"{where}.window")
