"""Read and check a plan file: what one step of each class of ranks computes, sends and holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import cattrs
from attrs import Factory, field, frozen, validators

from stratagem.errors import ConfigError
from stratagem_plan.devices import reasons

SCHEMA = 1
#: What a work item of each kind has of its own.
_TELLS = {"matmul": "m, n or k", "attention": "flops", "vector": "bytes"}
_positive = validators.ge(1)

Phase = Literal["forward", "backward", "optimizer"]


@frozen(kw_only=True)
class Work:
    """A computation that a step repeats `count` times."""

    phase: Phase
    kind: Literal["matmul", "attention", "vector"]
    dtype: str
    count: float = field(validator=validators.gt(0))
    #: Of a multiplication of (batch, m, k) and (batch, k, n).
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = field(default=1, validator=_positive)
    #: Of one call of attention.
    flops: float | None = None
    #: Read and written by one call of an elementwise operation.
    bytes: float | None = None
    op: str = ""

    def __attrs_post_init__(self) -> None:
        told = {"matmul": min(self.sizes), "attention": self.flops, "vector": self.bytes}[self.kind]
        if told is None or (self.kind == "matmul" and told < 1):
            raise ValueError(f"work of kind {self.kind} has no {_TELLS[self.kind]}")

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return m, n and k of a multiplication."""
        return self.m, self.n, self.k

    @property
    def flops_of_one(self) -> float:
        """FLOPs of one call; elementwise operations count 0."""
        return 2.0 * self.batch * math.prod(self.sizes) if self.kind == "matmul" else self.flops or 0.0

    @property
    def bytes_of_one(self) -> float:
        """Bytes that one call reads and writes; attention's are not known."""
        if self.kind != "matmul":
            return self.bytes or 0.0
        m, n, k = self.sizes
        return float((4 if self.dtype in ("float32", "tf32") else 2) * self.batch * (m * k + k * n + m * n))


@frozen(kw_only=True)
class Collective:
    """A collective, or a message to another rank, that a step repeats `calls` times."""

    phase: Phase
    op: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "send", "all_to_all"]
    axis: str
    ranks: int = field(validator=_positive)
    within_node: bool
    #: Bytes of one call: of an all-gather's whole result, of a reduce-scatter's whole input.
    payload: float
    calls: float = field(validator=validators.gt(0))


def totals(messages: Iterable[Collective]) -> dict[tuple[str, str, str, str, int], tuple[float, float]]:
    """Return calls and bytes of what has the same phase, collective, axis, link and number of ranks."""
    found: dict[tuple[str, str, str, str, int], tuple[float, float]] = {}
    for each in messages:
        key = (each.phase, each.op, each.axis, "node" if each.within_node else "network", each.ranks)
        calls, num_bytes = found.get(key, (0.0, 0.0))
        found[key] = calls + each.calls, num_bytes + each.calls * each.payload
    return found


@frozen(kw_only=True)
class Bubble:
    """A pipeline's schedule."""

    stages: int = field(validator=_positive)
    microbatches: int = field(validator=_positive)
    interleave: int = field(default=1, validator=_positive)


@frozen(kw_only=True)
class RankClass:
    """Ranks that do the same."""

    rank: int
    ranks: int
    work: list[Work] = field(validator=validators.min_len(1))
    collectives: list[Collective] = Factory(list)
    bubble: Bubble | None = None
    #: Bytes of a device at the peak and at the end of the step, and what has them; 0 and empty if nothing counted them.
    peak: float = 0.0
    #: The memory that the planned device had to have, and how often torch's allocator gives back what it keeps.
    needs: float = 0.0
    returns: int = 0
    at_peak: dict[str, float] = Factory(dict)
    peak_phase: str = ""
    end: dict[str, float] = Factory(dict)


@frozen(kw_only=True)
class World:
    """The processes of the planned run."""

    devices_per_node: int = field(validator=_positive)
    nodes: int = field(validator=_positive)
    world_size: int = field(validator=_positive)


@frozen(kw_only=True)
class Inputs:
    """What one rank reads for one step of the optimizer; `tokens` is 0 if they are of another kind."""

    samples: int
    tokens: int = 0


@frozen(kw_only=True)
class Plan:
    """A plan file; keys that are not needed here are ignored."""

    script: str
    device: str
    world: World
    inputs: Inputs
    #: Ranks that read different samples.
    data_ranks: int = field(validator=_positive)
    accumulate: int = field(default=1, validator=_positive)
    classes: list[RankClass] = field(validator=validators.min_len(1))
    #: Names of the strategy, the precision and the communication hook; sizes of the axes, outermost first.
    stack: dict[str, str] = Factory(dict)
    mesh: dict[str, int] = Factory(dict)
    assumptions: list[str] = Factory(list)


def read_plan(path: Path) -> Plan:
    """Return the plan in the file at `path`.

    Raises:
        ConfigError: it cannot be read, has another schema, or a key is missing or wrong.
    """
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan file '{path}' cannot be read: {error}", expected="JSON", do=_AGAIN) from None
    found = tree.get("schema") if isinstance(tree, dict) else None
    if found != SCHEMA:
        raise ConfigError(f"plan file '{path}' has schema {found}", expected=str(SCHEMA), do=_AGAIN)
    return structure(tree, str(path))


_AGAIN = "write it again with `stratagem plan --json FILE` of this version"
_CONVERTER = cattrs.Converter()


def structure(tree: dict[str, Any], name: str) -> Plan:
    """Return the plan that `tree` describes; `name` is for messages."""
    try:
        return _CONVERTER.structure(tree, Plan)
    except cattrs.BaseValidationError as error:
        raise ConfigError(f"plan file '{name}' is broken: {reasons(error)}", do=_AGAIN) from None
