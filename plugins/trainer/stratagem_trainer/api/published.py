"""Metrics that were published: exact for what decides and writes, float32 tensors for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def as_shown(value: Any) -> Any:
    """Return a metric as users read it, a float32 tensor without dimensions; None of None, a dictionary of several."""
    if isinstance(value, dict):
        return {name: as_shown(each) for name, each in value.items()}
    return None if value is None else torch.as_tensor(value).detach().reshape(()).float()


def shown(attribute: str, doc: str) -> property:
    """Return a property, described by `doc`: what is in `attribute`, as users read it."""
    return property(lambda owner: as_shown(getattr(owner, attribute)), doc=doc)


def bar_values(trainer: Any) -> dict[str, Any]:
    """Return `trainer.progress_bar_metrics` as they were logged, on their device."""
    values: dict[str, Any] = trainer._bar_values
    return values


class Published:
    """Metrics by name. What is published in each step costs a step nothing: tensors are made when users read them."""

    def __init__(self) -> None:
        #: What a progress bar shows beside the loss and the values of this step.
        self.bar: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}
        #: By name: what is shown, and what it was made of.
        self._made: dict[str, tuple[Any, Any]] = {}

    def update(self, values: Mapping[str, Any]) -> None:
        """Publish `values`: numbers, or tensors with one element."""
        self._new.update(values)

    @property
    def shown(self) -> dict[str, Any]:
        """The metrics as tensors, in a dictionary that users may change."""
        for name, value in self._new.items():
            self._shown[name] = shown = as_shown(value)
            self._made[name] = shown, value
        self._new = {}
        return self._shown

    @property
    def exact(self) -> dict[str, Any]:
        """The metrics as they were published; what users changed, as it is now."""
        made = {name: self._made.get(name, (None, None)) for name in self.shown}
        return {name: made[name][1] if made[name][0] is value else value for name, value in self._shown.items()}
