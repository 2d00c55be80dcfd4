"""After a failed collective: which rank is at fault, from what their endpoints answer and what they reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stratagem.errors import PeerError, is_echo
from stratagem_evidence import it_was, read_all, verdict
from stratagem_peer_diagnosis.endpoints import Answer, Endpoints, Peer, where_raised
from stratagem_peer_diagnosis.failure_reports import AT_ONCE_S, CAUSE_S, FailureReports

if TYPE_CHECKING:
    from pathlib import Path

    from stratagem.api import RunContext
    from stratagem_evidence import RankEvidence

_TIMED_OUT = re.compile(
    r"timed out (waiting|in blocking)|application timeout|timed? ?out after|operation timeout|before timing out",
    re.IGNORECASE,
)
#: NCCL tells the timeout in its description of the call, and then how long the call took.
_MILLISECONDS = re.compile(r"Timeout\(ms\)=(\d+)|(\d+) ?(?:ms|milliseconds)\b")
#: A message names so many ranks; of more, it has the number.
_NAMED = 4


def explain(
    error: BaseException, run: RunContext, endpoints: Endpoints | None, evidence: Path | None = None
) -> BaseException:
    """Return the cause of `error` if another rank is that, else `error`. The others learn what this rank ended with.

    Args:
        evidence: the folder in which the ranks of this machine write what they do.
    """
    reports = FailureReports(run.collectives, folder=evidence)
    if is_echo(error):
        if endpoints is None or isinstance(error, PeerError):
            return reports.read(CAUSE_S) or error
        return _look_around(error, run, endpoints, reports, evidence)
    if isinstance(error, Exception):
        reports.write(f"rank {run.rank} failed with {type(error).__name__}: {str(error).rstrip('.')}")
    return error


def _look_around(
    error: BaseException, run: RunContext, endpoints: Endpoints, reports: FailureReports, evidence: Path | None
) -> BaseException:
    """Return what another rank or this one knows of the cause of `error`, or `error` if that is nothing."""
    mine = endpoints.failed_in = where_raised(error)
    peers, (answers, reports.is_open) = endpoints.peers, endpoints.probe()
    if known := reports.read(AT_ONCE_S):
        return known
    doing = endpoints.ask(_alive(answers))
    elsewhere = {rank for rank, told in doing.items() if told.partition(" (")[0] != mine.partition(" (")[0]}
    far = {peer.rank for peer in peers if peer.port is not None} - answers.keys()
    present = _alive(answers) | far
    absent = present - reports.exchange(present)
    if beyond := endpoints.nearest(absent & far):
        answers |= endpoints.probe_ranks(beyond)
        doing |= endpoints.ask(_alive(answers) & beyond)
    absent &= _alive(answers)
    if elsewhere and waited_s(error, run):  # one whose patience has just ended may not be in its call any more
        absent = elsewhere & absent or elsewhere
    silent, gone = ([peer for peer in peers if answers.get(peer.rank) == kind] for kind in ("silent", "gone"))
    missing = [peer for peer in peers if peer.rank in absent]
    seen = {} if evidence is None else reports.gather(read_all(evidence), run.world)
    found = _by_evidence(run, seen, answers, {run.rank: mine, **doing})
    found = found or finding(error, run, silent, gone, missing, mine, doing, seen)
    # A timeout is first-hand news. A closed connection may be the work of a rank that is about to say more.
    if known := reports.read(AT_ONCE_S if found is not None and waited_s(error, run) else CAUSE_S):
        return known
    if found is None:
        return error
    reports.write_finding(found)
    found.__cause__ = error
    return found


def _by_evidence(
    run: RunContext, known: Mapping[int, RankEvidence], answers: Mapping[int, Answer], doing: Mapping[int, str]
) -> PeerError | None:
    """Return what the files of the ranks of this machine say; None if that is nothing."""
    for rank, told in known.items():
        told.is_gone = answers.get(rank) == "gone"
        told.place = doing.get(rank) or told.place
    if run.rank in known:
        known[run.rank].is_echo = True
    rules = ("differ", "stopped", "missing", "deadlock")
    found = verdict(known, (*rules, "ended") if any(told.called_exit for told in known.values()) else rules)
    return None if found is None else PeerError(found.found, do=found.do)


def _alive(answers: Mapping[int, Answer]) -> set[int]:
    return {rank for rank, answer in answers.items() if answer == "alive"}


def finding(
    error: BaseException, run: RunContext, silent: list[Peer], gone: list[Peer], missing: list[Peer], mine: str,
    doing: Mapping[int, str], seen: Mapping[int, RankEvidence],
) -> PeerError | None:  # fmt: skip
    """Return which ranks are at fault, as an error; None if none is, as far as this rank can tell."""
    rank, waited = run.rank, waited_s(error, run)
    expected = f"every rank to answer within the timeout of {waited:g} s"
    if silent:
        before = f"has heard nothing from {_names(silent)} for {waited:g} s, and cannot reach " if waited else ""
        them = _of(silent, "it", "them") if waited else f"cannot reach {_names(silent)}"
        return PeerError(
            f"rank {rank} {before}{them}" + (f"; {_are_gone(gone)}" if gone else ""),
            expected=expected if waited else "all ranks to stay until the end",
            do=f"look at {_of(silent, 'that machine', 'those machines')} and the link to it, or raise the timeout",
        )
    if gone:
        return PeerError(
            f"rank {rank} lost its connection: {_are_gone(gone)}{_before(gone, seen)}",
            expected="all ranks to stay until the end",
            do="the output of its process, or the log of its machine (out of memory?), may tell more",
        )  # fmt: skip
    if not waited:
        return None  # a network error of the user's own, perhaps: it stands
    differ = any(peer.rank in doing for peer in missing)
    return PeerError(
        f"rank {rank} has heard nothing from {_names(missing) if missing else 'the others'} for {waited:g} s in "
        f"{mine}{_calls(rank, mine, missing, doing)}; everybody's machine can be reached", expected=expected,
        do="make the same calls on all ranks; if one is only slow, raise the timeout" if differ else
        f"see what {_of(missing, 'that rank is', 'those ranks are')} doing: stuck, slow, or cut off until a moment "
        "ago; or raise the timeout",
    )  # fmt: skip


def _calls(rank: int, mine: str, missing: list[Peer], doing: Mapping[int, str]) -> str:
    """Tell what the `missing` ranks are doing, and which ranks left out a metric that another waits to reduce."""
    told = "".join(f"; rank {peer.rank} is in {doing[peer.rank]}" for peer in missing[:_NAMED] if peer.rank in doing)
    everybody = {rank: mine, **doing}
    logs = next((text.partition(" (")[0] for text in everybody.values() if text.startswith("log(")), None)
    if logs is None:
        return told
    without = [str(other) for other, text in sorted(everybody.items()) if not text.startswith(logs)]
    more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
    return f"{told}; rank {', '.join(without[:_NAMED])}{more} did not call {logs}" if without else told


def _are_gone(gone: list[Peer]) -> str:
    return f"{_names(gone)} {_of(gone, 'is', 'are')} gone"


def _before(gone: list[Peer], seen: Mapping[int, RankEvidence]) -> str:
    """Tell what one rank that is gone did last, if its files do."""
    return it_was(seen[gone[0].rank]) if len(gone) == 1 and gone[0].rank in seen else ""


def _names(peers: list[Peer]) -> str:
    *others, last = map(str, peers)
    if len(others) > _NAMED:
        return f"{', '.join(others[:_NAMED])} and {len(others) - _NAMED + 1} others"
    return f"{', '.join(others)} and {last}" if others else last


def _of(peers: list[Peer], one: str, several: str) -> str:
    return one if len(peers) == 1 else several


def waited_s(error: BaseException, run: RunContext) -> float:
    """Return how long this rank waited, if `error` says that its patience ended; 0 if another broke the connection."""
    if _TIMED_OUT.search(str(error)) is None:
        return 0.0
    told = _MILLISECONDS.search(str(error))
    return int(told[1] or told[2]) / 1000 if told else run.stack.timeouts().collective.total_seconds()
