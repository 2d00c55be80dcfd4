"""A memory-mapped file with the last collectives that a process began, and what it is doing."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from attrs import frozen

from stratagem.api.run_parts import BATCH, PHASE, SINCE, STEP
from stratagem_evidence.memory_kills import kills_so_far

#: How many collectives a ring holds.
LAST = 512

_MAGIC = b"stratagem-ring-1"
_HEADER = struct.Struct("<16sIId")  # magic, rank, process, when it began
_PHASE = struct.Struct("<dddd")  # see `stratagem.api.run_parts`
_COUNT = struct.Struct("<Q")
_RECORD = struct.Struct("<QdI")  # number within the group, when it began, site
#: Why a process ends, as far as it knows.
ENDS = ("told to end", "echo", "own error", "exit", "over")
_END_AT, _COUNT_AT, _PHASE_AT, _RECORDS_AT, _STRIDE = 40, 48, 64, 128, 32
_SIZE = _RECORDS_AT + LAST * _STRIDE
#: The first line of a file that does not have it yet.
_NOTHING = '[[], ["", 0]]'


@frozen
class Site:
    """A collective at one place of the program, with one size of its tensor."""

    #: The function, with the rank that sends or receives if that is one: "broadcast(src=1)".
    op: str
    #: Which group it is over: its ranks, and "#2" for the second group of these ranks and so on.
    group: str
    ranks: tuple[int, ...]
    #: Elements that all ranks must agree on; None where they may differ.
    size: int | None
    dtype: str
    #: The user's line, and the call of it.
    place: str

    def __str__(self) -> str:
        what = self.op if self.op.endswith(")") else f"{self.op}()"
        what += "" if self.size is None else f" of {self.size:,} elements of {self.dtype}"
        return f"{what} ({self.place})" if self.place else what

    @property
    def signature(self) -> tuple[Any, ...]:
        """What must be equal on all ranks."""
        return self.op, self.size, self.dtype


@frozen
class Record:
    """A collective that a process began."""

    #: How many collectives over the same group the process began before.
    number: int
    began: float
    site: Site


@frozen
class Phase:
    """What a process is doing, as far as it said."""

    step: int
    batch: int
    name: str
    since: float


class Ring:
    """The writer: one for a process. A record takes about a microsecond."""

    def __init__(self, folder: Path, rank: int, phases: tuple[str, ...]) -> None:
        """Write ``RANK.ring`` and ``RANK.sites`` into `folder`, in place of those of an earlier run.

        Raises:
            OSError: there is no space for them.
        """
        self._sites_file = _replace(folder / f"{rank}.sites")
        ring = _replace(folder / f"{rank}.ring")
        try:
            os.posix_fallocate(ring, 0, _SIZE)  # a hole on a full disk would end the process with SIGBUS
            self._map = mmap.mmap(ring, _SIZE)
        finally:
            os.close(ring)
        #: Optimizer steps, batch, phase and since when, to be stored into. Runs may do so after `close`.
        self.activity = memoryview(self._map)[_PHASE_AT : _PHASE_AT + _PHASE.size].cast("d")
        self._words = memoryview(self._map).cast("Q")
        self._counts = itertools.count()
        #: By group, and by key: the next number, and the site's index.
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._known: dict[Any, tuple[itertools.count[int], int]] = {}
        os.write(self._sites_file, f"{json.dumps([phases, kills_so_far()])}\n".encode())
        _HEADER.pack_into(self._map, 0, _MAGIC, rank, os.getpid(), time.time())

    def begin(self, key: Any) -> bool:
        """Record a collective whose site is known by `key`; return False if it is not. Any thread may call it."""
        site = self._known.get(key)
        if site is None:
            return False
        numbers, index = site
        count = next(self._counts)
        _RECORD.pack_into(self._map, _RECORDS_AT + count % LAST * _STRIDE, next(numbers), time.time(), index)
        self._words[_COUNT_AT // 8] = count + 1  # last: what it counts is complete
        return True

    def add_site(self, key: Any, site: Site) -> None:
        """Make `site` known by `key`."""
        words = [site.op, site.group, site.ranks, site.size, site.dtype, site.place]
        os.write(self._sites_file, f"{json.dumps(words)}\n".encode())
        self._known[key] = (self._numbers[site.group], len(self._known))

    def enter(self, phase: int, step: int | None = None, batch: int = 0) -> None:
        """Record the begin of a phase, by its number in `phases`, from 1, of the same batch or of a new one."""
        if step is not None:
            self.activity[STEP], self.activity[BATCH] = step, batch
        self.activity[SINCE], self.activity[PHASE] = time.time(), phase

    def mark(self, end: str) -> None:
        """Record why this process is about to end: one of `ENDS`; "" if it goes on. What told it to end stays."""
        if self._map[_END_AT] != 1 + ENDS.index("told to end"):
            self._map[_END_AT] = ("", *ENDS).index(end)

    @property
    def ends(self) -> bool:
        """Whether this process has recorded why it ends."""
        return self._map[_END_AT] > 0

    def close(self) -> None:
        os.close(self._sites_file)


def _replace(path: Path) -> int:
    """Return the descriptor of an empty file at `path`; another process may still read the file that was there."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


@frozen
class Content:
    """What a ring holds."""

    process: int
    #: One of `ENDS`; "" if the process did not say that it ends.
    end: str
    phase: Phase | None
    #: The oldest first.
    records: list[Record]
    #: What `kills_so_far` returned as it began.
    kills: tuple[str, int]


def read_ring(path: Path) -> Content | None:
    """Return the content of a ring's file; None if `path` is another one.

    The process may write meanwhile: the record that it would replace next is left out.
    """
    content = path.read_bytes()
    if len(content) != _SIZE or not content.startswith(_MAGIC) or content[_END_AT] > len(ENDS):
        return None
    (phases, kills), sites = _read_sites(path.with_suffix(".sites"))
    process = _HEADER.unpack_from(content)[2]
    *numbers, since = _PHASE.unpack_from(content, _PHASE_AT)
    step, batch, phase = map(int, numbers)
    (count,) = _COUNT.unpack_from(content, _COUNT_AT)
    records = []
    for index in range(max(0, count - LAST + 1), count):
        number, began, site = _RECORD.unpack_from(content, _RECORDS_AT + index % LAST * _STRIDE)
        if site < len(sites):
            records.append(Record(number, began, sites[site]))
    known = 0 < phase <= len(phases)
    return Content(
        process, ("", *ENDS)[content[_END_AT]], Phase(step, batch, phases[phase - 1], since) if known else None,
        records, (kills[0], kills[1]),
    )  # fmt: skip


def _read_sites(path: Path) -> tuple[tuple[list[str], tuple[str, int]], list[Site]]:
    first, *others = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] or [_NOTHING]
    parsed = [json.loads(line) for line in others]
    return json.loads(first), [
        Site(op, group, tuple(ranks), size, dtype, place) for op, group, ranks, size, dtype, place in parsed
    ]
