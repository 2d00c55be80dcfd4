"""Average buckets of gradients over the ranks, through the comm hooks of the run.

[Note: the order of messages]
Every rank must hand its messages to a process group in the same order; a backend that completes them in another order
on each rank (gloo does) must not decide which is sent next. So the first message of each bucket is sent at once, in the
order in which the strategy passes the buckets, and what a hook sends *after a result* waits until the first message of
the backward's last bucket is sent. From then on the buckets take turns, in the order in which they came: none continues
before its predecessor has sent what it had to send, whatever is complete meanwhile.

Hooks that send one message for each bucket (`CommHook.single_message`) send nothing after a result: a bucket whose
hooks are all of this kind continues as soon as its message is complete, in a thread of the backend.

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

from stratagem.errors import ConfigError, PluginError
from stratagem_buckets import OUTCOMES, Bucket, CommHook, Outcome

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from stratagem.api.context import RunContext
    from stratagem.api.world import Collectives

_SEE = "see reduce_bucket in docs/hooks.md"


def bucket_reducer(run: RunContext, over: Collectives | None = None) -> BucketReducer | None:
    """Return a function that averages buckets through all comm hooks of `run`; None if there are none.

    A strategy that provides "gradient-buckets" calls this in `wrap_model`, and sends every bucket through it.

    Args:
        over: the ranks to average over, if not all that the model is spread over (``run.peers``).
    """
    hooks: list[CommHook] = run.plugins_of(CommHook.kind)
    if not hooks:
        return None
    stages = [HookStage.of(hook, run.name_of(hook)) for hook in hooks]
    reducer = BucketReducer(stages, run.peers if over is None else over, run)
    OUTCOMES.of(run).append(reducer.outcome)
    return reducer


@frozen
class HookStage:
    """One comm hook of the stack."""

    name: str
    #: ``reduce_bucket`` of the plugin.
    function: Callable[..., Any]
    #: The arguments that it names.
    arguments: Sequence[str]
    #: Whether the hook sends one message for each bucket.
    single_message: bool = False

    @classmethod
    def of(cls, hook: Any, name: str) -> HookStage:
        return cls(name, hook.reduce_bucket, [*inspect.signature(hook.reduce_bucket).parameters], hook.single_message)


class BucketReducer:
    """Averages buckets over the ranks of `collectives`, through `stages`, the first of them outermost."""

    def __init__(self, stages: Sequence[HookStage], collectives: Collectives, run: RunContext) -> None:
        self.stages, self.collectives, self.run = stages, collectives, run
        self.traffic = collectives.traffic
        self._single_message = all(stage.single_message for stage in stages)
        self.outcome = Outcome()
        self._waiting: deque[_InFlightBucket] = deque()
        self._takes_turns = False
        self._in_flight: set[_InFlightBucket] = set()

    def __call__(self, bucket: Bucket) -> torch.futures.Future[Tensor]:
        """Begin to average `bucket`; the future holds its average, in a tensor like ``bucket.buffer``."""
        in_flight = _InFlightBucket(self, bucket)
        in_flight.advance()
        if in_flight.pending is None:
            in_flight.complete()
        elif self._single_message:
            self._in_flight.add(in_flight)
            # Also if it is complete: torch calls this on other streams, so that backward's does not wait.
            in_flight.pending.add_done_callback(in_flight.conclude)
        else:
            self._in_flight.add(in_flight)
            self._waiting.append(in_flight)
        if bucket.is_last:
            self.take_turns()
        return in_flight.average

    def finish(self) -> None:
        """Wait until all buckets up to the last are averaged, before an engine sends messages without this reducer."""
        for bucket in list(self._in_flight):
            bucket.average.wait()

    def serve(self, replica: DistributedDataParallel) -> None:
        """Have `replica` average its buckets with this reducer.

        Raises:
            ConfigError: a layer has sparse gradients, which are not sent in buckets.
        """
        assert self.run.module is not None, "a replica of it was made"
        check_dense(self.run.module, "comm hooks send", "sparse=False there, or no comm hook")
        replica.register_comm_hook(self, _reduce_all if replica.find_unused_parameters else _reduce)

    def take_turns(self) -> None:
        """Let the buckets in flight advance, in the order in which they came."""
        if not self._takes_turns:
            self._takes_turns = True
            self._advance()

    def _advance(self, _: object = None) -> None:
        while self._waiting:
            bucket = self._waiting[0]
            assert bucket.pending is not None, "one that is complete does not wait"
            if not bucket.pending.done():
                bucket.pending.add_done_callback(self._advance)
                return
            self._waiting.popleft()
            bucket.resume()
            if bucket.pending is not None:
                self._waiting.append(bucket)
                continue
            # A caller that waits for the last one may begin the next backward, in another thread, once it is complete.
            is_last = not self._waiting
            self._takes_turns = not is_last
            bucket.complete()
            if is_last:
                return
        self._takes_turns = False


class _Average(torch.futures.Future):  # type: ignore[type-arg]
    """The future of an average. Waiting for it also advances the buckets in flight."""

    reducer: BucketReducer

    def wait(self) -> Any:
        self.reducer.take_turns()
        return super().wait()


class _InFlightBucket:
    """A bucket that is being averaged: first each hook turns it into a message, then back into an average."""

    def __init__(self, reducer: BucketReducer, bucket: Bucket) -> None:
        self.reducer = reducer
        device = bucket.buffer.device
        self.average = _Average(devices=[] if device.type == "cpu" else [device])
        self.average.reducer = reducer
        #: What the innermost hook waits for; None once the bucket is averaged.
        self.pending: torch.futures.Future[Any] | None = None
        self._running: list[tuple[HookStage, Bucket, Any]] = []
        self._next: Any = bucket.buffer
        self._error: Exception | None = None
        self._first = bucket

    def resume(self) -> None:
        """Continue with the result of `pending`; an error is raised by the future of the average."""
        assert self.pending is not None, "a hook waits"
        try:
            self._next = self.pending.wait()
            self.advance(answered=True)
        except Exception as error:  # noqa: BLE001 - raised where the average is waited for
            self.pending = None
            self.reducer.outcome.failure = self.reducer.outcome.failure or error
            self._error = error

    def conclude(self, _: object) -> None:
        """Continue after the only message; an error is raised by the future of the average."""
        self.resume()
        if self.pending is not None:
            names = ", ".join(repr(stage.name) for stage in self.reducer.stages)
            self._error = PluginError(
                f"comm_hook {names} declares single_message and sent a second message for bucket {self._first.index}",
                expected="one message for each bucket", do="drop single_message, or the second message",
            )  # fmt: skip
            self.reducer.outcome.failure = self.reducer.outcome.failure or self._error
        self.complete()

    def complete(self) -> None:
        """Set the result of the future."""
        self.reducer._in_flight.discard(self)
        if self._error is not None:
            self.average.set_exception(self._error)
        else:
            self.average.set_result(self._next)

    def advance(self, answered: bool = False) -> None:
        """Run hooks until one of them has to wait, or the bucket is averaged."""
        self.pending = None
        value = self._next
        if not answered:
            value, answered = self._descend(self._first)
        while self._running and self.pending is None:
            stage, bucket, hook = self._running[-1]
            try:
                with self.reducer.traffic.sent_by(stage.name):
                    sent = hook.send(value if answered else None)
            except StopIteration as stop:
                self._running.pop()
                value, answered = self._checked(stage, bucket, stop.value), True
                continue
            if isinstance(sent, Tensor):
                value, answered = self._descend(Bucket(buffer=sent, index=bucket.index, is_last=bucket.is_last))
            elif isinstance(sent, torch._C.Future):
                self.pending = sent  # type: ignore[assignment]  # the base class of torch.futures.Future
            else:
                raise PluginError(
                    f"comm_hook {stage.name!r} yielded a {type(sent).__name__}", expected="a tensor to average", do=_SEE
                )
        self._next = value

    def _descend(self, bucket: Bucket) -> tuple[Any, bool]:
        """Pass `bucket` to the next hook, or send it below the innermost; return the result if there is one already."""
        reducer, depth = self.reducer, len(self._running)
        if depth == len(reducer.stages):
            with reducer.traffic.sent_by(reducer.stages[-1].name if reducer.stages else ""):
                self.pending = reducer.collectives.average_async(bucket.buffer)
            return None, False
        stage = reducer.stages[depth]
        reducer.traffic.add_bucket(stage.name, bucket.buffer.nbytes, reducer.collectives.world_size)
        given = {"bucket": bucket, "collectives": reducer.collectives, "run": reducer.run}
        hook = stage.function(*(given[name] for name in stage.arguments))
        if inspect.isgenerator(hook):
            self._running.append((stage, bucket, hook))
            return None, False
        return self._checked(stage, bucket, hook), True  # it sends nothing

    def _checked(self, stage: HookStage, bucket: Bucket, result: Any) -> Tensor:
        like = bucket.buffer
        if isinstance(result, Tensor) and (result.shape, result.dtype) == (like.shape, like.dtype):
            return result
        found = _describe(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        raise PluginError(
            f"comm_hook {stage.name!r} returned {found} for bucket {bucket.index}", expected=_describe(like), do=_SEE
        )


# --- For strategies that use torch's DDP -------------------------------------------------------------------------
# torch checks the annotations of a hook and refuses annotations that are strings: these functions have none.


def _reduce(reducer, bucket):  # type: ignore[no-untyped-def]
    return reducer(
        Bucket(
            buffer=bucket.buffer(),
            index=bucket.index(),
            is_last=bucket.is_last(),
            parameters=tuple(bucket.parameters()),
            gradients=_gradients(bucket),
        )
    )


def _reduce_all(reducer, bucket):  # type: ignore[no-untyped-def]
    """Wait before DDP sends which parameters are unused: hooks may still send, in another order, from a thread."""
    average = _reduce(reducer, bucket)  # type: ignore[no-untyped-call]
    if bucket.is_last():
        reducer.finish()
    return average


def _gradients(bucket: Any) -> tuple[Tensor, ...]:
    """Return the gradients in `bucket`, also of complex parameters, which DDP stores as twice as many real numbers."""
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
