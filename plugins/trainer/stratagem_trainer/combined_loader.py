"""`CombinedLoader`: several loaders that are read as one, in an order that resuming repeats.

[Note: passes]
Reading a loader from its first to its last batch is a *pass*. An epoch begins with pass 0 of every loader; the modes
that read a short loader again begin its pass 1 within the epoch, between two steps of the model. A pass draws from
random numbers that belong to it: the seed comes from the epoch's, the number of the loader and that of the pass, and
samplers with an epoch get one that no other pass has. So a resumed run has the order of a pass without the passes
before it. Generators of a loader are saved as they were at the beginning of its pass.

A position is, for each loader, its pass and how many batches of the pass were used. Those of a plain loader are read
again upon resuming; a loader with ``state_dict`` continues at once.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from attrs import define
from torch.utils.data import DataLoader

from stratagem.api.seeding import random_state, restore_random_state, sampler_seed
from stratagem.errors import ConfigError
from stratagem_trainer.loader_samplers import generators_of, seeded_samplers, set_epoch

#: How the batches of several loaders become those of one.
MODES: Final = ("min_size", "max_size_cycle", "max_size", "sequential", "weighted")
#: Between the epochs of two passes of a loader: more than a run has.
_STRIDE: Final = 1 << 20
_END: Final = object()


class CombinedLoader:
    """Several loaders, read as one.

    Args:
        iterables: a dict, list or tuple of loaders. Each process reads its share of each.
        mode: what a batch is, and when an epoch ends.

            * ``"min_size"``: one batch of each loader, until the shortest ends.
            * ``"max_size_cycle"``: one batch of each, until the longest ends; the shorter ones begin again, in a new
              order if they shuffle.
            * ``"max_size"``: one batch of each, until the longest ends; None for a loader that has ended.
            * ``"sequential"``: a batch of one loader; one loader after the other.
            * ``"weighted"``: a batch of one loader, drawn for each step; a loader that ends begins again. An epoch has
              as many batches as all loaders together. If one does not tell its length, the epoch ends when each has
              ended once.
        weights: under ``"weighted"``, the chance of each loader: positive numbers, in a list or, for a dict of
            loaders, in a dict. The draw has the seed of `seed_everything` and is the same on all ranks.

    A batch of each loader is a dict, list or tuple like `iterables`. The first four modes and their names are those of
    Lightning's CombinedLoader.

    Raises:
        ConfigError: no loaders, an unknown mode, or weights that do not fit the loaders or the mode.
    """

    def __init__(
        self, iterables: Mapping[str, Any] | Sequence[Any], mode: str = "min_size",
        weights: Mapping[str, float] | Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        self.iterables, self.mode = iterables, mode
        if mode not in MODES:
            raise ConfigError(f"CombinedLoader got mode={mode!r}", expected=f"one of {', '.join(MODES)}")
        if not isinstance(iterables, Mapping | list | tuple):
            raise ConfigError(
                f"CombinedLoader got a {type(iterables).__name__}", expected="a dict, list or tuple of loaders"
            )
        if not self.flattened:
            raise ConfigError("CombinedLoader got no loaders", expected="at least one")
        self.weights = _checked_weights(self, weights)
        #: That of the draw under "weighted".
        self.seed = sampler_seed()
        self.epoch = 0
        #: Whether every epoch has the order of the first.
        self.repeats = False
        self._epoch_seed = 0
        #: That of the latest iterator.
        self._reading = _Reading(0, [])
        self._saved: dict[str, Any] | None = None

    @property
    def flattened(self) -> list[Any]:
        """The loaders, in order."""
        return list(self.iterables.values() if isinstance(self.iterables, Mapping) else self.iterables)

    def with_each(self, change: Callable[[Any], Any]) -> CombinedLoader:
        """Return a copy in which `change` was applied to each loader."""
        changed = copy.copy(self)
        changed.iterables, changed.seed = self._batch([change(loader) for loader in self.flattened]), sampler_seed()
        changed._reading, changed._saved = _Reading(0, []), None
        return changed

    def set_epoch(self, epoch: int) -> None:
        """Read in the order of `epoch` from the next iterator on."""
        self.epoch = 0 if self.repeats else epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            TypeError: a loader has no length.
        """
        sizes = [len(loader) for loader in self.flattened]
        if self.mode in ("sequential", "weighted"):
            return sum(sizes)
        return min(sizes) if self.mode == "min_size" else max(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what was used of each loader."""
        states = [cursor.state_dict() for cursor in self._reading.cursors]
        return {"step": self._reading.step, "seed": self._epoch_seed, "loaders": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at a position.

        Raises:
            ConfigError: the position is that of another number of loaders.
        """
        saved, here = len(state["loaders"]), len(self.flattened)
        if saved != here:
            raise ConfigError(f"the checkpoint was written within an epoch of {saved} loaders, and this run has {here}",
                              expected="as many", do="pass the same loaders to go on within the epoch")  # fmt: skip
        self._saved = state

    def __iter__(self) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._epoch_seed = saved["seed"] if saved else int(torch.empty((), dtype=torch.int64).random_())
        cursors = [_Cursor(loader, self.epoch, f"{self._epoch_seed}/{number}")
                   for number, loader in enumerate(self.flattened)]  # fmt: skip
        for cursor, state in zip(cursors, saved["loaders"] if saved else [], strict=False):
            cursor.load_state_dict(state)
        self._reading = _Reading(saved["step"] if saved else 0, cursors)
        return self._batches(self._reading)

    def _batches(self, reading: _Reading) -> Iterator[Any]:
        read = {"sequential": _one_after_another, "weighted": self._drawn}.get(self.mode, self._one_of_each)
        size = length(self)
        try:
            # What is not used is not read: it could draw random numbers.
            while reading.step < size and (batch := read(reading)) is not _END:
                reading.step += 1
                yield batch
        finally:
            for cursor in reading.cursors:
                cursor.iterator = None  # its workers end

    def _one_of_each(self, reading: _Reading) -> Any:
        cursors, again = reading.cursors, self.mode == "max_size_cycle"
        batches = [cursor.next() if again or not cursor.number else _END for cursor in cursors]
        if (any if self.mode == "min_size" else all)(cursor.number for cursor in cursors):
            return _END
        for number, batch in enumerate(batches):
            if batch is _END:
                batches[number] = cursors[number].first() if again else None
        return self._batch(batches)

    def _drawn(self, reading: _Reading) -> Any:
        cursors = reading.cursors
        cursor = random.Random(f"{self.seed}/{self.epoch}/{reading.step}").choices(cursors, self.weights)[0]
        if (batch := cursor.next()) is not _END:
            return batch
        ended = math.isinf(length(self)) and all(each.number for each in cursors)
        return _END if ended else cursor.first()

    def _batch(self, parts: list[Any]) -> Any:
        if isinstance(self.iterables, Mapping):
            return dict(zip(self.iterables, parts, strict=True))
        return tuple(parts) if isinstance(self.iterables, tuple) else parts


def _one_after_another(reading: _Reading) -> Any:
    for cursor in reading.cursors:
        if not cursor.number and (batch := cursor.next()) is not _END:
            return batch
    return _END


def _checked_weights(loader: CombinedLoader, weights: Any) -> Sequence[float] | None:
    names = loader.iterables.keys() if isinstance(loader.iterables, Mapping) else None
    values = weights
    if isinstance(weights, Mapping) and weights.keys() == names:
        values = [weights[name] for name in loader.iterables]
    count, weighted = len(loader.flattened), loader.mode == "weighted"
    numbers = isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and 0 < value < math.inf for value in values
    )
    if not (numbers and len(values) == count if weighted else weights is None):
        raise ConfigError(
            f"CombinedLoader got mode={loader.mode!r}, {count} loaders and weights={weights!r}",
            expected='a positive number for each loader with mode="weighted", and no weights otherwise',
        )
    checked: Sequence[float] | None = values
    return checked


@define
class _Reading:
    """How many batches an iterator has yielded, and where it reads each loader."""

    step: int
    cursors: list[_Cursor]


class _Cursor:
    """Where a loader is read: see [Note: passes]."""

    def __init__(self, loader: Any, epoch: int, seed: str) -> None:
        self.loader, self.epoch, self.seed = loader, epoch, seed
        #: That of the pass, and the batches of it that were used.
        self.number, self.used = 0, 0
        self.iterator: Any = None
        self.generators: list[torch.Tensor] = []

    def next(self) -> Any:
        """Return the next batch, or _END where the pass ends; the call after that begins another pass."""
        batch = self._begin() if self.iterator is None else next(self.iterator, _END)
        if batch is _END:
            self.number, self.used, self.iterator = self.number + 1, 0, None
        else:
            self.used += 1
        return batch

    def first(self) -> Any:
        """Return the first batch of another pass.

        Raises:
            ConfigError: there is none.
        """
        if (batch := self.next()) is _END:
            kind = type(self.loader).__name__
            raise ConfigError(f"a loader, a {kind}, was to be read again in an epoch and yielded no batch",
                              expected="one with batches that can be read several times")  # fmt: skip
        return batch

    def _begin(self) -> Any:
        self.generators = [generator.get_state() for generator in generators_in(self.loader)]
        set_epoch(self.loader, self.epoch + _STRIDE * self.number)
        if getattr(self.loader, "persistent_workers", False) and self.loader._iterator is None:
            with _drawing_from(f"{self.seed}/workers"):
                iter(self.loader)  # they draw their seed once, and the order of each pass comes after that
        # A sampler draws when it is asked for the first time.
        with _drawing_from(f"{self.seed}/{self.number}"):
            self.iterator = iter(self.loader)
            return next(self.iterator, _END)

    def state_dict(self) -> dict[str, Any]:
        state = {"pass": self.number, "used": self.used, "generators": self.generators}
        return state | ({"loader": self.loader.state_dict()} if self.used and has_state(self.loader) else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.used = state["pass"], state["used"]
        if not self.used:
            return
        for generator, saved in zip(generators_in(self.loader), state["generators"], strict=False):
            generator.set_state(saved)
        if "loader" in state and has_state(self.loader):
            self.generators = state["generators"]
            set_epoch(self.loader, self.epoch + _STRIDE * self.number)
            self.loader.load_state_dict(state["loader"])
            self.iterator = iter(self.loader)
            return
        self._begin()
        for _ in range(self.used - 1):
            next(self.iterator, _END)


@contextmanager
def _drawing_from(seed: str) -> Iterator[None]:
    """Within: torch on the CPU, Python and NumPy draw from `seed`."""
    before, number = random_state([]), random.Random(seed).getrandbits(32)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    try:
        yield
    finally:
        restore_random_state(before, [])


# --- One loader or several ---------------------------------------------------------------------------------------


def are_several(loaders: Any) -> bool:
    """Whether `loaders` is a dict, list or tuple of loaders. A list of batches is one loader."""
    if isinstance(loaders, list | tuple):
        are_loaders = [isinstance(each, DataLoader | CombinedLoader) for each in loaders]
        if any(are_loaders) and not all(are_loaders):
            other = loaders[are_loaders.index(False)]
            raise ConfigError(
                f"a list of loaders has a {type(other).__name__} in it", expected="a DataLoader",
                do="make one of it, or name the loaders in a dict",
            )  # fmt: skip
        return bool(loaders) and all(are_loaders)
    return isinstance(loaders, Mapping)


def joined(loaders: Any) -> Any:
    """Return what training reads of `loaders`: one batch of each for a step."""
    return CombinedLoader(loaders, "max_size_cycle") if are_several(loaders) else loaders


def one_by_one(loaders: Any) -> list[Any]:
    """Return the loaders that are evaluated one after the other."""
    if are_several(loaders):
        return CombinedLoader(loaders).flattened
    sequential = isinstance(loaders, CombinedLoader) and loaders.mode == "sequential"
    return loaders.flattened if sequential else [loaders]


def parts_of(loader: Any) -> list[Any]:
    """Return the loaders that `loader` combines, or `loader` alone."""
    return [p for each in loader.flattened for p in parts_of(each)] if isinstance(loader, CombinedLoader) else [loader]


def generators_in(loader: Any) -> list[torch.Generator]:
    """Return the generators of every part of `loader`."""
    return [generator for part in parts_of(loader) for generator in generators_of(part)]


def seeds_in(loader: Any) -> list[int]:
    """Return the seeds of the samplers of every part, and that of the draw between them."""
    if isinstance(loader, CombinedLoader):
        return [*(seed for part in loader.flattened for seed in seeds_in(part)), loader.seed]
    return [sampler.seed for sampler in seeded_samplers(loader)]


def restore_seeds_in(loader: Any, seeds: Iterable[int]) -> None:
    """Restore what `seeds_in` returned."""
    left = iter(seeds)
    if isinstance(loader, CombinedLoader):
        for part in loader.flattened:
            restore_seeds_in(part, left)
        loader.seed = next(left, loader.seed)
    else:
        for sampler, seed in zip(seeded_samplers(loader), left, strict=False):
            sampler.seed = seed


def has_state(loader: Any) -> bool:
    """Whether `loader` saves its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def length(loader: Any) -> float:
    """Return the number of batches of `loader`; inf if it does not tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf
