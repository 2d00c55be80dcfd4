"""How gradients travel: the stack of comm hooks at work on the buckets of a backward.

[Note: the order of messages]
Every rank must hand its messages to a process group in the same order; a backend that completes them in another order
on each rank (gloo does) must not decide who speaks next. So the first message of each bucket leaves at once, in the
order in which the strategy brings the buckets, and what a hook sends *after an answer* waits until the last bucket of
the backward has left. From then on the buckets take turns, in the order in which they came: nobody is resumed before
its predecessor has sent what it had to send, whatever has arrived meanwhile.

Stock hooks that send again from a callback break this rule: with several buckets on gloo the ranks send in different
orders, and the process aborts ("op.preamble.length <= op.nbytes", seen with torch 2.13).
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor, nn

from stratagem.api.values import Bucket
from stratagem.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from stratagem.api.context import RunContext
    from stratagem.api.world import Collectives

_SEE = "see reduce_bucket in docs/hooks.md"


@frozen
class HookStage:
    """One comm hook of the stack."""

    name: str
    #: ``reduce_bucket`` of the plugin.
    function: Callable[..., Any]
    #: The arguments that it names.
    arguments: Sequence[str]


class BucketReducer:
    """Averages buckets over the ranks of `collectives`, through `levels`, the first of them outermost."""

    def __init__(self, levels: Sequence[HookStage], collectives: Collectives, run: RunContext) -> None:
        self.levels, self.collectives, self.run = levels, collectives, run
        self.traffic = collectives.traffic
        #: What went wrong in a hook, for the strategy's caller: an engine may tell less.
        self.failure: BaseException | None = None
        self._waiting: deque[_InFlightBucket] = deque()
        self._takes_turns = False
        self._travelling: set[_InFlightBucket] = set()

    def __call__(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Send `bucket` on its way; the future holds its average, in a tensor like ``bucket.buffer``."""
        journey = _InFlightBucket(self, bucket)
        journey.go_on()
        if journey.pending is None:
            journey.arrive()
        else:
            self._travelling.add(journey)
            self._waiting.append(journey)
        if bucket.is_last:
            self.take_turns()
        return journey.arrival

    def finish(self) -> None:
        """Return once all buckets up to the last have arrived: for an engine that is about to send for itself."""
        for journey in list(self._travelling):
            journey.arrival.wait()

    def serve(self, replica: DistributedDataParallel) -> None:
        """Have `replica` send its buckets through here.

        Raises:
            ConfigError: a layer has sparse gradients, which do not travel in buckets.
        """
        assert self.run.module is not None, "a replica of it was made"
        check_dense(self.run.module, "comm hooks send", "sparse=False there, or no comm hook")
        replica.register_comm_hook(self, _reduce_all if replica.find_unused_parameters else _reduce)

    def take_turns(self) -> None:
        """Let the buckets that are on their way go on, in the order in which they came."""
        if not self._takes_turns:
            self._takes_turns = True
            self._go_on()

    def _go_on(self, _: object = None) -> None:
        while self._waiting:
            journey = self._waiting[0]
            assert journey.pending is not None, "one that has arrived does not wait"
            if not journey.pending.done():
                journey.pending.add_done_callback(self._go_on)
                return
            self._waiting.popleft()
            journey.answered()
            if journey.pending is not None:
                self._waiting.append(journey)
                continue
            # Who waits for the last one may begin the next backward, in another thread, as soon as it arrives.
            is_last = not self._waiting
            self._takes_turns = not is_last
            journey.arrive()
            if is_last:
                return
        self._takes_turns = False


class _Arrival(torch.futures.Future):  # type: ignore[type-arg]
    """The future of an average. Who waits for it before the last bucket was sent has sent all there is."""

    wire: BucketReducer

    def wait(self) -> Any:
        self.wire.take_turns()
        return super().wait()


class _InFlightBucket:
    """One bucket on its way down the stack and up again."""

    def __init__(self, wire: BucketReducer, bucket: Bucket) -> None:
        self.wire = wire
        device = bucket.buffer.device
        self.arrival = _Arrival(devices=[] if device.type == "cpu" else [device])
        self.arrival.wire = wire
        #: What the hook whose turn it is waits for; None once the bucket has arrived.
        self.pending: torch.futures.Future[Any] | None = None
        self._asked: list[tuple[HookStage, Bucket, Any]] = []
        self._next: Any = bucket.buffer
        self._error: Exception | None = None
        self._first = bucket

    def answered(self) -> None:
        """Go on with what was waited for; what goes wrong is told to who waits for the average."""
        assert self.pending is not None, "somebody waits"
        try:
            self._next = self.pending.wait()
            self.go_on(answered=True)
        except Exception as error:  # noqa: BLE001 - raised where the average is waited for
            self.pending = None
            self.wire.failure = self.wire.failure or error
            self._error = error

    def arrive(self) -> None:
        """Answer who waits for the average."""
        self.wire._travelling.discard(self)
        if self._error is not None:
            self.arrival.set_exception(self._error)
        else:
            self.arrival.set_result(self._next)

    def go_on(self, answered: bool = False) -> None:
        """Run hooks until one of them has to wait, or the bucket has arrived."""
        self.pending = None
        value = self._next
        if not answered:
            value, answered = self._descend(self._first)
        while self._asked and self.pending is None:
            level, bucket, hook = self._asked[-1]
            try:
                with self.wire.traffic.sent_by(level.name):
                    sent = hook.send(value if answered else None)
            except StopIteration as stop:
                self._asked.pop()
                value, answered = self._checked(level, bucket, stop.value), True
                continue
            if isinstance(sent, Tensor):
                value, answered = self._descend(Bucket(buffer=sent, index=bucket.index, is_last=bucket.is_last))
            elif isinstance(sent, torch._C.Future):
                self.pending = sent  # type: ignore[assignment]  # the base class of torch.futures.Future
            else:
                raise PluginError(
                    f"comm_hook {level.name!r} yielded a {type(sent).__name__}", expected="a tensor to average", do=_SEE
                )
        self._next = value

    def _descend(self, bucket: Bucket) -> tuple[Any, bool]:
        """Give `bucket` to the next hook, or to the wire under them all; return its answer if there is one already."""
        wire, depth = self.wire, len(self._asked)
        if depth == len(wire.levels):
            with wire.traffic.sent_by(wire.levels[-1].name if wire.levels else ""):
                self.pending = wire.collectives.average_async(bucket.buffer)
            return None, False
        level = wire.levels[depth]
        wire.traffic.add_bucket(level.name, bucket.buffer.nbytes, wire.collectives.world_size)
        given = {"bucket": bucket, "collectives": wire.collectives, "run": wire.run}
        hook = level.function(*(given[name] for name in level.arguments))
        if inspect.isgenerator(hook):
            self._asked.append((level, bucket, hook))
            return None, False
        return self._checked(level, bucket, hook), True  # it sends nothing

    def _checked(self, level: HookStage, bucket: Bucket, result: Any) -> Tensor:
        like = bucket.buffer
        if isinstance(result, Tensor) and (result.shape, result.dtype) == (like.shape, like.dtype):
            return result
        found = _describe(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise PluginError(
            f"comm_hook {level.name!r} returned {found} for bucket {bucket.index}", expected=_describe(like), do=_SEE
        )


# --- For strategies that are made of torch's DDP -----------------------------------------------------------------
# torch reads the annotations of a hook, and wants objects rather than text: these have none.


def _reduce(wire, bucket):  # type: ignore[no-untyped-def]
    return wire(
        Bucket(
            buffer=bucket.buffer(),
            index=bucket.index(),
            is_last=bucket.is_last(),
            parameters=tuple(bucket.parameters()),
            gradients=_gradients(bucket),
        )
    )


def _reduce_all(wire, bucket):  # type: ignore[no-untyped-def]
    """Hold up DDP's message about unused parameters: hooks may still send, from a thread that would cross it."""
    average = _reduce(wire, bucket)  # type: ignore[no-untyped-call]
    if bucket.is_last():
        wire.finish()
    return average


def _gradients(bucket: Any) -> tuple[Tensor, ...]:
    """Return the gradients in `bucket`; those of complex parameters, which DDP takes for half as many real numbers."""
    parameters = bucket.parameters()
    if not any(parameter.is_complex() for parameter in parameters):
        return tuple(bucket.gradients())
    sizes = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in parameters]
    parts = zip(bucket.buffer().split(sizes), parameters, strict=True)
    return tuple(
        torch.view_as_complex(part.view(*p.shape, 2)) if p.is_complex() else part.view(p.shape) for part, p in parts
    )


def check_dense(module: nn.Module, sender: str, expected: str, do: str = "") -> None:
    """Refuse a part of `module` whose gradients are sparse: `sender` sends dense ones.

    Raises:
        ConfigError: there is one; its name, and `expected` and `do`, are in it.
    """
    sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False) is True]
    if sparse:
        found = f"{sparse[0] or type(module).__name__!r} has sparse gradients, and {sender} dense ones"
        raise ConfigError(found, expected=expected, do=do)


def _describe(tensor: Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
