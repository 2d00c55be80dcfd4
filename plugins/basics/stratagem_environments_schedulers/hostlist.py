"""SLURM's lists of hosts ("gpu[01-03,7],login-[1-2]x") and of counts ("4(x2),1")."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from stratagem.errors import ConfigError

#: More hosts than this are taken for a mistake: a list of a few characters could name billions.
MAX_HOSTS = 65536


def expand(text: str, name: str) -> list[str]:
    """Return the hosts of a host list, in its order; `name` is the variable that holds it, for messages.

    Raises:
        ConfigError: `text` is not a host list.
    """
    hosts: list[str] = []
    for part in _split(text, name):
        pieces = [_choices(piece, text, name) for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+", part)]
        hosts += itertools.islice(("".join(each) for each in itertools.product(*pieces)), MAX_HOSTS + 1)
        if len(hosts) > MAX_HOSTS:
            raise _wrong(text, name, f"at most {MAX_HOSTS} hosts")
    return hosts


def expand_counts(text: str, name: str) -> list[int]:
    """Return the count of each node: ``"2(x2),1"`` is [2, 2, 1].

    Raises:
        ConfigError: `text` is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part, re.ASCII)
        if found is None or int(found[1]) < 1 or not 1 <= int(found[2] or 1) <= MAX_HOSTS:
            raise _wrong(text, name, 'the number of tasks of each node, such as "2(x3),1"')
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str, name: str) -> list[str]:
    """Split at commas and blanks outside of brackets."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],\s])+", text)
    if not parts or re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", text)):
        raise _wrong(text, name, _GRAMMAR)
    return parts


def _choices(piece: str, text: str, name: str) -> Iterator[str]:
    """Return what may stand in place of one piece: the numbers of a bracket, or the plain text itself."""
    if not piece.startswith("["):
        return iter([piece])
    return itertools.chain.from_iterable(_numbers(each, text, name) for each in piece[1:-1].split(","))


def _numbers(text: str, whole: str, name: str) -> Iterator[str]:
    found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", text, re.ASCII)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise _wrong(whole, name, _GRAMMAR)
    if int(found[2] or found[1]) - int(found[1]) >= MAX_HOSTS:
        raise _wrong(whole, name, f"at most {MAX_HOSTS} hosts")
    width = len(found[1])
    return (f"{number:0{width}d}" for number in range(int(found[1]), int(found[2] or found[1]) + 1))


_GRAMMAR = 'a list of hosts, such as "gpu[01-03,7],login2"'


def _wrong(text: str, name: str, expected: str) -> ConfigError:
    return ConfigError(f"{name} is {text!r}", expected=expected, do="start the program with srun, which sets it")
