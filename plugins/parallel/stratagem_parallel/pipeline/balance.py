"""Cut a list of layers into stages: by a list of numbers, by size or by measured time."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError, nearest, shown

if TYPE_CHECKING:
    from stratagem.api import Collectives

#: Values of the option `balance` that are not lists.
RULES = ("balance_by_size", "balance_by_time")
_REPEATS = 3


def check_balance(value: Any) -> None:
    """Check the option `balance`.

    Raises:
        ConfigError: it is neither a list of numbers from 1 nor a rule.
    """
    numbers = isinstance(value, list | tuple) and value and all(type(each) is int and each >= 1 for each in value)
    if not numbers and value not in RULES:
        raise ConfigError(
            f"strategy.parallel.balance is {shown(value)}",
            expected="how many layers each stage has, such as [3, 2], or " + " or ".join(map(repr, RULES)),
            do=nearest(value, list(RULES)) if isinstance(value, str) else "",
        )


def check_split_points(value: Any) -> None:
    """Check the option `split_points`.

    Raises:
        ConfigError: it is not a list of names.
    """
    if value is not None and not (isinstance(value, list) and value and all(isinstance(each, str) for each in value)):
        raise ConfigError(f"strategy.parallel.split_points is {shown(value)}", expected="a list of names of modules")


def sizes_of_stages(
    balance: Any, layers: Sequence[nn.Module], stages: int, example: Any, among: Collectives,
    device: torch.device | None = None,
) -> list[int]:  # fmt: skip
    """Return how many of `layers` each stage has. Collective under "balance_by_time".

    Args:
        balance: the option.
        layers: of the pipelined module, in order.
        stages: their number, if `balance` does not give it.
        example: inputs of the first layer, to measure the time of each; None if there are none.
        among: the ranks of the pipeline, of which the first measures.
        device: to measure on; by default the CPU.

    Raises:
        ConfigError: there are fewer layers than stages, or the numbers do not add up.
    """
    if len(layers) < stages:
        raise ConfigError(
            f"strategy.parallel has {stages} stages of a pipeline and the model {len(layers)} layers",
            expected="at least one layer for each stage",
            do="choose fewer processes for pipeline, another schedule, or smaller layers",
        )
    if not isinstance(balance, str):
        if sum(balance) != len(layers):
            raise ConfigError(
                f"strategy.parallel.balance is {list(balance)}, for {sum(balance)} layers, and the model has "
                f"{len(layers)}",
                expected=f"numbers with the sum {len(layers)}",
            )
        return list(balance)
    if balance == "balance_by_size":
        return cut_evenly(_sizes(layers), stages)
    return cut_evenly(_times(layers, example, among, device or torch.device("cpu")), stages)


def cut_evenly(costs: Sequence[float], parts: int) -> list[int]:
    """Return the lengths of `parts` consecutive parts of `costs` whose largest sum is as small as possible.

    Of several such cuts, the one with the smallest sum of squares.
    """
    sums = [0.0, *itertools.accumulate(costs)]

    @functools.cache
    def best(number: int, end: int) -> tuple[float, float, tuple[int, ...]]:
        """Return the largest sum, the sum of squares, and the lengths of `number` parts of the first `end` costs."""
        if number == 0:
            return (0.0, 0.0, ()) if end == 0 else (math.inf, math.inf, ())
        found = ((sums[end] - sums[start], end - start, best(number - 1, start)) for start in range(number - 1, end))
        return min(
            (max(sum_, most), squares + sum_**2, (*before, length)) for sum_, length, (most, squares, before) in found
        )

    return list(best(parts, len(costs))[2])


def _sizes(layers: Sequence[nn.Module]) -> list[float]:
    """Return the bytes of parameters of each layer; one that is used twice counts where it is first."""
    seen: set[nn.Parameter] = set()
    found = []
    for layer in layers:
        new = set(layer.parameters()) - seen
        seen |= new
        found.append(float(sum(each.nbytes for each in new)))
    return found


def _times(
    layers: Sequence[nn.Module], example: Any, among: Collectives, device: torch.device
) -> list[float]:  # fmt: skip
    """Return how long forward and backward of each layer took on the first rank, on all ranks. Collective."""
    found: Any = None
    if among.rank == 0:
        try:
            with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
                found = _measured(layers, example, device)
        except Exception as error:  # noqa: BLE001 - told to all ranks
            found = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
    found = among.broadcast_object(found)
    if isinstance(found, str):
        raise ConfigError(
            f"strategy.parallel.balance is 'balance_by_time', and the layers cannot be measured ({found})",
            expected="layers with values, and inputs for them",
            do="set example_input_array of the module to a micro-batch, or use 'balance_by_size'",
        )
    return list(found)


def _measured(layers: Sequence[nn.Module], example: Any, device: torch.device) -> list[float]:
    """Return the shortest of some times of each layer, in seconds; a copy of it is measured."""
    if example is None:
        raise ConfigError("the module has no example_input_array")
    times = []
    value = example[0] if isinstance(example, tuple | list) else example
    for layer in layers:
        copied, value = copy.deepcopy(layer).to(device), value.detach().to(device)
        found = [_once(copied, value.requires_grad_(value.is_floating_point()), device) for _ in range(1 + _REPEATS)]
        times.append(min(seconds for seconds, _ in found[1:]))  # the first warms up
        value = found[0][1]
    return times


def _once(layer: nn.Module, value: torch.Tensor, device: torch.device) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    with torch.enable_grad():
        out = layer(value)
        if out.requires_grad:
            out.sum().backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start, out
