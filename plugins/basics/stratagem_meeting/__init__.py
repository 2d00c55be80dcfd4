"""Let all ranks meet before they join a group: each mistake is one sentence on all of them, and not a hang.

With different settings on two ranks collectives do not match: a hang, or an abort far from the cause. So ranks compare
their world, versions, resolved plugins and devices before they join a group. The meeting is described in
[Note: meeting] of `stratagem.distributed.rendezvous`. The engine calls `meet`, or `tell` in a process that an error
ends before (entry-point group ``stratagem.meeting``).
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attrs import define, field

from stratagem.distributed.probe import Notices, notify
from stratagem.distributed.rendezvous import Meeting
from stratagem.errors import LaunchError, PeerError, StratagemError
from stratagem_meeting import arrivals
from stratagem_meeting.arrivals import Arrival
from stratagem_meeting.early_errors import tell

if TYPE_CHECKING:
    from stratagem.api.world import World

__all__ = ["meet", "tell"]

#: Clocks that differ by more are mentioned: file times decide which checkpoint is the newest.
CLOCKS_S = 10.0

#: How much longer than rank 0 the others wait, for what rank 0 found.
_GRACE_S = 5.0

#: How many meetings this process has had; the same on all ranks.
_meetings = 0


def meet(
    world: World, facts: Mapping[str, Any], timeout: timedelta,
    device: tuple[str, str] | None = None, *, may_share_device: bool = False,
) -> World:  # fmt: skip
    """Wait until all ranks are here, and compare `facts`, worlds, devices and clocks. All ranks call it.

    Returns `world`, with a generation that this attempt of a restarted run has alone.

    Args:
        facts: what must be equal on all ranks, by name.
        timeout: how long to wait for the others.
        device: what tells this rank's device from all others, and its model.
        may_share_device: several ranks may have one device.

    Raises:
        ConfigError: on every rank, with the rank and the first differences.
        LaunchError: the store cannot be reached or hosted, or some ranks did not come within `timeout`.
        PeerError: another rank failed before it came.
    """
    import torch.distributed as dist

    if world.generation is None:
        from stratagem_meeting.attempts import agree_on_generation

        world = agree_on_generation(world, timeout)
    assert world.generation is not None, "it was agreed on"
    store, where = _store(world, timeout)
    if store is None:
        return world
    global _meetings
    _meetings += 1
    text = json.dumps(dict(facts), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    me = Arrival.of(world, digest, device, may_share_device=may_share_device)
    try:
        _Participant(Meeting(store, world.generation, _meetings), world, me, text, timeout, where).agree()
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} lost the store at {where} while it waited for the others "
            f"({str(error).splitlines()[0]})",
            expected="rank 0 to stay",
            do="see the output of rank 0",
        ) from error
    return world


def _store(world: World, timeout: timedelta) -> tuple[Any, str]:
    """Return a store that all ranks use, and its address; None if there is none, or they cannot meet there."""
    import torch.distributed as dist

    from stratagem.distributed.default_group import default_store
    from stratagem.distributed.store import open_store

    if dist.is_initialized():  # by the user, or for an earlier run of this process
        same = dist.get_world_size() == world.world_size
        return default_store() if same else None, "the existing process group"
    if world.main_port is None:
        return None, ""
    return open_store(world, timeout), f"{world.main_address}:{world.main_port}"


@define(eq=False)
class _Participant:
    """This process at one meeting."""

    meeting: Meeting
    world: World
    me: Arrival
    #: What must be equal on all ranks, as JSON.
    facts: str
    timeout: timedelta
    #: Where the ranks meet, for messages.
    where: str
    _notices: Notices = field(init=False, factory=Notices)
    #: The number of this process's arrival.
    _number: int = field(init=False, default=0)
    #: Rank 0: those that have arrived, by rank.
    _arrived: dict[int, Arrival] = field(init=False, factory=dict)

    def agree(self) -> None:
        """Arrive, wait for the verdict, and raise it if it is an error."""
        self._number = self.meeting.arrive(self.me.to_json(), self.facts)
        verdict = self._lead() if self.world.rank == 0 else self._await_verdict()
        self.meeting.acknowledge()
        if "kind" in verdict:
            if self.world.rank == 0 and not self.world.store_hosted:  # the store ends with this process
                self.meeting.wait_for_readers(self.world.world_size, _GRACE_S)
            raise arrivals.error_from_json(verdict)
        if self._number > verdict["agreed"]:
            raise self._too_late(verdict["agreed"])
        if self.world.local_rank == 0 and verdict["host"] != self.me.host:
            self._compare_clocks(verdict)

    # --- Rank 0 --------------------------------------------------------------------------------------------------

    def _lead(self) -> dict[str, Any]:
        """Read the arrivals until all ranks are here, and write the verdict."""
        try:
            count = self._read_arrivals()
            verdict: dict[str, Any] = {"agreed": count, "host": self.me.host, "time": time.time()}
        except StratagemError as error:
            verdict = arrivals.error_to_json(error)
        except BaseException as error:
            told = PeerError(f"{self.me} ended with {type(error).__name__} while it waited for the others")
            self.meeting.conclude(arrivals.error_to_json(told))
            raise
        verdict = self.meeting.conclude(verdict)  # before the warning, which may be an error
        if note := arrivals.different_models(self._arrived.values()):
            warnings.warn(note, stacklevel=2)
        return verdict

    def _read_arrivals(self) -> int:
        """Return the number of arrivals, all of which are fine.

        Raises:
            StratagemError: for all ranks.
        """
        number, pause_s = 0, 0.001
        while len(self._arrived) < self.world.world_size:
            found = self.meeting.arrival(number + 1)
            if found is not None:
                number, pause_s = number + 1, 0.001
                self._admit(found, number)
                continue
            if self._notices.due():
                notify(f"waiting for {self._missing(self._arrived)} at {self.where}")
            if self._notices.waited_s > self.timeout.total_seconds():
                raise self._waited_in_vain("rank 0", self.timeout.total_seconds(), self._arrived)
            time.sleep(pause_s)
            pause_s = min(0.01, 1.5 * pause_s)
        return number

    def _admit(self, found: dict[str, Any], number: int) -> None:
        """Add an arrival to those that are fine, or raise an error for all ranks."""
        if "failed" in found:
            raise PeerError(found["failed"], do="this rank stops with it")
        new = Arrival(**found)
        facts = self.meeting.facts(number) if new.digest != self.me.digest else self.facts
        zero_facts = json.loads(self.facts)
        if error := arrivals.problem(new, json.loads(facts), self.me, zero_facts, self._arrived.values()):
            raise error
        self._arrived[new.rank] = new

    def _waited_in_vain(self, who: str, waited_s: float, arrived: Mapping[int, Arrival]) -> LaunchError:
        return LaunchError(
            f"{who} has waited {waited_s:g} s for {self._missing(arrived)} at {self.where}",
            expected="all ranks to come in time",
            do="check that they were started and what their output says, or raise the strategy's start_timeout",
        )

    def _missing(self, arrived: Mapping[int, Arrival]) -> str:
        size = self.world.world_size
        return f"{arrivals.ranks_in_words(set(range(size)) - set(arrived))} of {size}"

    # --- The other ranks -----------------------------------------------------------------------------------------

    def _await_verdict(self) -> dict[str, Any]:
        limit_s, pause_s = self.timeout.total_seconds() + _GRACE_S, 0.001
        longest_s = max(0.01, self.world.world_size * 1e-4)  # many ranks ask one store
        while (verdict := self.meeting.verdict()) is None:
            if self._number == 1 and self._notices.due() and 0 not in (arrived := self._read_all()):
                notify(f"waiting for {self._missing(arrived)} at {self.where}")
            if self._notices.waited_s > limit_s:
                error = self._waited_in_vain(str(self.me), limit_s, self._read_all())
                self.meeting.fail(error.found)
                raise error
            time.sleep(pause_s)
            pause_s = min(longest_s, 1.5 * pause_s)
        return verdict

    def _read_all(self, count: int | None = None) -> dict[int, Arrival]:
        """Return the first `count` arrivals by rank; by default all until now."""
        arrived, number = {}, 1
        while (count is None or number <= count) and (found := self.meeting.arrival(number)) is not None:
            if "failed" not in found:
                arrived[found["rank"]] = Arrival(**found)
            number += 1
        return arrived

    def _too_late(self, count: int) -> StratagemError:
        """Return the error for a process that came after all ranks had met."""
        arrived = self._read_all(count)
        at = f"; the ranks that met at {self.where} train already"
        error = arrivals.error_of_late_rank(self.me, arrived[0], arrived.values())
        return type(error)(error.found + at, expected=error.expected, do=error.do)

    def _compare_clocks(self, verdict: Mapping[str, Any]) -> None:
        ahead_s = time.time() - verdict["time"]
        if abs(ahead_s) > CLOCKS_S:
            warnings.warn(
                f"the clock of {self.me.host} (rank {self.me.rank}) is {abs(ahead_s):.0f} s "
                f"{'ahead of' if ahead_s > 0 else 'behind'} that of {verdict['host']} (rank 0), and the newest "
                "checkpoint is found by its time; synchronize them (NTP)",
                stacklevel=2,
            )
