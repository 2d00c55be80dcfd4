"""Values that a plan takes where a step asks for the value of a tensor: the user tells them, place by place."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import define, field
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stratagem.errors import ConfigError, shown
from stratagem_plan.places import is_of_a_library, is_ours

_ITEM = torch.ops.aten._local_scalar_dense.default
_PHRASE = " is taken to be "


@define(eq=False)
class Assumptions:
    """Values by place, such as ``train.py:30``: a path as errors print it, or the end of one, and a line."""

    values: Mapping[str, bool | float]
    #: A sentence for each place that was asked for.
    used: dict[str, None] = field(init=False, factory=dict)

    def value_of(self, tensor: torch.Tensor) -> bool | float | complex | None:
        """Return the value of `tensor` for the line that asks for it now; None if nothing is assumed there."""
        place = _asking()
        found = next((value for key, value in self.values.items() if _is_at(key, place)), None)
        if found is None:
            return None
        value = _kind(tensor.dtype)(found)
        self.used[f"{place}{_PHRASE}{value}"] = None
        return value


def _asking() -> str:
    """Return the place of the innermost line that is not a library's; "" if it is a plugin's of ours."""
    frame: Any = sys._getframe(1)
    while frame is not None and is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    path = "" if frame is None else frame.f_code.co_filename
    return f"{path}:{frame.f_lineno}" if path and not is_ours(path) else ""


def _is_at(key: str, place: str) -> bool:
    return f"/{place}".endswith(f"/{key.lstrip('/')}")


def _kind(dtype: torch.dtype) -> type[bool | float | complex]:
    if dtype.is_complex:
        return complex
    return float if dtype.is_floating_point else bool if dtype is torch.bool else int


def answers_scalar(error: BaseException) -> bool:
    """Whether an assumption can take the place of the value that `error` is about: it is one number."""
    return isinstance(error, DataDependentOutputException) and error.func is _ITEM


class AssumingMode(FakeTensorMode):
    """Makes tensors without values, which have those that are assumed."""

    def __init__(self, assumptions: Assumptions) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.assumptions = assumptions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException as error:
            value = self.assumptions.value_of(args[0]) if answers_scalar(error) else None
            if value is None:
                raise
            return value


# --- What a user gives -----------------------------------------------------------------------------------------------


def read(texts: Iterable[str]) -> dict[str, bool | float]:
    """Return the values of ``--assume FILE.py:LINE=VALUE``, by place.

    Raises:
        ConfigError: a text has another form.
    """
    found: dict[str, Any] = {}
    for text in texts:
        place, _, value = text.rpartition("=")
        with contextlib.suppress(ValueError):
            found[place] = {"true": True, "false": False}.get(value.lower()) if value.isalpha() else json.loads(value)
        _check(place, found.get(place), f"--assume is {text!r}")
    return found


def check(values: Mapping[str, bool | float]) -> None:
    """Refuse assumptions whose place or value has another form."""
    for place, value in values.items():
        _check(place, value, f"assume has {place!r}: {shown(value)}")


def _check(place: str, value: Any, found: str) -> None:
    if not re.fullmatch(r".+:\d+", place) or not isinstance(value, bool | int | float):
        raise ConfigError(found, expected="a file, a line and a value: a number, true or false, as in train.py:30=12")


def check_used(values: Mapping[str, bool | float], sentences: Iterable[str]) -> None:
    """Refuse an assumption that no plan has used; `sentences` are the assumptions that plans list.

    Raises:
        ConfigError: names it.
    """
    places = [place for place, phrase, _ in (each.partition(_PHRASE) for each in sentences) if phrase]
    for key, value in values.items():
        if not any(_is_at(key, place) for place in places):
            raise ConfigError(
                f"{key} is assumed to be {value}, and no step asks for the value of a tensor there",
                expected="a line that a plan names", do="plan without that assumption",
            )  # fmt: skip
