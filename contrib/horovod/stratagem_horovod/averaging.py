"""Average gradients with Horovod while backward runs.

[Note: names]
Horovod matches tensors of different ranks by name, and reduces one as soon as every rank has submitted it. So ranks may
compute gradients in different orders. What one rank never submits, the others would wait for: after backward all ranks
sum a flag for each parameter, and a rank that did not use a parameter which another one used submits zeros. What no
rank used is not sent, and keeps its gradient of None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from stratagem.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from stratagem.api.traffic import Traffic

#: Seconds between two looks at a reduction; Horovod's own wait would keep a core busy and delay signals.
_LOOK_S = 5e-5


@frozen(kw_only=True)
class Reduction:
    """How gradients are reduced."""

    op: str
    compress: bool
    predivide: float
    num_groups: int | None
    sparse_as_dense: bool
    overlap: bool


@define(eq=False)
class _Group:
    """Parameters whose gradients are reduced together."""

    name: str
    parameters: list[nn.Parameter]
    #: How many of them have no gradient of the running backward yet.
    missing: int = 0
    sent: bool = False


@define(eq=False)
class _Sent:
    handle: Any
    #: Parameter, its dense gradient with real numbers, and the tensor that was sent: the same memory where possible.
    parts: list[tuple[nn.Parameter, Tensor, Tensor]]


@define(eq=False)
class Averager:
    """Averages the gradients of the parameters of `module`."""

    hvd: Any
    module: nn.Module
    world_size: int
    reduction: Reduction
    traffic: Traffic

    _names: dict[nn.Parameter, str] = field(init=False, factory=dict)
    _hooks: dict[nn.Parameter, Any] = field(init=False, factory=dict)
    _groups: list[_Group] = field(init=False, factory=list)
    _group_of: dict[nn.Parameter, _Group] = field(init=False, factory=dict)
    #: Parameters whose gradients are sparse.
    _sparse: set[Tensor] = field(init=False, factory=set)
    #: Parameters with a gradient that was not reduced since it was added to.
    _unreduced: set[nn.Parameter] = field(init=False, factory=set)
    #: Those with a gradient of the running backward.
    _computed: set[nn.Parameter] = field(init=False, factory=set)
    _in_flight: list[_Sent] = field(init=False, factory=list)
    _running: bool = field(init=False, default=False)
    _sync: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        for name, layer in self.module.named_modules():
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
                if not self.reduction.sparse_as_dense:
                    raise ConfigError(
                        f"layer {name!r} has sparse gradients and strategy.horovod.sparse_as_dense is False",
                        expected="true, which sends them as dense tensors",
                        do="set it, or build the layer with sparse=False",
                    )  # fmt: skip
                self._sparse.add(layer.weight)
        self._observe()

    # --- One backward --------------------------------------------------------------------------------------------

    def begin(self, sync: bool) -> None:
        """Prepare for a backward; `sync` is False if its gradients are only accumulated."""
        self._observe()
        self._running, self._sync = True, sync
        self._computed.clear()
        for group in self._groups:
            group.missing, group.sent = len(group.parameters), False

    def finish(self) -> None:
        """Wait until all gradients are reduced. Collective, if gradients are not only accumulated."""
        self._running = False
        if not self._sync:
            return
        used = self._used()
        for group in self._groups:
            if not group.sent:
                self._send(group, [parameter for parameter in group.parameters if parameter in used])
        for sent in self._in_flight:
            with self._peers():
                self._wait(sent.handle)
            for parameter, gradient, wire in sent.parts:
                if wire is not gradient:
                    gradient.copy_(wire)
                if parameter in self._sparse:
                    parameter.grad = gradient.to_sparse(1)
        self._in_flight.clear()
        self._unreduced.clear()

    def abandon(self) -> None:
        """Forget a backward that failed."""
        self._running = False
        self._in_flight.clear()

    def close(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    # --- Parameters ----------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        """Add hooks to parameters that have none: a callback may have made them trainable."""
        new = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad and p not in self._hooks]
        for name, parameter in new:
            self._names[parameter] = name
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._on_gradient)
        if new:
            self._groups = self._grouped()
            self._group_of = {parameter: group for group in self._groups for parameter in group.parameters}

    def _grouped(self) -> list[_Group]:
        """Return groups of neighbours of one dtype; each parameter is one unless `num_groups` is set."""
        number = self.reduction.num_groups
        if number is None:
            return [_Group(f"gradient.{name}", [parameter]) for parameter, name in self._names.items()]
        size = -(-len(self._names) // number)
        groups: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for index, parameter in enumerate(self._names):
            groups.setdefault((index // size, parameter.dtype), []).append(parameter)
        return [_Group(f"gradients.{self._names[parameters[0]]}", parameters) for parameters in groups.values()]

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._running:
            return
        self._unreduced.add(parameter)
        group = self._group_of[parameter]
        if parameter in self._computed:
            if group.sent:
                raise ConfigError(
                    f"parameter {self._names[parameter]!r} got a second gradient within one backward, after the first "
                    "was sent", expected="one, as without a `backward` that differentiates twice and with "
                    "use_reentrant=False in activation checkpointing", do="set strategy.horovod.overlap to False",
                )  # fmt: skip
            return
        self._computed.add(parameter)
        group.missing -= 1
        if self._sync and self.reduction.overlap and group.missing == 0:
            self._send(group, group.parameters)

    def _used(self) -> set[nn.Parameter]:
        """Return the parameters that have a gradient to reduce on some rank. Collective; see [Note: names]."""
        names = list(self._names)
        local = [p.grad is not None and p in self._unreduced for p in names]
        flags = torch.tensor(local, dtype=torch.int32)
        with self._peers():
            self._wait(self.hvd.allreduce_async_(flags, name="stratagem.used", op=self.hvd.Sum))
        return {parameter for parameter, count in zip(names, flags.tolist(), strict=True) if count}

    # --- Messages ------------------------------------------------------------------------------------------------

    def _send(self, group: _Group, parameters: list[nn.Parameter]) -> None:
        """Start to reduce the gradients of those `parameters` of `group`, the same ones on all ranks."""
        group.sent = True
        if not parameters:
            return
        parts = [self._part(parameter) for parameter in parameters]
        wires = [wire for *_, wire in parts]
        self.traffic.add("all_reduce", sum(wire.nbytes for wire in wires), self.world_size, sender="gradients")
        options: dict[str, Any] = {"op": self.hvd.Sum}
        if self.reduction.op == "average":
            factor = self.reduction.predivide
            options = {"op": self.hvd.Average, "prescale_factor": 1 / factor, "postscale_factor": factor}
        name = group.name
        if len(parameters) < len(group.parameters):  # Horovod remembers the shapes of a name
            chosen = {id(parameter) for parameter in parameters}
            name += "".join(f"+{index}" for index, each in enumerate(group.parameters) if id(each) in chosen)
        with self._peers():
            if self.reduction.num_groups is None:
                handle = self.hvd.allreduce_async_(wires[0], name=name, **options)
            else:
                handle = self.hvd.grouped_allreduce_async_(wires, name=name, **options)
        self._in_flight.append(_Sent(handle, parts))

    def _part(self, parameter: nn.Parameter) -> tuple[nn.Parameter, Tensor, Tensor]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        dtype = gradient.dtype
        if self.reduction.compress and dtype in (torch.float32, torch.float64):
            dtype = torch.float16
        elif dtype == torch.bfloat16:  # which Horovod does not have
            dtype = torch.float32
        wire = gradient.to(dtype).contiguous()
        return parameter, gradient, gradient if wire.data_ptr() == gradient.data_ptr() else wire

    def _wait(self, handle: Any) -> None:
        while not self.hvd.poll(handle):
            time.sleep(_LOOK_S)
        self.hvd.synchronize(handle)

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Raise a `PeerError` where Horovod ended, which it does on all ranks when one has left."""
        try:
            yield
        except self.hvd.HorovodInternalError as error:
            reason = " ".join(str(error).split())
            raise PeerError(
                f"Horovod could not reduce gradients ({reason[:200]})",
                do="look for the error of the rank that ended first, and in the kernel log for an out-of-memory kill",
            ) from error
