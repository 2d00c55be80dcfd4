"""The variables by which horovodrun tells a process its place, and the place that they tell."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.api import World
from stratagem.errors import ConfigError

RANK, SIZE = "HOROVOD_RANK", "HOROVOD_SIZE"
LOCAL_RANK, LOCAL_SIZE = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
#: The number of this host among those with a process of the same local rank, and how many these are.
HOST, NUM_HOSTS = "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"
#: Horovod's rendezvous server, which runs as long as horovodrun does.
SERVER, SERVER_PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"

ALL = (RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, HOST, NUM_HOSTS, SERVER, SERVER_PORT)


def read_place(variables: Mapping[str, str]) -> World:
    """Return the ranks and counts of this process; not yet where rank 0 is.

    Raises:
        ConfigError: a variable is missing or no number, they contradict each other, or the job is elastic.
    """
    if variables.get("HOROVOD_ELASTIC") == "1":
        raise ConfigError(
            "HOROVOD_ELASTIC is '1', so the number of processes may change", expected="a fixed number",
            do="start horovodrun without --min-np, --max-np and --host-discovery-script, or use torchrun, whose "
            "elastic jobs are supported",
        )  # fmt: skip
    rank, local_rank, host = (number(variables, name) for name in (RANK, LOCAL_RANK, HOST))
    size, local_size, hosts = (number(variables, name, least=1) for name in (SIZE, LOCAL_SIZE, NUM_HOSTS))
    if size != local_size * hosts:
        raise ConfigError(
            f"{seen(variables, (SIZE, LOCAL_SIZE, NUM_HOSTS))}", expected="as many processes on each host",
            do="give each host as many slots to horovodrun: -H host1:4,host2:4",
        )  # fmt: skip
    for name, value, limit in ((RANK, rank, size), (LOCAL_RANK, local_rank, local_size), (HOST, host, hosts)):
        if value >= limit:
            raise ConfigError(f"{name} is {value}", expected=f"0 to {limit - 1}", do="start it with horovodrun")
    return World(
        rank=rank, local_rank=local_rank, node_rank=host, world_size=size, local_world_size=local_size, num_nodes=hosts
    )


def number(variables: Mapping[str, str], name: str, least: int = 0) -> int:
    """Return the number in variable `name`.

    Raises:
        ConfigError: it is not set, not a number, or below `least`.
    """
    text = variables.get(name)
    if text is None or not text.strip().isdecimal() or int(text) < least:
        found = f"{name} is not set" if text is None else f"{name} is {text!r}"
        raise ConfigError(
            found, expected=f"a whole number, {least} or more, as horovodrun sets it",
            do="start the program with horovodrun",
        )  # fmt: skip
    return int(text)


def maybe(variables: Mapping[str, str], name: str) -> int | None:
    """Return the number in variable `name`; None if there is none, for `detect`, which must not raise."""
    text = variables.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def seen(variables: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return those of `names` that are set, with their values, for a message."""
    return " and ".join(f"{name} is {variables[name]!r}" for name in names if name in variables)
