"""Stage 3: compare which layers the ranks pass through, and name a rank that leaves the others.

[Note: the trace]
Stage 3 gathers a layer's parameters on all ranks at once, so all ranks have to compute the same layers in the same
order. The *trace* of a step is that order: the forward and backward of each layer, the gradient of each parameter. The
ranks keep a tree of all traces that they have gone through together; the tree is the same on every rank, so each can
tell alone what the others know:

* The tree has one way on, and this rank takes it: nothing is sent. This is every step of an ordinary model but the
  first, and costs about a microsecond a layer.
* The tree ends here, or has several ways on: the ranks compare where they go, by a message over a group of their own.
* The tree has one way on, and this rank takes another: the others may send nothing. It writes to the store that it
  leaves, and waits until the others have left the same way, or one of them has written that it stays. A thread of a
  rank that has not gone on for `PATIENCE_S` looks there: that rank may wait in a collective for the one that left.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: How long a rank waits before it looks whether another one has left.
PATIENCE_S = 1.0
_POLL_S = 0.02
#: Positions that the tree may have; a model that goes another way in each step would fill the memory.
_MOST_POSITIONS = 100_000
#: How many positions of the past a rank can name.
_REMEMBERED = 10_000

_numbers = itertools.count()


class _Position:
    """A place in the tree of traces: where the ranks went from here."""

    __slots__ = ("next", "only", "ways")

    def __init__(self) -> None:
        self.ways: dict[str, _Position] = {}
        #: The only way on, and where it leads.
        self.only: str | None = None
        self.next: _Position | None = None

    def add(self, what: str) -> _Position:
        position = self.ways[what] = _Position()
        self.only, self.next = (what, position) if len(self.ways) == 1 else (None, None)
        return position


class SharedTrace:
    """What all ranks compute, in order; see [Note: the trace]. Made on all ranks at the same time."""

    def __init__(self, run: RunContext) -> None:
        self._run, self._prefix = run, f"deepspeed/trace/{next(_numbers)}"
        self._side = run.collectives.apart()
        self._board: Any = None
        self._stopped = threading.Event()
        self._roots: dict[str, _Position] = {}
        self._here = _Position()
        self._size = 0
        #: How often this rank has gone on; the last place at which ranks left together.
        self._count, self._settled = 0, 0
        self._passed: collections.deque[str] = collections.deque(maxlen=_REMEMBERED)
        #: Why the ranks are apart; nothing more is gathered.
        self.error: ConfigError | None = None

    def watch(self) -> None:
        """Have a thread look for ranks that leave, whenever this one does not go on."""
        threading.Thread(target=self._watch, daemon=True, name="stratagem-trace").start()

    def _watch(self) -> None:
        board, before = None, -1
        while not self._stopped.wait(PATIENCE_S):
            if self._count == before:
                with contextlib.suppress(Exception):  # the store may be gone
                    board = board or self._run.collectives.board()
                    self._tell_that_this_rank_stays(board)
            before = self._count

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()

    def begin(self, step: str) -> None:
        """Enter a step of the module: the next trace begins. The loops call the same steps on all ranks."""
        self._count += 1
        self._passed.append(step)
        if self._size > _MOST_POSITIONS:
            self._roots, self._size = {}, 0
        self._here = self._roots.get(step) or self._roots.setdefault(step, _Position())

    def visit(self, what: str) -> None:
        """Go on to `what`, which every other rank does now, too.

        Raises:
            ConfigError: another rank goes elsewhere; on all ranks.
        """
        here = self._here
        self._count += 1
        self._passed.append(what)
        if here.only == what:
            self._here = here.next  # type: ignore[assignment]
            return
        if here.only is None:
            self._compare(what)
        else:
            self._leave(what)
        self._here = here.ways.get(what) or self._grown(here, what)

    def _grown(self, here: _Position, what: str) -> _Position:
        self._size += 1
        return here.add(what)

    # --- Where the others may be asked -------------------------------------------------------------------------

    def _compare(self, what: str) -> None:
        """Make sure by a message that all ranks go on to `what`. Collective."""
        import torch.distributed as dist

        mine = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        extremes = torch.tensor([mine, -mine])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._side.group, async_op=True)
        while not _is_done(work):
            self._write(what)
            self._check_left_behind()
        try:
            work.wait()
        except RuntimeError:
            self._check_left_behind()  # then a rank that stayed may have closed the connection
            raise
        self._settled = self._count
        if extremes[0] != -extremes[1]:
            raise self._apart(dict(enumerate(self._side.all_gather_object(what))))

    # --- Where they may not ------------------------------------------------------------------------------------

    def _leave(self, what: str) -> None:
        """Go another way than ever before, if all ranks do. Collective, by way of the store."""
        self._write(what)
        deadline = time.monotonic() + self._run.join_timeout.total_seconds()
        others = set(range(self._run.world_size)) - {self._run.rank}
        while others:
            for rank in sorted(others):
                where = self._notes().get(f"{self._prefix}/left/{self._count}/{rank}")
                if where is not None and where != what:
                    raise self._apart({self._run.rank: what, rank: where})
                others -= set() if where is None else {rank}
            self._check_left_behind()
            if others and time.monotonic() > deadline:
                raise self._apart({self._run.rank: what, min(others): "none that this rank has heard of"})
            if others:
                time.sleep(_POLL_S)
        self._settled = self._count

    def _check_left_behind(self) -> None:
        stayed = self._notes().get(f"{self._prefix}/stayed/{self._count}")
        if stayed is not None:
            rank, what = json.loads(stayed)
            raise self._apart({self._run.rank: self._passed[-1], rank: what})

    def _write(self, what: str) -> None:
        notes = self._notes()
        notes.put(f"{self._prefix}/left/{self._count}/{self._run.rank}", what)
        notes.put(f"{self._prefix}/left", json.dumps([self._count, self._run.rank, what]))

    def _tell_that_this_rank_stays(self, notes: Any) -> None:
        """Write where this rank went, if another one has left the trace at a place that this one has passed."""
        left = notes.get(f"{self._prefix}/left")
        if left is None:
            return
        count, rank, what = json.loads(left)
        if rank == self._run.rank or not self._settled < count <= self._count:
            return
        back = self._count - count
        mine = self._passed[-1 - back] if back < len(self._passed) else "a layer of an earlier step"
        if mine != what:  # or it waits at the same place
            notes.put(f"{self._prefix}/stayed/{count}", json.dumps([self._run.rank, mine]))

    def _notes(self) -> Any:
        if self._board is None:
            self._board = self._run.collectives.board()
        return self._board

    def _apart(self, where: Mapping[int, str]) -> ConfigError:
        """Return the error that tells which ranks are where."""
        groups: dict[str, list[int]] = {}
        for rank, what in sorted(where.items()):
            groups.setdefault(what, []).append(rank)
        told = ", ".join(f"{_names(ranks)} reached {what}" for what, ranks in groups.items())
        self.error = ConfigError(
            f"ranks went through different layers: {told}, and stage 3 gathers each layer on all ranks at once",
            expected="the same layers in the same order on every rank",
            do="use the layer on every rank, multiplied by zero where it does not count, or choose "
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


class TraceOfEngine:
    """Has an engine's layers and gradients go through a `SharedTrace`."""

    def __init__(self, trace: SharedTrace, engine: Any, user: nn.Module) -> None:
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
        """Look no longer."""
        self.trace.stop()
        if self.trace.error is not None:
            self._abandon()

    def _abandon(self) -> None:
        """Let go of what is being gathered, which never comes; parameters are shared out as before."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        registry = getattr(self._offload.module, "ds_inflight_param_registry", None)
        if registry is not None:
            registry.data.clear()
        for parameter in self._offload.module.parameters():
            if getattr(parameter, "ds_status", None) is ZeroParamStatus.INFLIGHT:
                parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


_WAYS = ("forward", "backward")
