"""LSF: the processes of jsrun. blaunch tells its processes no rank, and mpirun sets its own variables.

LSB_DJOB_RANKFILE and LSB_MCPU_HOSTS list the hosts of a job. On systems with jsrun the first of them is the launch
node, which runs the batch script and no ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define

from stratagem.api import Confidence, Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import was_launched
from stratagem.errors import ConfigError
from stratagem_environments_schedulers.variables import (
    check_present,
    check_rank,
    check_run,
    count,
    evidence_in,
    main_port,
    maybe,
    own_processes,
    port_of,
    seen,
)

if TYPE_CHECKING:
    from stratagem.api import RunContext

_RANK, _SIZE = "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"
_LOCAL_RANK, _LOCAL_SIZE = "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"


@define(eq=False, kw_only=True)
class LSFEnvironment(Environment):
    """Processes of jsrun. In the script of a job the run starts its own processes, on the job's first host."""

    def detect(self) -> Evidence | None:
        variables = os.environ
        if _RANK in variables or _SIZE in variables:
            missing = [name for name in (_RANK, _SIZE, _LOCAL_RANK) if name not in variables]
            return evidence_in(variables, (_RANK, _SIZE), missing, rank=_RANK, size=_SIZE)
        if "LSB_JOBID" not in variables:
            return None
        if why := started_elsewhere(variables):
            return Evidence(why, Confidence.PARTIAL)
        return Evidence(f"{seen(variables, ['LSB_JOBID'])} and {_RANK} is not set", Confidence.IN_JOB)

    def processes_exist(self) -> bool:
        return _several(os.environ) or was_launched(os.environ)

    def local_processes(self) -> int | None:
        return _read(os.environ).local_world_size if _several(os.environ) else None

    def num_nodes(self) -> int | None:
        return _read(os.environ).num_nodes if _several(os.environ) else None

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        if not _several(os.environ):
            check_present(self.detect(), "lsf", "LSF started", os.environ)
            if why := started_elsewhere(os.environ):
                raise ConfigError(
                    f"{why}, as if blaunch had started this program on several hosts, and blaunch tells its processes "
                    "no rank", expected="processes of jsrun or mpirun",
                    do="start the program with jsrun or mpirun, or run torchrun once on each host with blaunch",
                )  # fmt: skip
            return own_processes(
                os.environ, run, f"{_RANK} is not set, as in the script of bsub or under blaunch",
                f"start it with jsrun -n {run.settings.num_nodes} -r 1 -a {run.num_processes}, with mpirun, or with "
                "torchrun on each host",
            )  # fmt: skip
        world = _read(os.environ)
        check_run(
            run, world.local_world_size, world.num_nodes,
            (f"jsrun started {world.local_world_size} processes on this node", f"jsrun uses {world.num_nodes} nodes"),
            do=f"start jsrun with {run.num_processes} processes on each node",
        )  # fmt: skip
        return world


def hosts(variables: Mapping[str, str]) -> list[str]:
    """Return the hosts of the job, in order, the launch node first where there is one; empty if LSF told none."""
    try:
        return list(dict.fromkeys(Path(variables["LSB_DJOB_RANKFILE"]).read_text().split()))
    except (KeyError, OSError):
        return list(dict.fromkeys(variables.get("LSB_MCPU_HOSTS", "").split()[::2]))


def started_elsewhere(variables: Mapping[str, str]) -> str:
    """Return why this process is not the script of a job, which runs on the job's first host; "" if it may be."""
    known = [host.partition(".")[0] for host in hosts(variables)]
    here = socket.gethostname().partition(".")[0]
    if here in known[1:]:
        return f"{seen(variables, ['LSB_JOBID', 'LSB_MCPU_HOSTS'])}, {_RANK} is not set, and this host is {here!r}"
    return ""


def _several(variables: Mapping[str, str]) -> bool:
    """Whether jsrun started several processes; the only one starts others itself."""
    return (_RANK in variables or _SIZE in variables) and maybe(variables, _SIZE) != 1


def _read(variables: Mapping[str, str]) -> World:
    """Return the world of a process of jsrun.

    Raises:
        ConfigError: a variable is missing, or they contradict each other.
    """
    rank, local_rank, size = count(variables, _RANK), count(variables, _LOCAL_RANK), count(variables, _SIZE, least=1)
    known = hosts(variables)
    computing = known[1:] or known
    local_size = _local_size(variables, size, len(computing))
    check_rank(rank, size, _RANK, _SIZE)
    check_rank(local_rank, local_size, _LOCAL_RANK, _LOCAL_SIZE)
    several = local_size < size
    address = variables.get("MASTER_ADDR") or (computing[0] if computing else None)
    if several and address is None:
        raise ConfigError(
            f"{seen(variables, (_SIZE, _LOCAL_SIZE))}, and neither LSB_DJOB_RANKFILE nor LSB_MCPU_HOSTS lists hosts",
            expected="the address of the host of rank 0", do="export MASTER_ADDR in each process",
        )  # fmt: skip
    here = socket.gethostname().partition(".")[0]
    names = [host.partition(".")[0] for host in computing]
    by_name = several and here in names and len(names) * local_size == size
    job, index = variables.get("LSB_JOBID", ""), maybe(variables, "LSB_JOBINDEX") or 0
    return World(
        rank=rank, local_rank=local_rank, node_rank=names.index(here) if by_name else rank // local_size,
        world_size=size, local_world_size=local_size, num_nodes=-(-size // local_size),
        main_address=address or "127.0.0.1", main_port=main_port(variables, port_of(job, index)),
    )  # fmt: skip


def _local_size(variables: Mapping[str, str], size: int, num_hosts: int) -> int:
    """Return how many processes this node has: what jsrun told, else as many as each other host."""
    if _LOCAL_SIZE in variables:
        return count(variables, _LOCAL_SIZE, least=1)
    if not num_hosts or size % num_hosts:
        raise ConfigError(
            f"{seen(variables, [_SIZE])}, {_LOCAL_SIZE} is not set, and the job has {num_hosts} hosts",
            expected=f"{_LOCAL_SIZE}, or as many processes on each host",
            do=f"export {_LOCAL_SIZE} in each process, or use a multiple of the hosts",
        )  # fmt: skip
    return size // num_hosts
