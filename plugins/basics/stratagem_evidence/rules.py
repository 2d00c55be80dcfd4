"""Which rank made a run fail, and how: from what all ranks left behind.

[Note: verdict]
The rank that ends first is often the victim: gloo aborts a process that gets a message of another size than it waits
for. So what the ranks did decides, in this order:

1. *Differ.* Ranks count the collectives of each group, so the first number at which ranks of a group began different
   ones shows the mistake. More ranks are taken to be right than wrong; of two, both are named.
2. *Stopped.* A process that is stopped answers nobody.
3. *Missing.* A rank waits for those of its group that did not begin its last collective. Whom others wait for, and
   waits for nobody, is at fault: it ended, or does something else.
4. *Deadlock.* All that are waited for wait themselves.
5. *Beneath.* The same two rules for the collectives that torch recorded, if all ranks wrote these: C++ code begins
   some that no rank's ring has.
6. *Ended.* A process ended by a signal, or with code 0 before its program was over. SIGABRT counts last.
7. *Aborted.* A process ended by SIGABRT while it waited for ranks of which nothing is known: they are at fault.

A rank whose error is an echo is never at fault.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

from attrs import evolve, frozen

from stratagem_evidence.rank_evidence import RankEvidence
from stratagem_evidence.ring import Record, Site

#: A sentence names so many ranks; of more, it has the number.
_NAMED = 4

_EXIT = "look for sys.exit, exit or os._exit in the script and what it imports"
#: Exit codes of a process that KeyboardInterrupt ended.
INTERRUPTED = (130, -signal.SIGINT)
_EXITS = {0: "exited with code 0 before its training was over", **dict.fromkeys(INTERRUPTED, "was interrupted")}
_SAME_CALLS = "make the same calls on all ranks"


@frozen
class Verdict:
    """What made a run fail."""

    #: "differ", "stopped", "missing", "deadlock", "beneath", "ended" or "aborted".
    rule: str
    #: Those at fault; none if ranks of other machines are.
    ranks: tuple[int, ...]
    found: str
    do: str


def verdict(known: Mapping[int, RankEvidence], rules: tuple[str, ...] = ()) -> Verdict | None:
    """Return what made a run fail, from what is `known` of its ranks; None if that, or these `rules`, do not tell."""
    for rule in rules or _RULES:
        if (found := _RULES[rule](known)) is not None:
            return found
    return None


# --- 1. Differ ---------------------------------------------------------------------------------------------------


def _differ(known: Mapping[int, RankEvidence]) -> Verdict | None:
    begun = by_group(known)
    first: tuple[float, str, int] | None = None
    for group, ranks in begun.items():
        for number in _shared(ranks):
            records = {rank: records[number] for rank, records in ranks.items() if number in records}
            if len({record.site.signature for record in records.values()}) > 1:
                began = min(record.began for record in records.values())
                first = min(first or (began, group, number), (began, group, number))
                break
    return None if first is None else _difference(begun[first[1]], first[2])


def _difference(ranks: Mapping[int, Mapping[int, Record]], number: int) -> Verdict:
    sites = {rank: records[number].site for rank, records in ranks.items() if number in records}
    others, odd = _sides(sites)
    one, other = sites[odd[0]], sites[others[0]]
    here, there = _names(odd), _names(others)
    if _signature(ranks[others[0]], number + 1) == one.signature:
        found = f"{here} did not call {other}, which {there} called"
    elif _signature(ranks[odd[0]], number + 1) == other.signature:
        found = f"{here} called {one}, which {there} did not call"
    else:
        found = f"{here} called {one} where {there} called {other}"
    at_fault = (*odd, *others) if len(odd) == len(others) else odd
    return Verdict("differ", tuple(sorted(at_fault)), found, f"{_SAME_CALLS}, with equal sizes and dtypes")


def _sides(sites: Mapping[int, Site]) -> tuple[list[int], list[int]]:
    """Return the ranks that are taken to be right, then those that differ from them alike."""
    by: dict[object, list[int]] = {}
    for rank, site in sorted(sites.items()):
        by.setdefault(site.signature, []).append(rank)
    right, *wrong = sorted(by.values(), key=lambda ranks: (-len(ranks), ranks))
    return right, wrong[-1]


def _signature(records: Mapping[int, Record], number: int) -> object:
    return records[number].site.signature if number in records else None


def by_group(known: Mapping[int, RankEvidence]) -> dict[str, dict[int, dict[int, Record]]]:
    """Return the collectives by group, rank and number; a rank that began none of a group has an empty mapping."""
    groups: dict[str, dict[int, dict[int, Record]]] = {}
    for told in known.values():
        for record in told.records:
            ranks = groups.setdefault(record.site.group, {rank: {} for rank in record.site.ranks if rank in known})
            ranks[told.rank][record.number] = record
    return groups


def _shared(ranks: Mapping[int, Mapping[int, Record]]) -> Iterator[int]:
    """Return the numbers to compare, ascending: those from which on each ring still has all."""
    kept = [records for records in ranks.values() if records]
    return iter(range(max(map(min, kept)), max(map(max, kept)) + 1))


# --- 2. Stopped --------------------------------------------------------------------------------------------------


def _stopped(known: Mapping[int, RankEvidence]) -> Verdict | None:
    stopped = [each for each in known.values() if each.is_stopped]
    if not stopped:
        return None
    found = "; ".join(f"rank {each.rank} is stopped (process {each.process}){last_seen(each)}" for each in stopped)
    return Verdict(
        "stopped", tuple(each.rank for each in stopped), found, "see what sent it SIGSTOP, or leave the debugger"
    )


# --- 3. Missing --------------------------------------------------------------------------------------------------


def _missing(known: Mapping[int, RankEvidence]) -> Verdict | None:
    waits = _waits(known)
    if any(_was_ended(known[rank]) for rank in waits):
        return None
    free = sorted(_awaited(waits) - waits.keys())
    if not known.keys() >= set(free):
        return None  # those of another machine
    # A rank that another one's end broke off is at fault if all that ended otherwise were waiting for it.
    if first_hand := [rank for rank in free if not known[rank].is_echo]:
        return _absence(known, first_hand, waits)
    if not free or _ended_elsewhere(known, waits):
        return None
    return _alone(known, sorted(waits), waits, free) if len(waits) < len(free) else _absence(known, free, waits)


def _was_ended(told: RankEvidence) -> bool:
    """Whether something ended the process that has nothing to do with the other ranks: SIGABRT may have."""
    if told.ending is None:
        return told.is_gone and not told.is_echo
    return told.ending < 0 and told.ending != -signal.SIGABRT


def _deadlock(known: Mapping[int, RankEvidence]) -> Verdict | None:
    waits = _waits(known)
    cycle = sorted(_awaited(waits) & waits.keys())
    if not cycle or _awaited(waits) - waits.keys() or _ended_elsewhere(known, waits):
        return None
    alike: dict[tuple[Site, tuple[int, ...]], list[int]] = {}
    for rank in cycle:
        site, absent = waits[rank]
        alike.setdefault((site, tuple(sorted(absent))), []).append(rank)
    found = "; ".join(
        f"{_names(ranks)} {_verb(ranks)} for {_names([*absent])} in {site}"
        for (site, absent), ranks in sorted(alike.items(), key=lambda each: (len(each[1]), each[1]))
    )
    return Verdict("deadlock", tuple(cycle), found, f"{_SAME_CALLS}, in the same order over all groups")


def _waits(known: Mapping[int, RankEvidence]) -> dict[int, tuple[Site, set[int]]]:
    """Return the last collective of each rank that waits in it, and for which ranks: also those that are not known."""
    begun, waits = by_group(known), dict[int, tuple[Site, set[int]]]()
    for told in known.values():
        if told.records:
            last = told.records[-1]
            others = {rank: begun[last.site.group].get(rank, {}) for rank in last.site.ranks}
            if absent := {rank for rank, records in others.items() if max(records, default=-1) < last.number}:
                waits[told.rank] = last.site, absent
    return waits


def _awaited(waits: Mapping[int, tuple[Site, set[int]]]) -> set[int]:
    return {rank for _, absent in waits.values() for rank in absent}


def _alone(
    known: Mapping[int, RankEvidence], ranks: list[int], waits: Mapping[int, tuple[Site, set[int]]], others: list[int]
) -> Verdict:
    found = f"{_names(ranks)} called {waits[ranks[0]][0]}, which {_names(others)} did not call"
    return Verdict("missing", tuple(ranks), f"{found}; {_states(known, others)}", _SAME_CALLS)


def _ended_elsewhere(known: Mapping[int, RankEvidence], waits: Mapping[int, object]) -> bool:
    """Whether a process ended, of itself, where it waited for nobody."""
    return any((each.ending or each.is_gone) and not each.is_echo and each.rank not in waits for each in known.values())


def _absence(
    known: Mapping[int, RankEvidence], at_fault: list[int], waits: Mapping[int, tuple[Site, set[int]]]
) -> Verdict:
    waiting = sorted(rank for rank, (_, absent) in waits.items() if absent & set(at_fault))
    site, them = waits[waiting[0]][0], _names(at_fault)
    found = f"{them} did not call {site}, in which {_names(waiting)} {_verb(waiting)}"
    return Verdict("missing", tuple(at_fault), f"{found}; {_states(known, at_fault)}", _advice(known[at_fault[0]]))


# --- 5. Beneath --------------------------------------------------------------------------------------------------


def _beneath(known: Mapping[int, RankEvidence]) -> Verdict | None:
    calls = as_torch_recorded(known)
    found = _differ(calls) or _missing(calls)
    return None if found is None else evolve(found, rule="beneath")


def as_torch_recorded(known: Mapping[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Return what is `known` with the collectives that torch recorded; of no rank if one did not write them."""
    if not all(told.calls for told in known.values()):
        return {}
    return {rank: evolve(told, records=told.calls) for rank, told in known.items()}


# --- 6. Ended ----------------------------------------------------------------------------------------------------


def _ended(known: Mapping[int, RankEvidence]) -> Verdict | None:
    waits = _waits(known)
    ended = [each for each in known.values() if _ended_itself(each) and not _is_victim(each, waits)]
    ended.sort(key=lambda each: each.ending == -signal.SIGABRT)
    if not ended:
        return None
    return Verdict("ended", (ended[0].rank,), _state(ended[0]), _advice(ended[0]))


def _aborted(known: Mapping[int, RankEvidence]) -> Verdict | None:
    waits = _waits(known)
    aborted = [rank for rank, each in known.items() if _is_victim(each, waits)]
    if not aborted:
        return None
    site, absent = waits[aborted[0]]
    found = f"rank {aborted[0]} was killed by SIGABRT while it waited for {_names(sorted(absent))} in {site}"
    return Verdict("aborted", (), found, "see what the other machines say")


def _is_victim(told: RankEvidence, waits: Mapping[int, object]) -> bool:
    """Whether a library aborted the process, as it does where another rank is gone or sends something else."""
    return told.ending == -signal.SIGABRT and told.rank in waits


def _ended_itself(each: RankEvidence) -> bool:
    too_early = each.ending == 0 and (each.called_exit or not each.is_over)
    return bool(each.ending or each.is_gone or too_early) and not (each.is_echo or each.has_own_error)


# --- Words -------------------------------------------------------------------------------------------------------


def _states(known: Mapping[int, RankEvidence], ranks: list[int]) -> str:
    return "; ".join(_state(known[rank]) for rank in ranks[:_NAMED])


def _state(told: RankEvidence) -> str:
    """Tell how the process ended, or what it does, where, and what it did before."""
    code, rank = told.ending, told.rank
    if told.is_gone and code is None:
        return f"rank {rank} {'called sys.exit' if told.called_exit else 'is gone'}{it_was(told)}"
    if code is None or told.is_echo:
        return f"rank {rank} {'was' if told.is_echo else 'is'}{last_seen(told)}"
    if code in _EXITS:
        return f"rank {rank} {_EXITS[code]}{last_seen(told)}"
    if code < 0:
        why = " for lack of memory" if told.lacked_memory else ""
        return f"rank {rank} was killed by {signal_name(-code)}{why}{last_seen(told)}"
    return f"rank {rank} exited with code {code}{last_seen(told)}"


def signal_name(number: int) -> str:
    """Return the name of a signal: most of those for real-time use have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def it_was(told: RankEvidence) -> str:
    """Tell what a process that is gone did last, as the end of a sentence about it."""
    seen = last_seen(told)
    return f"; it was{seen}" if seen else ""


def last_seen(told: RankEvidence) -> str:
    """Tell the line or the phase, the batch, and the last collective if it belongs to that phase."""
    phase, last = told.phase, told.records[-1] if told.records else None
    words = f" in {told.place}" if told.place else f" in {phase.name}" if phase else ""
    if phase is not None:
        words += f" at step {phase.step}, batch {phase.batch}"
    if last is not None and (phase is None or last.began > phase.since):
        words += f", after {last.site}"
    return words


def _advice(told: RankEvidence) -> str:
    code = told.ending
    if told.called_exit:
        return _EXIT
    if code is None and told.is_gone:
        return "see how its process ended: in the launcher's summary, or in the kernel log (out of memory?)"
    if told.is_echo:
        return _SAME_CALLS
    if code is None:
        return f"{_SAME_CALLS}; if one is only slow, raise the timeout"
    if code == 0:
        return _EXIT
    if told.lacked_memory:
        return "raise the memory limit of the job, or use less: smaller batches, fewer workers of loaders"
    if code == -signal.SIGKILL:
        return "check the kernel log for an out-of-memory kill"
    return "check its stderr"


def _verb(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _names(ranks: list[int]) -> str:
    *others, last = (
        [*map(str, ranks[:_NAMED]), f"{len(ranks) - _NAMED} more"] if len(ranks) > _NAMED else map(str, ranks)
    )
    return f"rank {last}" if not others else f"ranks {', '.join(others)} and {last}"


_RULES = {
    "differ": _differ, "stopped": _stopped, "missing": _missing, "deadlock": _deadlock, "beneath": _beneath,
    "ended": _ended, "aborted": _aborted,
}  # fmt: skip
