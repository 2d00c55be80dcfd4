"""Ports for servers that a test has others start."""

from __future__ import annotations

import itertools
import os
import socket

#: Below those that systems give to whoever asks for any: between `free_port` and the server's start, nobody takes them.
FIRST, LAST = 20_000, 29_000

_candidates = itertools.cycle(range(FIRST, LAST))
_taken: list[socket.socket] = []
next(itertools.islice(_candidates, os.getpid() * 89 % (LAST - FIRST), None))


def free_port() -> int:
    """Return a TCP port of loopback that no server has and that no other process of tests was given.

    A UDP socket with the same number, open until this process ends, tells the other processes.
    """
    for port in _candidates:
        taken = socket.socket(type=socket.SOCK_DGRAM)
        try:
            taken.bind(("127.0.0.1", port))
            with socket.create_server(("", port)):
                _taken.append(taken)
                return port
        except OSError:
            taken.close()
    raise AssertionError("unreachable: candidates have no end")
