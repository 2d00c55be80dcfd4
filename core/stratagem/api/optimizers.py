"""What kind of step an optimizer makes."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `optimizer` evaluates the model itself (LBFGS): its step cannot be called without a closure."""
    step = inspect.signature(type(optimizer).step).parameters.get("closure")
    return step is not None and step.default is inspect.Parameter.empty
