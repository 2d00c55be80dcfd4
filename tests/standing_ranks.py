"""Two gloo ranks that stay: tests call functions in them without forking, importing and starting again each time.

The ranks get the folder, the environment and the seed of the test that calls; after each call they leave the process
group. What a test has patched in its own process is not patched in them: such a test needs `run_in_processes`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from attrs import frozen

import starts
from stratagem.distributed.default_group import leave_group
from stratagem.errors import is_echo
from stratagem_testing import run_in_processes
from stratagem_testing.processes import LAUNCH_VARIABLES, ProcessesFailed

LIMIT_S = 360
#: How long the other rank may take to report its error after one has failed.
_GRACE_S = 1
#: Variables that a rank has from its start on.
_OWN = (
    *LAUNCH_VARIABLES, "OMP_NUM_THREADS", "STRATAGEM_EVIDENCE", "STRATAGEM_STORE_HOSTED", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


class StandingRanks:
    """Call it as `run_in_processes`, without the number of ranks: they start with the first call, and after an error."""

    def __init__(self) -> None:
        self._parent: int | None = None
        self._connections: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        request = pickle.dumps((function, arguments, os.getcwd(), dict(os.environ)))
        if self._parent is None:
            self._start()
        for connection in self._connections:
            connection.send_bytes(request)
        answers = self._answers()
        errors = [answer for answer in answers if isinstance(answer, _Failure)]
        if errors:
            self.close(kill=True)
            raise ProcessesFailed("\n".join(error.text for error in sorted(errors, key=lambda error: error.echo)))
        return answers

    def _answers(self) -> list[Any]:
        """Return what the ranks returned, or how they failed."""
        found = [_Failure(f"rank {rank} left without a result", echo=True) for rank in range(2)]
        waiting, limit_s = {connection: rank for rank, connection in enumerate(self._connections)}, LIMIT_S + 30
        while waiting and (ready := wait(waiting, limit_s)):
            for connection in ready:
                rank = waiting.pop(connection)
                with contextlib.suppress(EOFError, ConnectionError):
                    found[rank] = connection.recv()
                if isinstance(found[rank], _Failure):
                    limit_s = _GRACE_S
        return found

    def _start(self) -> None:
        pairs = [Pipe() for _ in range(2)]
        self._connections = [mine for mine, _ in pairs]
        with starts.uncounted():
            self._parent = os.fork()  # of the ranks: their store lives in it
        if self._parent == 0:
            os.setsid()
            for connection in self._connections:
                connection.close()
            with contextlib.suppress(BaseException):
                run_in_processes(_serve, 2, [theirs for _, theirs in pairs], limit_s=float("inf"))
            os._exit(0)
        for _, theirs in pairs:
            theirs.close()

    def close(self, kill: bool = False) -> None:
        """End the ranks."""
        if self._parent is not None:
            for connection in self._connections:
                connection.close()
            if kill:
                os.killpg(self._parent, signal.SIGKILL)
            os.waitpid(self._parent, 0)
            self._parent = None


@frozen
class _Failure:
    """How a rank failed; an `echo` is an error that another rank's caused."""

    text: str
    echo: bool


def _serve(rank: int, world_size: int, connections: list[Connection]) -> None:
    mine = connections[rank]
    connections[1 - rank].close()  # so that each end is closed when its rank dies
    own = {name: os.environ[name] for name in _OWN if name in os.environ}
    while True:
        try:
            function, arguments, folder, environment = pickle.loads(mine.recv_bytes())
        except EOFError:
            return
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment | own)
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            answer = pickle.dumps(function(rank, world_size, *arguments))
        except BaseException as error:
            answer = pickle.dumps(_Failure(f"--- rank {rank}\n{traceback.format_exc()}", echo=is_echo(error)))
        leave_group()
        faulthandler.cancel_dump_traceback_later()
        mine.send_bytes(answer)
