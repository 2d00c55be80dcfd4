"""The batches of the training loop, in an order that resuming repeats; an epoch ends after the same batch on all ranks.

[Note: resuming within an epoch]
A checkpoint written within an epoch holds, for each rank, the random state at the epoch's start (the order comes from
it) and the one now. An iterator of a plain loader is made under the first, the batches that were used are read
again, and then the second is restored. A loader with ``state_dict`` and ``load_state_dict`` (torchdata's
StatefulDataLoader) restores its own position.

The gradients of an open accumulation window are not stored: resuming goes back to the window's first batch, with the
buffers and the random state of that moment, and accumulates the same gradients again.

Where the number of batches is unknown, as many are read ahead as an accumulation window has, to know which one is the
last and how long its window is. Several ranks tell each other which of them has no more batches, and the epoch ends on
all of them when it ends on one. They ask when they have read a batch, and need the answer a step later, so that no step
waits for a message: one more batch is read ahead. Batches whose targets are counted are read a window ahead, too.

A data set may draw random numbers while it is read, interleaved with those of the model. The *replay state* of a batch
is the random state (and the loader's state) right before it was read: resuming reads the batch again from there.

A run with other batches, or with another number of processes, continues after as many samples. Batches have the numbers
that they have in an epoch of this run; of one that begins before that place, the samples that were used are left out.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from attrs import define
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from stratagem.api.batches import replace_in_loader
from stratagem.api.readback import LateFlag
from stratagem.api.seeding import random_state, restore_random_state
from stratagem.errors import ConfigError
from stratagem.runtime.data import ShardedSampler
from stratagem_trainer.combined_loader import generators_in, has_state, length, parts_of, restore_seeds_in, seeds_in
from stratagem_trainer.loader_samplers import in_order_of_several
from stratagem_trainer.loader_wait import LoaderWait

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stratagem.runtime.context import Context
    from stratagem_trainer.progress import Position
    from stratagem_trainer.token_loss import TargetCounts

#: Reading batches again for longer than this gives a warning.
_WARN_AFTER_S = 5.0
_END = object()


@define(eq=False)
class Window:
    """The open accumulation window."""

    #: Number of its first batch in the epoch.
    start: int
    #: As they were when that batch was about to be used.
    buffers: dict[str, Tensor]
    #: That of the moment, where batches after that one had been read; else that batch's replay state tells.
    random_state: dict[str, Any] | None


class ResumableBatches:
    """The batches of a fit's epochs, on this rank."""

    def __init__(
        self, loader: Any, num_batches: float, run: Context, module: nn.Module, targets: TargetCounts | None = None
    ) -> None:
        self.run, self.module = run, module
        #: Gets the batches of each accumulation window before it begins.
        self.targets = targets
        self.use(loader, num_batches)
        #: Batches before this one were used by the run that is resumed, in a window that was still open.
        self.replay_until = 0
        self._window: Window | None = None
        self._resumed: dict[str, Any] | None = None
        self._now: dict[str, Any] | None = None
        #: Replay states of the batches of the open window, of this batch and of the one read ahead, where needed.
        self._replay_states: dict[int, dict[str, Any]] = {}
        self._accumulate = 1
        self._buffers = _Buffers(module)
        self.wait = LoaderWait(warns=run.is_global_zero)

    def use(self, loader: Any, num_batches: float) -> None:
        """Take `num_batches` of `loader` from the next epoch on."""
        self.loader, self.num_batches = loader, num_batches
        # A limit does not say that the loader has that many.
        self.has_length = not (math.isinf(num_batches) or math.isinf(length(loader)))
        self.looks_ahead = not self.has_length or self.targets is not None
        self.stateful = has_state(loader)
        self.batch_sizes = [_batch_size(part) for part in parts_of(loader)]
        self._divides_batches = _joins_samples(loader) and not self.stateful

    # --- What a checkpoint holds -----------------------------------------------------------------------------------

    def random_state(self) -> dict[str, Any]:
        """Return the random states of this process, with those of the loader's own generators and samplers."""
        return random_state(self.run.devices) | {
            "loader": [g.get_state() for g in generators_in(self.loader)],
            "sampler_seeds": seeds_in(self.loader),
        }

    def restore_random_state(self, state: dict[str, Any]) -> None:
        """Restore what `random_state` returned."""
        restore_random_state(state, self.run.devices)
        self._restore_order(state)

    def _restore_order(self, state: dict[str, Any]) -> None:
        for generator, saved in zip(generators_in(self.loader), state.get("loader", []), strict=False):
            generator.set_state(saved)
        restore_seeds_in(self.loader, state.get("sampler_seeds", []))

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Return what this rank needs to continue after the batches that `position` counts as done."""
        done, window = position.batches_done, self._window
        if not done or position.epoch_done:
            return {}
        state: dict[str, Any] = {
            "marks": {n: replay_state for n, replay_state in self._replay_states.items() if n >= done},
            "accumulate": 1,
            "batch_sizes": self.batch_sizes,
        }
        if self.stateful and not state["marks"]:
            state["marks"][done] = {"loader": self.loader.state_dict()}
        if window is not None and window.start < done:
            state["marks"], state["accumulate"] = dict(self._replay_states), self._accumulate
            buffers = {n: b.cpu() for n, b in window.buffers.items()}
            state["window"] = {"start": window.start, "buffers": buffers, "random_state": window.random_state}
        return state

    def resume(self, state: dict[str, Any], now: dict[str, Any], position: Position) -> None:
        """Begin the next epoch at `position`, where `state` was saved, with the random state `now`."""
        self._now = now
        self._shuffle_as_several(now)
        if (state.get("batch_sizes") or self.batch_sizes) == self.batch_sizes:
            self._resumed = state
        else:
            self._move(position, state, now, self.run.mesh.num_data_shards)

    def resume_at_another_size(
        self, state: dict[str, Any], saved: dict[str, Any], position: Position, shards: int
    ) -> None:
        """Continue after as many samples as a run with `shards` shares of the data, in its order where that is known.

        Args:
            state: what its rank 0 saved of its batches, as `saved` is its random state.
        """
        self._shuffle_as_several(saved)
        self._restore_order(saved)
        self._move(position, state, saved, shards)
        if position.batches_done or position.continued_at:
            position.epoch_random_state = self.random_state()

    def _shuffle_as_several(self, saved: dict[str, Any]) -> None:
        """Use the order that several processes shared, in which one continued; `saved` is its random state."""
        if (seeds := saved.get("sampler_seeds")) and self.run.mesh.num_data_shards == 1:
            self.use(in_order_of_several(self.loader, seeds[0]), self.num_batches)

    def _move(self, position: Position, state: dict[str, Any], saved: dict[str, Any], shards: int) -> None:
        """Move `position`, which counts batches of the run that saved `state`, to where as many samples were used."""
        sizes, size = state.get("batch_sizes") or self.batch_sizes, self.batch_sizes[0]
        here = self.run.mesh.num_data_shards
        position.batches_of_earlier_epochs = position.batches_of_earlier_epochs * sizes[0] * shards // (size * here)
        if position.epoch_done:
            return
        # The gradients of an open window were those of other batches, or of other ranks.
        done = state.get("window", {}).get("start", position.batches_done)
        samples, twice = divmod(max(done * sizes[0], position.continued_at) * shards, here)
        position.batches_done, used = divmod(samples, size)
        position.continued_at = samples
        twice += 0 if self._divides_batches else used * here
        message = f"{twice if self._divides_batches else 'some'} samples of the epoch come twice" if twice else ""
        if samples and not self._has_order_of(sizes, saved, shards):
            message = "the rest of the epoch comes in another order: some samples come twice or not at all"
        if message and self.run.is_global_zero:
            warnings.warn(f"the run continues within an epoch with other batches, and {message}", stacklevel=2)

    def _has_order_of(self, batch_sizes: list[int], saved: dict[str, Any], shards: int) -> bool:
        """Whether this loader reads samples in the order of another run's, whose random state was `saved`."""
        loader, seeds = self.loader, saved.get("sampler_seeds", [])
        # What was used of each of several loaders is not what this one would have used.
        one = isinstance(loader, DataLoader) and len(batch_sizes) == 1 and len(seeds) == len(seeds_in(loader))
        if one and isinstance(loader.dataset, IterableDataset):
            return shards == self.run.mesh.num_data_shards and not loader.num_workers
        return one and (_joins_samples(loader) or batch_sizes == self.batch_sizes)

    def commit_position(self) -> None:
        """Use the present random state as that of the resumed run: what it had left to do is done."""
        self._now = self.random_state()

    def start(self, position: Position) -> None:
        """Restore the random state of a resumed run, right before its next epoch (or the rest of one)."""
        if self._now is not None:
            self.restore_random_state(self._now)
        elif position.batches_done:
            self._now = self.random_state()

    @property
    def window_is_open(self) -> bool:
        """Whether gradients of an accumulation window have not been used yet."""
        return self._window is not None

    def close_window(self) -> None:
        """Note that the gradients were used."""
        self._window = None

    # --- Batches ---------------------------------------------------------------------------------------------------

    def epoch(self, position: Position, accumulate: int) -> Iterator[tuple[int, Any, bool, int]]:
        """Yield ``(batch_idx, batch, is_last, window_size)`` from `position` to the end of its epoch.

        An accumulation window has `accumulate` batches, the last one of an epoch those that are left.
        """
        self._accumulate = accumulate
        if self.targets is not None:
            self.targets.forget()
        place = self._place(position)
        first, window, now = place.first, place.window, place.now
        reader = _Reader(self, place, self._open(position, first, place.replay_states.get(first, {}).get("loader")))
        if now is not None and position.batches_done and not place.replay_states:
            self.restore_random_state(now)
        if self.looks_ahead:
            reader.read_until(first + accumulate)
        if now is not None and place.replay_states and window is None:
            self.restore_random_state(now)
            place.replay_states = {}
        ahead = reader.ahead
        for batch_idx in itertools.count(first):
            if batch_idx % accumulate == 0:
                reader.window_start = batch_idx
            reader.read_until(batch_idx + 1 + (accumulate if self.looks_ahead else 0))
            if not ahead:
                return
            if batch_idx == reader.window_start:
                size = self._begin_window(batch_idx, ahead, window if batch_idx == first else None)
            batch = ahead.popleft()
            is_last = batch_idx + 1 >= self.num_batches if self.has_length else not ahead
            if self.targets is not None and not is_last and (batch_idx + 1) % accumulate == 0:
                self.targets.send(itertools.islice(ahead, accumulate))
            yield batch_idx, batch, is_last, size
            if window is not None and batch_idx + 1 == self.replay_until:
                assert now is not None
                self.restore_random_state(now)
            if is_last:
                if self.has_length and batch_idx + 1 == length(self.loader):
                    reader.end()
                return

    def _place(self, position: Position) -> _Place:
        """Return where to begin; `position` moves to the beginning of a window that has another length now."""
        resumed, self._resumed = self._resumed or {}, None
        now, self._now = self._now, None
        self.replay_until, self._replay_states = 0, {}
        window, replay_states = resumed.get("window"), resumed.get("marks", {})
        if window is None:
            return _Place(position.batches_done, None, replay_states, now)
        first = window["start"]
        if resumed["accumulate"] == self._accumulate:
            self.replay_until = position.batches_done
            return _Place(first, window, replay_states, now)
        position.batches_done = first
        now = replay_states.get(first, {}).get("random")
        return _Place(first, None, {n: old for n, old in replay_states.items() if n == first}, now)

    def _begin_window(self, start: int, ahead: deque[Any], saved: dict[str, Any] | None) -> int:
        """Begin the window of batch `start`, the first one `ahead`, as it was `saved`; return its number of batches."""
        left = self.num_batches - start if self.has_length else len(ahead)
        size = int(min(self._accumulate - start % self._accumulate, left))
        if self.targets is not None:
            self.targets.begin(itertools.islice(ahead, size))
        if saved is not None:
            self._buffers.restore(saved["buffers"])
            if saved["random_state"] is not None:
                self.restore_random_state(saved["random_state"])
        if self._accumulate > 1:
            random_state = self.random_state() if self.looks_ahead else None
            self._window = Window(start, self._buffers.copies(), random_state)
        return size

    def _open(self, position: Position, first: int, state: Any) -> Iterator[Any]:
        """Begin an epoch's iterator that yields batch number `first` next."""
        if position.epoch_random_state is None:
            position.epoch_random_state, position.continued_at = self.random_state(), 0
        elif position.batches_done or position.continued_at:
            self.restore_random_state(position.epoch_random_state)
        began = time.monotonic()
        if state is not None and self.stateful:
            self.loader.load_state_dict(state)
            iterator: Iterator[Any] = iter(self.loader)
            self._warn_of_reading(first, began)
            return iterator
        if position.epoch and getattr(self.loader, "persistent_workers", False) and self.loader._iterator is None:
            # Workers that persist draw their seed once, in the first epoch, and the order of this one comes after that.
            iter(self.loader)
            self.restore_random_state(position.epoch_random_state)
        used = position.continued_at - first * self.batch_sizes[0]
        if used > 0 and self._divides_batches:
            batches = enumerate(self.loader.batch_sampler)
            rest = (batch[used if number == first else 0 :] for number, batch in batches if number >= first)
            iterator = iter(replace_in_loader(self.loader, batch_sampler=rest, persistent_workers=False))
        else:
            iterator = iter(self.loader)
            for _ in range(first):
                if next(iterator, _END) is _END:
                    break
        if used > 0:  # the order is drawn with the first batch
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        self._warn_of_reading(first, began)
        return iterator

    def _warn_of_reading(self, first: int, began: float) -> None:
        seconds = time.monotonic() - began
        if seconds > _WARN_AFTER_S and self.run.is_global_zero:
            warnings.warn(
                f"resuming at batch {first} of an epoch took {seconds:.0f} s: the loader read the batches before it "
                "again. torchdata's StatefulDataLoader resumes without reading them.",
                stacklevel=2,
            )

    def keep_replay_state(self, number: int, start: int) -> None:
        """Keep the replay state of batch `number`, which resuming may read again; forget those before `start`."""
        replay_state = {"random": self.random_state()}
        if self.stateful and (self.looks_ahead or number == start):
            replay_state["loader"] = self.loader.state_dict()
        self._replay_states = {n: old for n, old in self._replay_states.items() if n >= start}
        self._replay_states[number] = replay_state


@define(eq=False)
class _Place:
    """Where an epoch begins: at its first batch, or where the run that is resumed was saved."""

    #: Number of the first batch to be yielded.
    first: int
    #: The open accumulation window that was saved.
    window: dict[str, Any] | None
    #: Those of batches that were read ahead, or belong to `window`.
    replay_states: dict[int, dict[str, Any]]
    #: The random state after what is done again.
    now: dict[str, Any] | None


class _Reader:
    """Reads the batches of an epoch, and tells other ranks where this one has no more."""

    def __init__(self, batches: ResumableBatches, place: _Place, iterator: Iterator[Any]) -> None:
        self._batches, self._place, self._iterator = batches, place, iterator
        #: Batches that every rank has, and that were not yielded yet.
        self.ahead: deque[Any] = deque()
        #: Number of the first batch of the window that trains.
        self.window_start = place.first
        #: Number of the batch that is read next.
        self._number = place.first
        #: The batch that was read last, of which it is not known yet whether all ranks have one.
        self._asked: list[Any] = []
        self._ended = False
        # With one process, too, which may resume what several saved: a data set may draw random numbers between the
        # model's.
        self._further = int(not batches.has_length)
        self._keeps = batches.looks_ahead or batches._accumulate > 1
        among = batches.run.collectives
        self._ends = LateFlag(among if batches.has_length else among.duplicate("flags"))

    def read_until(self, number: int) -> None:
        """Read the batches before `number`, or those that every rank has."""
        batches = self._batches
        while self._number < min(number + self._further, batches.num_batches):
            if self._further:
                self._take_asked()
                if self._ended:
                    return
            if "random" in (again := self._place.replay_states.get(self._number, {})):
                batches.restore_random_state(again["random"])
            if self._keeps:
                batches.keep_replay_state(self._number, self.window_start)
            self._read()
        if self._number - len(self._asked) < number:
            self._take_asked()

    def _read(self) -> None:
        batches, began = self._batches, time.perf_counter()
        batch = next(self._iterator, _END)
        batches.wait.add(began, batches.loader)
        if not batches.has_length:
            self._asked.append(batch)
            self._ends.send(batch is _END)
        elif batch is _END:
            message = f"the training loader has length {int(batches.num_batches)} and yielded {self._number} batches"
            raise ConfigError(message, expected="as many as its length says")
        else:
            self.ahead.append(batch)
        self._number += 1

    def _take_asked(self) -> None:
        self._ended = self._ended or self._ends.read()
        self.ahead.extend([] if self._ended else self._asked)
        self._asked.clear()

    def end(self) -> None:
        """Let workers end normally: the loader is exhausted."""
        next(self._iterator, _END)


def _joins_samples(loader: Any) -> bool:
    """Whether `loader` joins as many samples as its batch size says, in the order of a sampler."""
    kind = type(getattr(loader, "batch_sampler", None))
    joins = issubclass(kind, BatchSampler) and kind.__name__ == BatchSampler.__name__
    return joins and not isinstance(loader.dataset, IterableDataset)


def _batch_size(loader: Any) -> int:
    """Return how many samples the batches of `loader` have; 1 where that is not known, and batches are counted."""
    maker = getattr(loader, "batch_sampler", None)
    maker = maker.sampler if isinstance(maker, ShardedSampler) else maker
    size = getattr(loader if maker is None else maker, "batch_size", None)
    return size if type(size) is int and size > 0 else 1


class _Buffers:
    """Copies of a module's buffers; large ones are copied again only if they changed."""

    #: Buffers of up to this many elements are always copied. (Running statistics change without torch counting a new
    #: version of them, and they are small.)
    SMALL = 1 << 16

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept: dict[str, tuple[int, int, Tensor]] = {}

    def copies(self) -> dict[str, Tensor]:
        """Return a copy of every buffer as it is now."""
        for name, buffer in self.module.named_buffers():
            if buffer.is_meta:  # of a part that another rank holds
                continue
            key = (id(buffer), buffer._version)
            if buffer.numel() <= self.SMALL or self._kept.get(name, (0, 0))[:2] != key:
                self._kept[name] = (*key, buffer.detach().clone())
        return {name: copy for name, (_, _, copy) in self._kept.items()}

    def restore(self, copies: dict[str, Tensor]) -> None:
        buffers = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, copy in copies.items():
                if not buffers[name].is_meta:
                    buffers[name].copy_(copy)


def end_workers(loaders: Iterable[Any]) -> None:
    """End the processes of loaders with `persistent_workers`.

    Loaders and their trainer refer to each other. Collected as garbage, each process would take five seconds to end.
    """
    for loader in (part for each in loaders for part in parts_of(each)):
        if getattr(loader, "persistent_workers", False) and not hasattr(loader, "state_dict"):
            loader._iterator = None


def agreed_size(size: float, run: Context, name: str) -> float:
    """Return how many batches of a training loader all ranks can use: what the shortest has. Collective."""
    if run.world_size == 1:
        return size
    sizes = run.collectives.all_gather_object(size)
    if len(set(sizes)) == 1:
        return size
    if any(math.isinf(other) for other in sizes):
        return math.inf
    shortest: float = min(sizes)
    if run.is_global_zero and shortest:
        warnings.warn(
            f"the {name} loader has {', '.join(str(int(other)) for other in sizes)} batches on ranks 0 to "
            f"{len(sizes) - 1}: an epoch ends after {int(shortest)} on all of them",
            stacklevel=2,
        )
    return shortest
