"""Check that a module has the methods that a call of the trainer needs."""

from __future__ import annotations

import inspect
from typing import Any

from stratagem.errors import ConfigError
from stratagem_trainer.module import Module, overrides
from stratagem_trainer.signatures import takes


def check_instance(model: Any, stage: str) -> None:
    """Refuse a class where a module is expected."""
    if isinstance(model, type):
        name = model.__name__
        raise ConfigError(f"{stage} got the class {name}", expected="a module", do=f"call the class: {name}(...)")


def require(model: Any, method: str, stage: str) -> None:
    """Refuse a module that does not define `method`."""
    if isinstance(model, Module) and not overrides(model, method):
        raise ConfigError(f"{type(model).__name__} has no {method}", expected=f"one, to {stage}", do="define it")


def check_signature(model: Any) -> None:
    """Refuse a training_step that takes more than a batch and its number."""
    step = getattr(model, "training_step", None)
    if step is None or takes(step, 1) or takes(step, 2):
        return
    from stratagem_trainer import lightning_names

    signature = inspect.signature(step)
    if lightning_names.ARGUMENTS.keys() & signature.parameters.keys():
        return  # `lightning_names.check` explains each of these
    raise ConfigError(
        f"{type(model).__name__}.training_step takes {signature}", expected="(batch, batch_idx) or (batch)",
        do="give the other parameters default values",
    )  # fmt: skip
