"""What the environments of this package share: numbers in variables, addresses, comparison with the run."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from stratagem.api import Confidence, Evidence, World
from stratagem.distributed.process_variables import launched_world, was_launched
from stratagem.errors import ConfigError

if TYPE_CHECKING:
    from stratagem.api import RunContext

#: Ports that are derived from a job: above those of services, below those that Linux gives to clients.
_FIRST_PORT, _NUM_PORTS = 15000, 15000


def count(variables: Mapping[str, str], name: str, *, least: int = 0) -> int:
    """Return the number in variable `name`.

    Raises:
        ConfigError: it is not set, not a number, or below `least`.
    """
    text = variables.get(name)
    if text is None:
        raise ConfigError(f"{name} is not set", expected=f"a whole number, {least} or more", do=_SET_BY_STARTER)
    if not text.strip().isdecimal() or int(text) < least:
        raise ConfigError(f"{name} is {text!r}", expected=f"a whole number, {least} or more", do=_SET_BY_STARTER)
    return int(text)


_SET_BY_STARTER = (
    "start the program with what sets it, or export RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each "
    'process and set environment="local"'
)


def maybe(variables: Mapping[str, str], name: str | None) -> int | None:
    """Return the number in variable `name`; None if there is none, for `detect`, which must not raise."""
    text = variables.get(name or "", "").strip()
    return int(text) if text.isdecimal() else None


def seen(variables: Mapping[str, str], names: Iterable[str | None]) -> str:
    """Return those of `names` that are set, with their values, for a message."""
    return " and ".join(f"{name} is {variables[name]!r}" for name in names if name is not None and name in variables)


def evidence_in(
    variables: Mapping[str, str], names: Iterable[str | None], missing: list[str], *, rank: str | None = None,
    size: str | None = None,
) -> Evidence:  # fmt: skip
    """Return the evidence of a process that a scheduler started, which is certain if no variable is missing.

    Args:
        names: the variables that prove it.
        missing: those that such a process has, and this one has not.
        rank: the variable with the rank.
        size: the variable with the number of processes.
    """
    return Evidence(
        seen(variables, names) + (f" and {', '.join(missing)} not set" if missing else ""),
        Confidence.PARTIAL if missing else Confidence.CERTAIN,
        rank=maybe(variables, rank),
        world_size=maybe(variables, size),
    )


def check_rank(rank: int, size: int, rank_name: str, size_name: str) -> None:
    """Refuse a rank that is not below its count."""
    if rank >= size:
        raise ConfigError(f"{rank_name} is {rank} and {size_name} is {size}", expected=f"0 to {size - 1}")


def main_port(variables: Mapping[str, str], default: int) -> int:
    """Return the port that the user exported, else `default`.

    Raises:
        ConfigError: it is not a port.
    """
    if "MASTER_PORT" not in variables:
        return default
    port = maybe(variables, "MASTER_PORT")
    if port is None or not 1 <= port <= 65535:
        raise ConfigError(
            f"MASTER_PORT is {variables['MASTER_PORT']!r}", expected="a port from 1 to 65535",
            do="export the same free port in each process, or unset it to have one derived from the job",
        )  # fmt: skip
    return port


def port_of(job: str, step: int = 0) -> int:
    """Return a port for a step of a job, which all of its processes derive: neighbours get others."""
    number = int(job) * 101 + step if job.isdecimal() else zlib.crc32(f"{job}.{step}".encode())
    return _FIRST_PORT + number % _NUM_PORTS


def check_run(run: RunContext, local_size: int, num_nodes: int, names: tuple[str, str], *, do: str) -> None:
    """Refuse a run that asks for other numbers of processes than were started.

    Args:
        local_size: processes that were started on this node.
        num_nodes: nodes on which processes were started.
        names: what says so: for the processes of the node, and for the nodes.
        do: how to start another number.

    Raises:
        ConfigError: names both sides.
    """
    if run.stack.devices_given and run.num_processes != local_size:
        raise ConfigError(
            f"devices is {run.settings.devices!r}, which makes {run.num_processes} processes on this node, and "
            f"{names[0]}",
            expected="one process for each device", do=f'leave devices at "auto", or {do}',
        )  # fmt: skip
    if run.settings.num_nodes not in (1, num_nodes):  # 1 is the default
        raise ConfigError(
            f"num_nodes is {run.settings.num_nodes} and {names[1]}",
            expected="the same number", do="leave num_nodes out: it is read from the variables",
        )  # fmt: skip


def check_present(evidence: Evidence | None, name: str, started_by: str, variables: Mapping[str, str]) -> None:
    """Refuse an environment that was chosen by name where nothing of it is found: tasks of another would train alone.

    Raises:
        ConfigError: no variable of it is set, and no process of this program started this one.
    """
    if evidence is None and not was_launched(variables):
        raise ConfigError(
            f"environment is {name!r}, and none of its variables is set", expected=f"a process that {started_by}",
            do='start the program there, or leave environment at "auto"',
        )  # fmt: skip


def own_processes(variables: Mapping[str, str], run: RunContext, why: str, how: str) -> World:
    """Return the world of processes that a launcher starts, or has started, on this node alone.

    Args:
        why: what was found instead of processes on several nodes.
        how: how to start processes on several nodes.
    """
    if was_launched(variables):
        return launched_world(variables, run.num_processes)
    if run.settings.num_nodes > 1:
        raise ConfigError(
            f"num_nodes is {run.settings.num_nodes}, and {why}", expected="one process for each device", do=how
        )
    # Without a rank it is the number that somebody expects, such as `stratagem run --devices 4`.
    if "RANK" not in variables and maybe(variables, "WORLD_SIZE") not in (None, run.num_processes):
        raise ConfigError(
            f"WORLD_SIZE is {variables['WORLD_SIZE']} and devices is {run.num_processes}", expected="the same number",
            do="unset WORLD_SIZE, or change devices",
        )  # fmt: skip
    port = main_port(variables, 0) or None
    return World(world_size=run.num_processes, local_world_size=run.num_processes, main_port=port)
