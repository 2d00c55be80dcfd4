"""Stage 3: check that all ranks compute the same layers in the same order, and name a rank that does not.

[Note: the trace]
Stage 3 gathers a layer's parameters on all ranks at once, so all ranks must compute the same layers in the same order.
The *trace* of a step is that order: the forward and backward of each layer, the gradient of each parameter. The ranks
keep a tree of all earlier traces, which is equal on all ranks, so that each rank knows what the others expect:

* The tree has one next node, and this rank reaches it: nothing is sent. This is every step of an ordinary model but the
  first, and costs about a microsecond a layer.
* The tree has no or several next nodes: the ranks compare theirs with an all-reduce over a separate group.
* The tree has one next node, and this rank reaches another: the other ranks may not communicate current. It writes its
  *divergence* to the store, and waits until the others have written the same, or one of them reports another node. A
  thread of each rank that makes no progress for `PATIENCE_S` reads the store: the rank may wait in a collective for the
  diverging one.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.distributed.comparison import fingerprint
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Seconds without progress after which a rank reads the store for a divergence.
PATIENCE_S = 1.0
_POLL_S = 0.02
#: Number of nodes at which the tree is cleared, since a model with a new trace in each step would fill the memory.
_MAX_NODES = 100_000
#: Number of past nodes that a rank can name.
_MAX_PAST_NODES = 10_000

_numbers = itertools.count()


class _Node:
    """A node of the tree of traces."""

    __slots__ = ("next", "only", "ways")

    def __init__(self) -> None:
        self.ways: dict[str, _Node] = {}
        #: The only next node, and its name; None if there are several.
        self.only: str | None = None
        self.next: _Node | None = None

    def add(self, what: str) -> _Node:
        node = self.ways[what] = _Node()
        self.only, self.next = (what, node) if len(self.ways) == 1 else (None, None)
        return node


class LayerTrace:
    """The trace that all ranks share; see [Note: the trace]. Made on all ranks at the same time."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._prefix = run, f"deepspeed/trace/{next(_numbers)}"
        self._group = run.collectives.new_group()
        self._store: Any = None
        self._stopped = threading.Event()
        self._roots: dict[str, _Node] = {}
        self._current = _Node()
        self._size = 0
        #: Number of nodes of this rank so far; that of the last node at which all ranks agreed.
        self._count, self._agreed_at = 0, 0
        self._past: collections.deque[str] = collections.deque(maxlen=_MAX_PAST_NODES)
        #: The error that was raised; nothing is gathered after it.
        self.error: ConfigError | None = None

    def watch(self) -> None:
        """Start the thread that reads the store while this rank makes no progress."""
        threading.Thread(target=self._watch, daemon=True, name="stratagem-trace").start()

    def _watch(self) -> None:
        store, before = None, -1
        while not self._stopped.wait(PATIENCE_S):
            if self._count == before:
                with contextlib.suppress(Exception):  # the store may be closed
                    store = store or self._run.collectives.key_value_store()
                    self._report_disagreement(store)
            before = self._count

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def begin(self, step: str) -> None:
        """Begin the trace of a step of the module. All ranks run the same steps."""
        self._count += 1
        self._past.append(step)
        if self._size > _MAX_NODES:
            self._roots, self._size = {}, 0
        self._current = self._roots.get(step) or self._roots.setdefault(step, _Node())

    def visit(self, what: str) -> None:
        """Advance to the node `what`, as every other rank must.

        Raises:
            ConfigError: another rank reaches another node; on all ranks.
        """
        current = self._current
        self._count += 1
        self._past.append(what)
        if current.only == what:
            self._current = current.next  # type: ignore[assignment]
            return
        if current.only is None:
            self._compare(what)
        else:
            self._diverge(what)
        self._current = current.ways.get(what) or self._added(current, what)

    def _added(self, current: _Node, what: str) -> _Node:
        self._size += 1
        return current.add(what)

    # --- Where all ranks communicate ---------------------------------------------------------------------------

    def _compare(self, what: str) -> None:
        """Check with an all-reduce that all ranks reach `what`. Collective."""
        import torch.distributed as dist

        mine = fingerprint(what)
        extremes = torch.tensor([mine, -mine])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group.group, async_op=True)
        while not _is_done(work):
            self._write(what)
            self._check_others()
        try:
            work.wait()
        except RuntimeError:
            self._check_others()  # a rank that reached another node may have closed the connection
            raise
        self._agreed_at = self._count
        if extremes[0] != -extremes[1]:
            raise self._disagreement(dict(enumerate(self._group.all_gather_object(what))))

    # --- Where other ranks may not communicate -----------------------------------------------------------------

    def _diverge(self, what: str) -> None:
        """Advance to a new node, if all ranks do. Collective, through the store."""
        self._write(what)
        deadline = time.monotonic() + self._run.stack.timeouts().collective.total_seconds()
        others = set(range(self._run.world_size)) - {self._run.rank}
        while others:
            for rank in sorted(others):
                where = self._store_of_run().get(f"{self._prefix}/left/{self._count}/{rank}")
                if where is not None and where != what:
                    raise self._disagreement({self._run.rank: what, rank: where})
                others -= set() if where is None else {rank}
            self._check_others()
            if others and time.monotonic() > deadline:
                raise self._disagreement({self._run.rank: what, min(others): "none that it has reported"})
            if others:
                time.sleep(_POLL_S)
        self._agreed_at = self._count

    def _check_others(self) -> None:
        stayed = self._store_of_run().get(f"{self._prefix}/stayed/{self._count}")
        if stayed is not None:
            rank, what = json.loads(stayed)
            raise self._disagreement({self._run.rank: self._past[-1], rank: what})

    def _write(self, what: str) -> None:
        store = self._store_of_run()
        store.put(f"{self._prefix}/left/{self._count}/{self._run.rank}", what)
        store.put(f"{self._prefix}/left", json.dumps([self._count, self._run.rank, what]))

    def _report_disagreement(self, store: Any) -> None:
        """If another rank diverges at a node that this one has passed, write which node this one reached there."""
        left = store.get(f"{self._prefix}/left")
        if left is None:
            return
        count, rank, what = json.loads(left)
        if rank == self._run.rank or not self._agreed_at < count <= self._count:
            return
        back = self._count - count
        mine = self._past[-1 - back] if back < len(self._past) else "a layer of an earlier step"
        if mine != what:  # otherwise this rank waits at the same node
            store.put(f"{self._prefix}/stayed/{count}", json.dumps([self._run.rank, mine]))

    def _store_of_run(self) -> Any:
        if self._store is None:
            self._store = self._run.collectives.key_value_store()
        return self._store

    def _disagreement(self, where: Mapping[int, str]) -> ConfigError:
        """Return the error that names the layer of each rank."""
        groups: dict[str, list[int]] = {}
        for rank, what in sorted(where.items()):
            groups.setdefault(what, []).append(rank)
        reached = ", ".join(f"{_names(ranks)} reached {what}" for what, ranks in groups.items())
        self.error = ConfigError(
            f"ranks went through different layers: {reached}, and stage 3 gathers each layer on all ranks at once",
            expected="the same layers in the same order on every rank",
            do="use the layer on every rank, multiplied by zero where it is not needed, or set "
            'strategy="ddp_find_unused_parameters_true"',
        )
        return self.error


def _is_done(work: Any) -> bool:
    """Wait for `PATIENCE_S`; return whether `work` is done, or has failed."""
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=PATIENCE_S))
    return bool(work.is_completed())


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


class EngineTrace:
    """Reports an engine's layers and gradients to a `LayerTrace`."""

    def __init__(self, trace: LayerTrace, engine: Any, user: nn.Module) -> None:
        self.trace, self._offload = trace, getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        names = {id(part): name or type(part).__name__ for name, part in user.named_modules()}
        self._layers = {
            id(part): tuple(f"the {way} of {names.get(id(part), type(part).__name__)!r}" for way in _WAYS)
            for part in engine.module.modules()
        }
        self._gradients = {id(each): f"the gradient of {name!r}" for name, each in user.named_parameters()}
        for number, way in enumerate(_WAYS):
            self._replace(self._offload, f"pre_sub_module_{way}_function", self._layers_first(number))
        if self._offload is not engine.optimizer:
            self._replace(engine.optimizer, "reduce_ready_partitions_and_remove_grads", self._gradient_first)
            self._replace(engine, "_backward_epilogue", self._end_of_backward_first)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        owner.__dict__[name] = make(getattr(owner, name))

    def _layers_first(self, number: int) -> Callable[[Any], Any]:
        visit, layers = self.trace.visit, self._layers

        def make(fetch: Any) -> Any:
            def visit_and_fetch(layer: nn.Module) -> None:
                ways = layers.get(id(layer))
                visit(ways[number] if ways is not None else f"the {_WAYS[number]} of {type(layer).__name__!r}")
                fetch(layer)

            return visit_and_fetch

        return make

    def _gradient_first(self, reduce: Any) -> Any:
        visit, gradients = self.trace.visit, self._gradients

        def visit_and_reduce(parameter: Any) -> None:
            visit(gradients.get(id(parameter), "the gradient of a parameter without a name"))
            reduce(parameter)

        return visit_and_reduce

    def _end_of_backward_first(self, finish: Any) -> Any:
        def visit_and_finish() -> None:
            self.trace.visit("the end of backward")
            finish()

        return visit_and_finish

    def stop(self) -> None:
        """Stop the thread."""
        self.trace.stop()
        if self.trace.error is not None:
            self._abandon_gathers()

    def _abandon_gathers(self) -> None:
        """Abandon pending gathers, which other ranks do not join; the parameters are partitioned as before."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        registry = getattr(self._offload.module, "ds_inflight_param_registry", None)
        if registry is not None:
            registry.data.clear()
        for parameter in self._offload.module.parameters():
            if getattr(parameter, "ds_status", None) is ZeroParamStatus.INFLIGHT:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


_WAYS = ("forward", "backward")
