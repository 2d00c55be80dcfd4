"""hivemind's background processes, which end when the process that trains does: also when it is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from concurrent.futures import Future
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.dht import DHT

#: How often a process looks whether its parent is alive, where the system has no descriptors of processes.
_POLL_S = 0.5


def _end_with(parent: int) -> None:
    """Kill this process, and those that it started, once the process `parent` is gone. Returns at once."""
    os.setpgid(0, 0)  # p2pd is in this group, too; Ctrl-C in a terminal does not reach it

    def wait() -> None:
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(parent)
            if os.getppid() == parent:
                select.select([descriptor], [], [])
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class PeerDHT(DHT):  # type: ignore[misc]  # hivemind has no types
    """A node of the distributed hash table, with the daemon (p2pd) that connects to other peers."""

    def run(self) -> None:
        _end_with(self._parent_pid)
        super().run()


class Averager(DecentralizedAverager):  # type: ignore[misc]
    """Averages tensors within groups of a chosen size, with peers of the same history."""

    #: Returns metadata and tensors for a peer that joins.
    state_to_share: Any = None

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with(self._parent_pid)
        super().run()

    def launch(self, timeout_s: float) -> None:
        """Start the process. Unlike hivemind's method, this one leaves SIGINT of the calling process alone."""
        self.start()
        self.wait_until_ready(timeout_s)

    def get_current_state(self) -> Any:
        return self.state_to_share()

    def prepare_round(self, bits: str, group_size: int) -> None:
        """Look for `group_size` peers with the same `bits` in the next round."""
        from hivemind.utils import MPFuture

        future: Future[None] = MPFuture()
        self._outer_pipe.send(("_prepare_round", [], {"bits": bits, "group_size": group_size, "future": future}))
        future.result(timeout=60)

    async def _prepare_round(self, bits: str, group_size: int, future: Future[None]) -> None:
        matchmaking = self._matchmaking
        matchmaking.group_key_manager.group_bits = bits
        # A group forms at once when it has this size, and after the matchmaking time when it is smaller.
        matchmaking.target_group_size = matchmaking.potential_leaders.target_group_size = group_size
        future.set_result(None)


def stop(process: Any) -> None:
    """Shut `process` down; kill what is left of it."""
    pid = process.pid
    if process.is_alive():
        with contextlib.suppress(Exception):
            process.shutdown()
    process.join(5)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    process.join(5)
