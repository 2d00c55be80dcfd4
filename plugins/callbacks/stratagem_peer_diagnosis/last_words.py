"""Say why a run failed when an agent ends this process because another one died.

[Note: last words]
torchrun, srun and mpirun end all processes as soon as one has ended, with SIGTERM, and tell how that one ended: often
the victim. Nobody waits for what the others know. So a thread of each process gets SIGTERM first: the signal wakes it
through a file descriptor while the main thread may be waiting for other ranks. It marks this process as one that was
ended. The lowest rank of the machine that still runs then reads what all ranks of the machine have written, prints the
verdict, and all end by the signal. Over several machines these ranks exchange first what they have read. A program or a
plugin that handles SIGTERM itself is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from stratagem.distributed.launched import libc
from stratagem_evidence import EVIDENCE_VARIABLE, delete_evidence, in_words, judged, read_all

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from stratagem_evidence import RankEvidence, Recorder

    Known = dict[int, RankEvidence]

#: How long the others have to mark themselves.
_MARK_S = 0.3


class LastWords:
    """Listens for SIGTERM until it is closed."""

    def __init__(self, recorder: Recorder, gather: Callable[[Known], Known]) -> None:
        self._recorder, self._gather = recorder, gather
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._is_closed = False
        self._earlier = signal.signal(signal.SIGTERM, self._wake)
        self._earlier_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        libc()
        threading.Thread(target=self._listen, daemon=True, name="stratagem-last-words").start()

    @classmethod
    def listen(cls, recorder: Recorder, gather: Callable[[Known], Known] = dict) -> LastWords | None:
        """Listen from now on; return None where somebody else handles the signal, or outside of the main thread.

        Args:
            gather: what adds the evidence of other machines to that of this one.
        """
        in_main = threading.current_thread() is threading.main_thread()
        return cls(recorder, gather) if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None

    def close(self) -> None:
        """Leave the signal to whoever had it before. Safe to call in any thread: only the main one can."""
        if self._is_ours() and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._earlier_descriptor)
            signal.signal(signal.SIGTERM, self._earlier)
        if not self._is_closed:
            self._is_closed = True
            os.close(self._writer)

    def _is_ours(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._wake

    def _wake(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal where another library has taken the descriptor, or put this handler back too late."""
        if self._is_closed:
            _forget()
            os.kill(os.getpid(), number)
        else:
            os.write(self._writer, bytes([signal.SIGTERM]))

    def _listen(self) -> None:
        while (read := os.read(self._reader, 64)) and not (signal.SIGTERM in read and self._is_ours()):
            pass
        if read:
            self._speak()
        os.close(self._reader)

    def _speak(self) -> None:
        try:
            self._recorder.mark("told to end")
            if str(self._recorder.folder) == os.environ.get(EVIDENCE_VARIABLE):
                return  # this process launched the others: nobody ends it because one of them died
            self._recorder.write_calls()
            time.sleep(_MARK_S)
            here = read_all(self._recorder.folder)
            if self._recorder.rank != min(rank for rank, each in here.items() if each.runs or each.was_told_to_end):
                return
            judged(here)  # which processes are gone, for the other machines
            known = self._gather(here)
            sentence = judged(known)
            if not sentence or any(each.has_own_error for each in known.values()):
                for rank in here:
                    delete_evidence(self._recorder.folder, rank)  # all run, or one has printed its error
            else:
                print(in_words(sentence, self._recorder.folder), file=sys.stderr, flush=True)
        finally:
            libc().signal(signal.SIGTERM, signal.SIG_DFL)  # Python allows it in the main thread alone
            os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """In a forked child, whose end concerns nobody: the child would write into the pipe of its parent."""
    if isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), LastWords):
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
