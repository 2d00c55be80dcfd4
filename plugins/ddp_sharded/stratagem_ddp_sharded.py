"""Data parallelism with gradients and optimizer state partitioned over the ranks (ZeRO, stage 2).

[Note: buckets during backward]
Every rank must send the same messages in the same order, whichever parameters its loss reaches. All trained parameters
are grouped into buckets, in reverse order. While backward runs, a rank sends the next bucket as soon as all gradients
in it are ready. After backward it sends the other buckets, with zeros for parameters that its loss did not reach. Then
the ranks all-reduce a flag for each parameter, on the CPU: a parameter that no rank reached has no gradient, as in a
single process.

With manual optimization a loss may reach few of the parameters, and comm hooks must get only parameters that were
reached. In both cases the ranks all-reduce the flags first, after backward, and send only the gradients of parameters
that were reached.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from stratagem.api import GRADIENT_BUCKETS, Capabilities, Collectives, hookimpl
from stratagem.api.named_state import logical_optimizer_state, physical_optimizer_state
from stratagem.api.options import options
from stratagem.api.state_fit import taken_out
from stratagem.api.validators import more_than
from stratagem.checkpoint.tensor_memory import as_gathered
from stratagem_buckets.flat import averaged, flatten, grouped, reached, views
from stratagem_buckets.reducer import bucket_reducer, check_dense
from stratagem_process_group import USUAL, ProcessGroupStrategy, group_options_after
from stratagem_process_group.losses import check_reached
from stratagem_sharding.clipping import clip_norm, clip_values

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from stratagem.api import RunContext, World

#: Attribute of a gradient that is averaged over the ranks already. What is added to it later is not averaged yet.
_AVERAGED = "_stratagem_averaged"
#: Tensors of optimizer state with at most this many elements are sent with the outline of the state.
_SMALL = 64


@define(eq=False, kw_only=True, field_transformer=group_options_after("bucket_cap_mb"))
class ShardedDDPStrategy(ProcessGroupStrategy):
    """Partition the gradients and optimizer state over the ranks: each rank steps the parameters that it owns.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 2.
    """

    #: Size in megabytes of a bucket of gradients, or of parameters after a step; each bucket is one message. Larger
    #: buckets mean fewer messages, and more memory for buckets in flight.
    bucket_cap_mb: float = field(default=25.0, validator=more_than(0))

    #: All parameters of the model that was wrapped last.
    _parameters: list[nn.Parameter] = field(init=False, factory=list)
    #: Which rank owns a parameter.
    _owners: Any = field(init=False, factory=WeakTensorKeyDictionary)
    #: The bucket reducer, which applies the comm hooks; None without comm hooks.
    _reduce: Any = field(init=False, default=None)
    #: Sends buckets while backward runs; None if they are sent after it.
    _sender: Any = field(init=False, default=None)

    capabilities = Capabilities(provides=USUAL | {GRADIENT_BUCKETS})

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # attrs generates it

    @hookimpl
    def connect(self, world: World, run: RunContext) -> Collectives:
        return Collectives() if world.world_size == 1 else super().connect(world, run)

    @hookimpl
    def teardown(self, run: RunContext) -> None:
        self._stop_sending()
        super().teardown(run)

    @hookimpl
    def wrap_model(self, module: nn.Module, run: RunContext) -> nn.Module:
        assert run.module is not None, "set before wrap_model is called"
        module = module.to(run.device)
        run.collectives.replicate((*module.parameters(), *module.buffers()))
        self._divide(module, run.peers.world_size)
        self._reduce = bucket_reducer(run) if run.stage == "train" else None
        self._stop_sending()
        if run.stage == "train":
            check_dense(
                run.module, "strategy ddp_sharded sends", "sparse=False there", 'set it, or choose strategy="ddp"'
            )
            if self._reduce is None and not run.manual and run.peers.world_size > 1:
                self._sender = _Sender(run.peers, self.bucket_cap_mb * 1e6)
        return module

    def _stop_sending(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def _divide(self, module: nn.Module, world_size: int) -> None:
        """Assign each parameter to the rank that owns the fewest elements so far."""
        owned, self._parameters = [0] * world_size, list(module.parameters())
        for parameter in self._parameters:
            owner = owned.index(min(owned))
            self._owners[parameter] = owner
            owned[owner] += parameter.numel()

    def rank_classes(self, run: RunContext) -> Sequence[Sequence[int]]:
        """Return the ranks that own most, and the others, of which the first one owns most."""
        owned = [0] * run.world_size
        for parameter in self._parameters:
            owned[self._owners[parameter]] += parameter.numel()
        ranks = sorted(range(run.world_size), key=lambda rank: -owned[rank])
        most = owned.count(max(owned))
        return [ranks[:most], ranks[most:]] if most < len(ranks) else [ranks]

    # --- The step ------------------------------------------------------------------------------------------------

    @hookimpl
    def backward(self, loss: torch.Tensor, module: nn.Module, run: RunContext) -> bool:
        if not (run.manual or run.sync_gradients):
            run.differentiate(loss)
            return True
        parameters = [parameter for parameter in self._parameters if parameter.requires_grad]
        before = {}
        for parameter in parameters:  # do not average again what is averaged already
            gradient = parameter.grad
            if gradient is not None and getattr(gradient, _AVERAGED, False):
                before[parameter], parameter.grad = gradient, None
        if self._sender is None:
            run.differentiate(loss)
            here = [parameter.grad is not None for parameter in parameters]
            check_reached(any(here), run)
            used = reached(here, run.peers)
            self._average([p for p, some in zip(parameters, used, strict=True) if some], run)
        else:
            self._average_during(loss, parameters, run)
        for parameter, gradient in before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return True

    def _average_during(self, loss: torch.Tensor, parameters: list[nn.Parameter], run: RunContext) -> None:
        """Differentiate `loss`, and send buckets while backward runs; keep the averages for parameters of this rank."""
        sender = self._sender
        sender.begin(parameters)
        try:
            run.differentiate(loss)
            check_reached(sender.has_any, run)
            averages, used = sender.finish(lambda parameter: self._owners[parameter] == run.peers.rank)
            # A parameter may get a gradient after its bucket was sent, from another part of the graph.
            late = [parameter.grad is not None for parameter in parameters]
        finally:
            sender.end()
        flags = reached([*used, *late], run.peers)
        used, late = flags[: len(parameters)], flags[len(parameters) :]
        self._average([p for p, some in zip(parameters, late, strict=True) if some], run)
        for parameter, some in zip(parameters, used, strict=True):
            if some and (average := averages.get(parameter)) is not None:
                parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
                setattr(parameter.grad, _AVERAGED, True)

    def _average(self, parameters: list[nn.Parameter], run: RunContext) -> None:
        """Average the gradients of `parameters` over the ranks; keep those of parameters that this rank owns."""
        if not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:  # this rank's loss did not reach it, another's did
                parameter.grad = torch.zeros_like(parameter)
        groups = grouped(reversed(parameters), self.bucket_cap_mb * 1e6)
        futures = [
            averaged(flatten(p.grad for p in group), index, groups, group, run.peers, self._reduce)  # type: ignore[misc]
            for index, group in enumerate(groups)
        ]
        for group, future in zip(groups, futures, strict=True):
            for parameter, part in zip(group, views(future.wait(), group), strict=True):
                parameter.grad.copy_(part)  # type: ignore[union-attr]  # made above
        for parameter in parameters:
            if self._owners[parameter] == run.peers.rank:
                setattr(parameter.grad, _AVERAGED, True)
            else:
                parameter.grad = None

    @hookimpl
    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, max_norm: float | None, max_value: float | None, run: RunContext
    ) -> torch.Tensor | float:
        parameters = [parameter for parameter in _parameters_of(optimizer) if parameter.grad is not None]
        if max_value is not None:
            clip_values((p.grad for p in parameters), max_value)  # type: ignore[misc]  # chosen above
            return 0.0
        assert max_norm is not None, "one of the two limits is set"
        return clip_norm(parameters, max_norm, run.peers)

    @hookimpl(wrapper=True)
    def step_optimizers(self, optimizers: list[torch.optim.Optimizer], run: RunContext) -> Generator[None, bool, bool]:
        # Parameters that this rank does not own have no gradient: the optimizer skips them and keeps no state for them.
        stepped = yield
        if stepped:
            with run.peers.traffic.sent_by("parameters"):
                self._broadcast_parameters([each for some in optimizers for each in _parameters_of(some)], run)
        return stepped

    @hookimpl(wrapper=True)
    def wrap_optimizers(
        self, run: RunContext
    ) -> Generator[None, list[torch.optim.Optimizer], list[torch.optim.Optimizer]]:
        optimizers = yield
        for optimizer in optimizers:
            for name in ("train", "eval"):  # of a schedule-free optimizer: they change the weights that this rank owns
                if (method := getattr(optimizer, name, None)) is not None:
                    setattr(optimizer, name, self._then_broadcast(optimizer, run)(method))
        return optimizers

    @contextlib.contextmanager
    def _then_broadcast(self, optimizer: torch.optim.Optimizer, run: RunContext) -> Iterator[None]:
        yield
        with run.peers.traffic.sent_by("parameters"):
            self._broadcast_parameters(_parameters_of(optimizer), run)

    @torch.no_grad()
    def _broadcast_parameters(self, parameters: list[nn.Parameter], run: RunContext) -> None:
        """Broadcast each of `parameters` from its owner to all ranks, one message per bucket."""
        owned = defaultdict[int, list[nn.Parameter]](list)
        for parameter in parameters:
            owned[self._owners[parameter]].append(parameter)
        peers = run.peers.unchecked
        for owner, theirs in sorted(owned.items()):
            for group in grouped(reversed(theirs), self.bucket_cap_mb * 1e6):
                if len(group) == 1:
                    peers.broadcast(group[0].data, owner)
                    continue
                values = [parameter.data for parameter in group]
                message = peers.broadcast(flatten(values), owner)
                if run.peers.rank != owner:
                    torch._foreach_copy_(values, list(views(message, group)))

    # --- State ---------------------------------------------------------------------------------------------------

    @hookimpl
    def optimizer_state(self, optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext) -> dict[str, Any]:
        logical = logical_optimizer_state(optimizer, module)
        others, state = self._owned_by_others(module, run), {}
        # Adagrad creates its state in its constructor, also for parameters that another rank steps.
        mine = {name: entry for name, entry in logical["state"].items() if name not in others}
        # One tensor at a time, so that no rank holds more of the other ranks' state than it needs.
        for owner, theirs in enumerate(run.peers.all_gather_object(_outline(mine))):
            for name, entry in theirs.items():
                state[name] = {
                    key: self._fetch(mine.get(name, {}).get(key), value, owner, run)
                    if isinstance(value, _Shape)
                    else value
                    for key, value in entry.items()
                }
        order = [name for group in logical["param_groups"] for name in group["params"] if name in state]
        return logical | {"state": {name: state[name] for name in order}}

    def _owned_by_others(self, module: nn.Module, run: RunContext) -> set[str]:
        """Return the names of the parameters that another rank steps."""
        here = run.peers.rank
        return {name for name, parameter in module.named_parameters() if self._owners.get(parameter, here) != here}

    def _fetch(self, mine: torch.Tensor | None, shape: _Shape, owner: int, run: RunContext) -> torch.Tensor:
        """Return the owner's tensor on ranks that need its values, a meta tensor on the others. Collective."""
        absent = torch.empty(shape.size, dtype=shape.dtype, device="meta")
        if not run.whole_state:
            return absent if mine is None else mine
        tensor = torch.empty(shape.size, dtype=shape.dtype, device=run.device) if mine is None else mine
        tensor = run.peers.broadcast(tensor.contiguous(), owner)
        # On the CPU: all of them may not fit into the device's memory.
        return as_gathered(tensor.cpu(), mine) if run.needs_values else absent

    @hookimpl
    def load_optimizer_state(
        self, state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module, run: RunContext
    ) -> bool:
        others = self._owned_by_others(module, run)
        mine = {name: entry for name, entry in taken_out(state["state"]) if name not in others}
        optimizer.load_state_dict(physical_optimizer_state(state | {"state": mine}, optimizer, module))
        return True


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@frozen
class _Shape:
    """The shape and dtype of a tensor that only its owner has."""

    size: tuple[int, ...]
    dtype: torch.dtype


def _outline(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with large tensors replaced by their shapes."""
    return {
        name: {
            key: _Shape(tuple(value.shape), value.dtype)
            if isinstance(value, torch.Tensor) and value.numel() > _SMALL
            else value
            for key, value in entry.items()
        }
        for name, entry in state.items()
    }


class _Sender:
    """Sends gradients in buckets while backward computes them; see [Note: buckets during backward]."""

    def __init__(self, peers: Collectives, limit: float) -> None:
        self._peers, self._limit = peers, limit
        self._ids: list[int] = []
        self._groups: list[list[nn.Parameter]] = []
        self._handles: list[Any] = []
        #: Number of missing gradients in each bucket; None if the gradients of this backward are not to be sent.
        self._missing: list[int] | None = None
        self._arrived: set[nn.Parameter] = set()
        self._sent: list[Any] = []

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Send the gradients of `parameters` that the next backward computes, while it runs."""
        if [id(parameter) for parameter in parameters] != self._ids:
            self._form_buckets(parameters)
        self._missing, self._arrived, self._sent = [len(group) for group in self._groups], set(), []

    def _form_buckets(self, parameters: list[nn.Parameter]) -> None:
        self.close()
        self._ids = [id(parameter) for parameter in parameters]
        self._groups = grouped(reversed(parameters), self._limit)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, index))
            for index, group in enumerate(self._groups)
            for parameter in group
        ]

    def _on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        missing = self._missing
        if missing is None or parameter in self._arrived:
            return
        self._arrived.add(parameter)
        missing[index] -= 1
        while len(self._sent) < len(missing) and not missing[len(self._sent)]:
            self._send()

    @property
    def has_any(self) -> bool:
        """Whether a gradient has come since `begin`."""
        return bool(self._arrived)

    def _send(self) -> None:
        """Send the next bucket, and drop the gradients that it now contains."""
        group = self._groups[len(self._sent)]
        self._arrived.update(parameter for parameter in group if parameter.grad is not None)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in group]
        for parameter in group:
            parameter.grad = None
        with self._peers.traffic.sent_by("gradients"):
            self._sent.append(self._peers.average_async(flatten(gradients)))

    def finish(self, wanted: Callable[[nn.Parameter], bool]) -> tuple[dict[nn.Parameter, torch.Tensor], list[bool]]:
        """Send the other buckets; return the averages that are `wanted`, and which parameters had a gradient here, in
        the order of `begin`.
        """
        while len(self._sent) < len(self._groups):
            self._send()
        averages = {}
        for index, group in enumerate(self._groups):
            future, self._sent[index] = self._sent[index], None  # frees the bucket as soon as its parts are copied
            for parameter, part in zip(group, views(future.wait(), group), strict=True):
                if wanted(parameter):
                    averages[parameter] = torch.empty_like(parameter).copy_(part)
        arrived = {id(parameter) for parameter in self._arrived}
        return averages, [number in arrived for number in self._ids]

    def end(self) -> None:
        """Send no gradients until the next `begin`."""
        self._missing, self._arrived, self._sent = None, set(), []

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._ids = [], []
