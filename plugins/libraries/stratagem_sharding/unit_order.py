"""Check that all ranks gather and reduce the same units in the same order."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError
from stratagem_process_group.comparison import are_equal
from stratagem_sharding.order import Order
from stratagem_sharding.param_groups import with_gradients
from stratagem_sharding.sharded_use import few
from stratagem_sharding.shards import orders

if TYPE_CHECKING:
    from stratagem.api import Collectives, RunContext

_END: tuple[Any, ...] = ("end",)


class UnitOrder(Order):
    """Which units a step gathers and which gradients it reduces, in order: the same on all ranks."""

    def __init__(self, run: RunContext, peers: Collectives) -> None:
        super().__init__(run, peers)
        #: The same on all ranks, as they wrap the same models in the same order.
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._names: list[str] = []
        #: By unit: the names of the parameters that its gradients are numbered by.
        self._parameters: dict[int, list[str]] = {}

    def add(self, root: nn.Module) -> None:
        """Number the units of `root`."""
        parts: Iterator[tuple[str, nn.Module]] = root.named_modules()
        for name, part in parts:
            if isinstance(part, FSDPModule) and part not in self._numbers:
                self._numbers[part] = len(self._names)
                self._names.append(name.removeprefix("module").removeprefix("."))

    def number(self, unit: nn.Module) -> int:
        """Return the number of `unit`; -1 if it is none."""
        return self._numbers.get(unit, -1)

    def watch_gradients(self, unit: nn.Module, group: Any) -> None:
        """Compare which parameters of `group` have gradients before it reduces them."""
        number = self._numbers[unit]
        names = {id(parameter): name for name, parameter in unit.named_parameters(self._names[number])}
        own = [names[id(each.sharded_param)].removeprefix("module.") for each in group.fsdp_params]
        self._parameters[number] = own
        reduce = type(group).post_backward

        def compare_and_reduce(*arguments: Any) -> None:
            if group.reduce_grads and (reached := with_gradients(group.fsdp_params)):
                self.next(("gradients", number, reached))
            reduce(group, *arguments)

        group.post_backward = compare_and_reduce

    @contextlib.contextmanager
    def compared(self, kind: Hashable, *, reads: bool = False) -> Iterator[None]:
        """Compare the events within, which are a step of this `kind`; within another step they are part of that.

        Args:
            reads: it is code of a user rather than a step, and has events only if it reads shards.
        """
        if self._open or self._is_alone:
            yield
            return
        self.begin(kind, scope=(_END,) if reads else None)
        orders.append(self)
        try:
            yield
            self.next(_END)
        finally:
            self._open = False
            orders.remove(self)
        self.end()

    def are_equal(self, values: object) -> bool:
        """Whether all ranks have the same `values`, which they ask at the same time. Collective."""
        self.next(("writes",))
        return self._is_alone or are_equal(torch.tensor(fingerprint(repr(values))), self._peers)

    def _error(self, found: Mapping[int, tuple[Any, ...]]) -> ConfigError:
        events = [event for _, _, _, *event in found.values()]
        reached = [set(self._reached(event)) for event in events]
        reached += [set()] * (self._peers.world_size - len(found))
        some: set[str] = set().union(*reached)
        differing = some - some.intersection(*reached)
        ranks = self._told(found, lambda event: self._describe(event, differing))
        if any(event[0] == "place" for event in events):
            return ConfigError(
                f"not all ranks read a sharded tensor: {ranks}",
                expected="all ranks to read it, since each has a part", do="read it on every rank, and print it on one",
            )  # fmt: skip
        return ConfigError(
            f"ranks use different layers in one step: {ranks}",
            expected="the same ones on every rank, in the same order: FSDP adds up what comes at the same place",
            do='add the others to the loss with a factor of zero, or choose strategy="ddp_find_unused_parameters_true"',
        )

    def _reached(self, event: Any) -> list[str]:
        if event[0] == "gradients":
            return [name for index, name in enumerate(self._parameters[event[1]]) if event[2] >> index & 1]
        return list(event[1:]) if event[0] == "scalars" else []

    def _describe(self, event: Any, differing: set[str]) -> str:
        if event is None:
            return f"has ended, or did not say within {self._limit_s:g} s what comes next"
        if event[0] == "place":
            return f"came to {event[1]}"
        if event[0] == "writes":
            return "came to the end of a step that has written into weights"
        if event[0] == "end":
            return "came to the end of the step or hook"
        if event[0] == "unit":
            name = self._names[event[1]]
            return f"came to {name!r}" if name else "came to the parameters outside of all units"
        names = [repr(name) for name in self._reached(event) if name in differing]
        return f"has gradients for {few(names)}" if names else f"has none for {few(sorted(map(repr, differing)))}"
