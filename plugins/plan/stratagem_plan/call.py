"""`Trainer.plan` and `Run.plan`: plan what an object of this program trains, as `stratagem plan` does with a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import fields

from stratagem.api.options import changes
from stratagem.errors import ConfigError
from stratagem_plan.assumptions import check
from stratagem_plan.backend import NAME
from stratagem_plan.devices import check_counts, find
from stratagem_plan.script import PlannedScript
from stratagem_plan.variants import Variant, plan_ranks


def plan_call(
    settings: Any, train: Callable[[], object], name: str, *, devices: int = 1, nodes: int = 1,
    device: str = "h100-sxm-80gb", device_file: str | Path | None = None,
    assume: Mapping[str, bool | float] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the plan of what `train` trains, as `stratagem plan --json` writes it; this process stays as it is.

    Args:
        settings: of a Trainer or a Run; in the processes that plan, which are forked, they become those of the plan.
        train: builds a run from them, and trains with it.
        name: stands for the script.
        devices: of a node.
        assume: values of tensors by the place that asks for them, such as ``{"train.py:30": 12}``.

    Raises:
        ConfigError: the device is unknown, the run refuses the plan's world, it cannot be planned, or this process
            is a plan itself.
    """
    if hasattr(torch, NAME):
        raise ConfigError(
            "the script that is planned calls `plan` itself", expected="a script that trains",
            do="plan it without that call",
        )  # fmt: skip
    check_counts("", devices=devices, nodes=nodes)
    limit = find(device, None if device_file is None else Path(device_file)).memory_bytes
    check(assume or {})

    def begin() -> None:
        torch.set_num_threads(1)  # a pool of threads does not survive a fork: operations would wait for it forever
        _change(settings)
        train()

    script = PlannedScript(Path(name), (), devices, nodes, limit, train=begin, assume=assume or {})
    return plan_ranks(Variant(script=script, device=device))


def _change(settings: Any) -> None:
    """Change in `settings` what a plan changes in the arguments of a Trainer or Run that a script makes."""
    given = {each.name: getattr(settings, each.name) for each in fields(type(settings))}
    for change in changes:
        for name, value in change(type(settings), given).items():
            setattr(settings, name, value)
            settings.options.pop(name, None)  # they belong to what is replaced
