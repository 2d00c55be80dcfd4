"""What is known about each rank of a run that failed: its files, how its process ended, and what others saw."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import cattrs
from attrs import define, evolve, field

from stratagem_evidence.folder import delete_evidence
from stratagem_evidence.memory_kills import killed_since
from stratagem_evidence.recorder import ASK_FOR_STACK
from stratagem_evidence.ring import Phase, Record, read_ring
from stratagem_evidence.torch_calls import read_calls
from stratagem_evidence.users_files import users_frame

#: How long a process may take to write its stack.
_STACK_S = 0.5
#: So many collectives of each rank go to other machines.
_SENT = 64


@define(kw_only=True)
class RankEvidence:
    """What is known about one rank."""

    rank: int
    process: int
    phase: Phase | None = None
    #: The last collectives that it began, oldest first.
    records: list[Record] = field(factory=list)
    #: The last ones that torch recorded, C++ code's among them; none if the process did not write them.
    calls: list[Record] = field(factory=list)
    #: Where its program is or was, "file:line (function)"; "" if nobody knows.
    place: str = ""
    #: The exit code of its process, negative for a signal; None if it runs, or nobody knows.
    ending: int | None = None
    #: Its process is not there any more, however it ended.
    is_gone: bool = False
    #: Its program has come to its end, or has ended all that it had begun with a trainer.
    is_over: bool = False
    #: The kernel killed it for lack of memory.
    lacked_memory: bool = False
    #: Its process is there, on this machine.
    runs: bool = False
    #: Its process is stopped, by SIGSTOP or by a debugger.
    is_stopped: bool = False
    #: It ended with an error that it reported: its own, which then is the cause, or one that another rank caused.
    is_echo: bool = False
    #: A signal has told it to end.
    was_told_to_end: bool = False
    #: It called sys.exit.
    called_exit: bool = False
    #: It ended with an error of its own.
    has_own_error: bool = False
    #: What a callback found about it while it trained; "" if nothing.
    note: str = ""


def as_text(known: Mapping[int, RankEvidence]) -> str:
    """Return what is `known`, for another machine."""
    return json.dumps(
        cattrs.unstructure(
            [evolve(told, records=told.records[-_SENT:], calls=told.calls[-_SENT:]) for told in known.values()]
        )
    )


def from_text(text: str) -> dict[int, RankEvidence]:
    """Return what another machine knows, from what its `as_text` returned."""
    return {told.rank: told for told in cattrs.structure(json.loads(text), list[RankEvidence])}


def read_all(folder: Path) -> dict[int, RankEvidence]:
    """Return what is known of each rank that has written into `folder`."""
    found = {}
    for path in folder.glob("*.ring"):
        with contextlib.suppress(OSError, ValueError):  # a rank may just replace its files
            if (content := read_ring(path)) is not None:
                stacks = path.with_suffix(".stack")
                stack = stacks.read_text() if stacks.exists() else ""
                note = path.with_suffix(".note")
                state = _state(content.process)
                runs = state not in ("", "Z", "X")
                ending = None if runs else _fatal(stack)
                lacked_memory = not runs and ending is None and not content.end and killed_since(*content.kills)
                found[int(path.stem)] = RankEvidence(
                    rank=int(path.stem), process=content.process, phase=content.phase, records=content.records,
                    calls=read_calls(folder, int(path.stem)),
                    place=_place(stack), ending=-signal.SIGKILL if lacked_memory else ending, runs=runs,
                    lacked_memory=lacked_memory,
                    is_stopped=state in ("T", "t"), was_told_to_end=content.end == "told to end",
                    is_echo=content.end == "echo", has_own_error=content.end == "own error",
                    called_exit=content.end == "exit", is_over=content.end == "over" and ending is None,
                    note=note.read_text() if note.exists() else "",
                )  # fmt: skip
    return found


def delete_if_all_exited(folder: Path) -> None:
    """Delete the evidence in `folder` if each rank that left some called sys.exit: nobody will read it."""
    known = read_all(folder)
    if all(told.called_exit for told in known.values()):
        for rank in known:
            delete_evidence(folder, rank)


def ask_for_stacks(folder: Path, processes: Iterable[tuple[int, int]]) -> None:
    """Have each of `processes`, (rank, process), write its Python stack, if it can; wait for that a short while."""
    waiting = []
    for rank, process in processes:
        path = folder / f"{rank}.stack"
        if (
            ASK_FOR_STACK is not None
            and path.exists()
            and not path.stat().st_size
            and _state(process) not in ("T", "t")
        ):
            with contextlib.suppress(OSError):
                os.kill(process, ASK_FOR_STACK)
                waiting.append(path)
    deadline = time.monotonic() + _STACK_S
    while any(not path.stat().st_size for path in waiting) and time.monotonic() < deadline:
        time.sleep(0.01)


def _state(process: int) -> str:
    """Return the state of a process of this machine, as /proc has it; "" if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


_FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def _fatal(stack: str) -> int | None:
    """Return the exit code of a process whose `stack` was written at a fatal signal; None if it was not."""
    words = re.match(r"Fatal Python error: (.*)", stack)
    return next((-number for number in _FATAL if words and words[1] == signal.strsignal(number)), None)


def _place(stack: str) -> str:
    """Return the user's line in what `faulthandler` wrote: of the thread that failed, or the main one."""
    threads = re.split(r"^(?=(?:Current t|T)hread )", stack, flags=re.MULTILINE)
    for thread in sorted(threads[:0:-1], key=lambda text: not text.startswith("Current")):
        frame = users_frame((each[1], int(each[2]), each[3]) for each in _FRAME.finditer(thread))
        if frame is not None:
            return f"{os.path.basename(frame[0])}:{frame[1]} ({frame[2]})"
    return ""
