"""The peers of a run as one of them sees them: which there are, which have the same weights; rounds of averaging.

[Note: histories]
Peers may come, go, and lose each other. Two peers have equal weights if they made the same steps with the same peers.
So each has a *history*: a hash of the previous history and of the peers with which it averaged. Only peers with the
same history form a group. A peer that sees another history with more steps downloads the state of that peer.

Each peer keeps a record in the distributed hash table under ``RUN_peers``: its history, its number of steps, and how
many samples it has in a batch. A record expires soon after its peer has died. A peer with an empty history is joining;
the others wait for it before they begin the next batch, but not for longer than the matchmaking time.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attrs import define, field, frozen

from stratagem.errors import ConfigError, LaunchError
from stratagem_hivemind.processes import Averager, PeerDHT, stop

_logger = logging.getLogger("stratagem_hivemind")
_POLL_S = 0.05


@frozen
class Record:
    """What a peer tells the others about itself."""

    peer: str
    history: str
    steps: int
    #: Samples between two of its backward passes that may end in a step.
    samples: int
    #: It was not given addresses of others.
    is_first: bool

    @property
    def priority(self) -> tuple[int, bool, str]:
        """Of peers that all have no history yet, the one for which this is smallest sets weights and history."""
        return -self.steps, not self.is_first, self.peer

    @property
    def progress(self) -> tuple[int, str]:
        """The largest of several histories is the one that all peers continue with."""
        return self.steps, self.history


@frozen
class Round:
    """The result of a round of averaging."""

    #: The averaged values; None if other peers went on without this one, which has to download their state.
    average: torch.Tensor | None
    peers: tuple[Record, ...] = ()


@define
class Swarm:
    """The other peers of a run. Used on rank 0 of a peer's processes."""

    dht: PeerDHT
    run_id: str
    matchmaking_s: float
    averaging_s: float
    verbose: bool
    is_first: bool
    history: str = ""
    steps: int = 0
    samples: int = 1
    #: Held while the state that others may download changes: from the optimizer step until schedulers have stepped.
    lock: threading.Lock = field(factory=threading.Lock)
    _in_step: bool = field(init=False, default=False)
    _pipe: threading.Lock = field(init=False, factory=threading.Lock)
    _averager: Averager | None = field(init=False, default=None)
    _values: torch.Tensor | None = field(init=False, default=None)
    _heartbeat: threading.Thread | None = field(init=False, default=None)
    _left: threading.Event = field(init=False, factory=threading.Event)
    _expires: float = field(init=False, default=0.0)
    _welcomed: set[str] = field(init=False, factory=set)
    #: The history before the last step, and the peers of that step: they may not have published their step yet.
    _previous: str | None = field(init=False, default=None)
    _members: set[str] = field(init=False, factory=set)
    #: The newest records of other peers, and when they expire.
    _known: dict[str, tuple[Record, float]] = field(init=False, factory=dict)

    @property
    def me(self) -> str:
        return str(self.dht.peer_id)

    @property
    def expiry_s(self) -> float:
        return max(4.0, 2 * self.matchmaking_s)

    # --- The start -----------------------------------------------------------------------------------------------

    def start_averager(
        self,
        size: int,
        dtype: torch.dtype,
        state: Callable[[], tuple[dict[str, Any], list[torch.Tensor]]],
        **options: Any,
    ) -> None:
        """Start the process that averages `size` values; it calls `state` for peers that join."""
        self._values = torch.zeros(size, dtype=dtype)
        self._averager = Averager(
            [self._values],
            self.dht,
            start=False,
            prefix=f"{self.run_id}_gradients",
            min_matchmaking_time=self.matchmaking_s,
            request_timeout=min(3.0, self.matchmaking_s / 2),
            allreduce_timeout=self.averaging_s,
            next_chunk_timeout=self.averaging_s,
            min_group_size=2,
            allow_state_sharing=False,
            **options,
        )
        self._averager.state_to_share = state
        self._averager.launch(60)

    def join(self, samples: int, min_peers: int, timeout_s: float) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Return the state of a peer that trains already, or None if this peer is the first.

        Raises:
            ConfigError: fewer than `min_peers` peers came within `timeout_s`.
        """
        self.samples, self.history = samples, ""
        self._left.clear()
        self._publish()
        self._heartbeat = threading.Thread(target=self._beat, daemon=True)
        self._heartbeat.start()
        deadline = time.monotonic() + timeout_s
        while True:
            records = self.records()
            if any(record.history for record in records):
                if (state := self.download()) is not None:
                    return state
            elif len(records) >= min_peers and min(record.priority for record in records) == self._record().priority:
                self._begin_history()
                return None
            if time.monotonic() > deadline and any(record.history for record in records):
                raise LaunchError(
                    f"no peer of the run {self.run_id!r} sent its state within {timeout_s:g} s",
                    expected="one that can be reached and is not in client_mode",
                    do="raise strategy.hivemind.wait_timeout, or check that the ports of the others are open",
                )
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"strategy.hivemind.min_peers is {min_peers}, and {len(records)} "
                    f"{'peer has' if len(records) == 1 else 'peers have'} come to the run {self.run_id!r} "
                    f"within {timeout_s:g} s",
                    expected="as many peers as that",
                    do="start them with the same run_id, with an address of this peer in initial_peers, or raise "
                    "strategy.hivemind.wait_timeout",
                )
            time.sleep(_POLL_S)

    def _begin_history(self) -> None:
        self.history = _hash(self.run_id, self.me, str(time.time_ns()))

    def share(self) -> None:
        """Offer this peer's state to others: it has a history now."""
        assert self._averager is not None
        if not self._averager.client_mode:
            self._averager.allow_state_sharing = True
        self._publish()

    def download(self) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Return the state of the peer with the most steps; None if none was received."""
        assert self._averager is not None
        self.history = ""
        self._averager.allow_state_sharing = False
        self._publish()
        try:
            state = self._averager.load_state_from_peers(timeout=self.averaging_s)
        except Exception as error:  # noqa: BLE001 - hivemind raises what its process raised
            _logger.debug("downloading the state failed: %r", error)
            return None
        return state or None

    def catch_up(self) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Return the state of the others; None if they are gone, and this peer goes on from its own state."""
        while True:
            if (state := self.download()) is not None:
                return state
            if not any(record.history for record in self.records()):
                self._begin_history()
                self.share()
                return None
            time.sleep(_POLL_S)

    def adopt(self, history: str, steps: int) -> None:
        """Continue from a downloaded state."""
        self.history, self.steps, self._previous = history, steps, None
        self.share()

    # --- Records -------------------------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return the records of all peers that are alive, this one among them."""
        from hivemind.utils import get_dht_time

        with self._pipe:
            found = self.dht.get(f"{self.run_id}_peers", latest=True)
        now = get_dht_time()
        # A node that is slow to answer is left out: its record is used until it expires.
        for peer, entry in found.value.items() if _is_dict(found) else ():
            if peer == self.me:
                continue
            if entry.value is None:
                self._known.pop(peer, None)
            elif peer not in self._known or entry.expiration_time >= self._known[peer][1]:
                self._known[peer] = Record(peer, *entry.value), entry.expiration_time
        self._known = {peer: known for peer, known in self._known.items() if known[1] > now}
        return [self._record(), *(record for record, _ in self._known.values())]

    def _record(self) -> Record:
        return Record(self.me, self.history, self.steps, self.samples, self.is_first)

    def _publish(self, *, leaving: bool = False) -> None:
        from hivemind.utils import get_dht_time

        with self._pipe:
            # A record replaces one that expires earlier.
            self._expires = max(get_dht_time() + self.expiry_s, self._expires + 1e-3)
            value = None if leaving else (self.history, self.steps, self.samples, self.is_first)
            self.dht.store(f"{self.run_id}_peers", value, self._expires, subkey=self.me)
        if self._averager is not None and not leaving and not self._averager.client_mode:
            self._averager.state_sharing_priority = self.steps + 1

    def _beat(self) -> None:
        while not self._left.wait(self.expiry_s / 4):
            self._publish()

    # --- Rounds --------------------------------------------------------------------------------------------------

    def average(self, values: torch.Tensor, weight: float) -> Round:
        """Average `values` with all peers of the same history; alone, return them as they are."""
        assert self._averager is not None
        assert self._values is not None
        deadline = time.monotonic() + self.averaging_s
        while True:
            records = self.records()
            if any(record.history and record.progress > (self.steps, self.history) for record in records):
                return Round(None)
            mates = [record for record in records if record.history == self.history or self._is_behind(record)]
            if len(mates) == 1 or time.monotonic() > deadline:
                if len(mates) > 1:
                    _logger.warning(
                        "no peer answered within %g s: this peer continues alone; raise strategy.hivemind."
                        "averaging_timeout if others are slower than that", self.averaging_s,
                    )  # fmt: skip
                return Round(values, (self._record(),))
            gathered = self._attempt(values, weight, len(mates))
            if gathered is not None:
                peers = tuple(
                    Record(str(peer), self.history, self.steps, samples, is_first=False)
                    for peer, samples in gathered.items()
                )
                if self.verbose:
                    print(f"hivemind: step {self.steps + 1} with {len(peers)} peers", flush=True)
                return Round(self._values.clone(), peers)

    def _attempt(self, values: torch.Tensor, weight: float, group_size: int) -> dict[Any, int] | None:
        assert self._averager is not None
        assert self._values is not None
        with self._averager.get_tensors():
            self._values.copy_(values)
        self._averager.prepare_round(_bits(self.history), group_size)
        try:
            gathered: dict[Any, int] | None = self._averager.step(
                gather=self.samples, weight=float(weight), timeout=self.matchmaking_s + 1, allow_retries=False
            )
        except Exception as error:  # noqa: BLE001 - hivemind raises what its process raised
            _logger.debug("a round of averaging failed: %r", error)
            return None
        return gathered

    def _is_behind(self, record: Record) -> bool:
        """Whether a peer of the last step has not published that it made this step."""
        return record.history == self._previous and record.peer in self._members

    def begin_step(self) -> None:
        """Hold back the state of this peer until `end_step`."""
        self.end_step()
        self.lock.acquire()
        self._in_step = True

    def end_step(self) -> None:
        """Offer the state after a step, if there was one since the last call, and wait for peers that are joining."""
        if self._in_step:
            self._release()
            self.welcome()

    def _release(self) -> None:
        if self._in_step:
            self._in_step = False
            self.lock.release()

    def advance(self, peers: Iterable[Record]) -> None:
        """Count a step that was made with `peers`."""
        self._members = {peer.peer for peer in peers}
        self._previous, self.history = self.history, _hash(self.history, *sorted(self._members))
        self.steps += 1

    def welcome(self) -> None:
        """Publish the new step, and wait for peers that are joining."""
        self._publish()
        deadline = time.monotonic() + self.matchmaking_s
        while True:
            records = self.records()
            joining = {record.peer for record in records if not record.history} - self._welcomed
            if not joining:
                return
            if time.monotonic() > deadline:
                self._welcomed |= joining  # waited for once only
            time.sleep(_POLL_S)

    # --- The end -------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the others that this peer leaves; wait until none of them needs what it sent in the last round."""
        self._release()
        if self._heartbeat is None:
            return
        self._left.set()
        self._heartbeat.join()
        self._heartbeat = None
        deadline = time.monotonic() + self.matchmaking_s
        while any(map(self._is_behind, self.records())) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        assert self._averager is not None
        self._averager.allow_state_sharing = False
        self._publish(leaving=True)

    def close(self) -> None:
        """End the process that averages."""
        if self._averager is not None:
            stop(self._averager)
            self._averager = None


def start_dht(initial_peers: list[str], timeout_s: float, **options: Any) -> PeerDHT:
    """Start a node of the distributed hash table.

    Raises:
        ConfigError: no peer answers at the given addresses.
        LaunchError: the node did not start for another reason.
    """
    dht = PeerDHT(initial_peers=initial_peers or None, start=False, startup_timeout=timeout_s, **options)
    dht.start()
    try:
        dht.wait_until_ready(timeout_s + 15)
    except Exception as error:
        stop(dht)
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        if initial_peers:
            raise ConfigError(
                f"strategy.hivemind.initial_peers is {initial_peers}, and no peer could be reached there "
                f"({reason[0][:200]})",
                expected="addresses of peers that run, as the first peer prints them",
                do="start that peer, and check that its port is open",
            ) from error
        raise LaunchError(
            f"hivemind's node did not start ({reason[0][:200]})", do="check strategy.hivemind.host_maddrs"
        ) from error
    return dht


def _is_dict(found: Any) -> bool:
    return found is not None and isinstance(found.value, dict)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _bits(history: str) -> str:
    return f"{int(history, 16):064b}"
