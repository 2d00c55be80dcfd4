"""SLURM: the tasks of srun, and what runs in a job without having been started as one of several.

SLURM_STEP_ID tells that this process is in a step: the script of sbatch has SLURM_PROCID and SLURM_NTASKS as well, and
is one process. What srun sets is in its manual under OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen

from stratagem.api import Confidence, Environment, Evidence, World, hookimpl
from stratagem.distributed.process_variables import was_launched
from stratagem.errors import ConfigError, nearest
from stratagem_environments_schedulers.hostlist import expand, expand_counts
from stratagem_environments_schedulers.slurm_job import job_name, num_restarts, requeue_command
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

#: Signals that a job can be sent for a purpose of its own, which SIGTERM cannot: see ``#SBATCH --signal``.
_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT", "SIGURG", "SIGXCPU")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "fish", "tcsh")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


@define(eq=False, kw_only=True)
class SlurmEnvironment(Environment):
    """Tasks that srun started. Elsewhere in a job (the script of sbatch, a shell) the run starts its own processes.

    MASTER_ADDR and MASTER_PORT, if you export them, replace the first host of the step and a port that follows from the
    ids of job and step.
    """

    #: In a job of sbatch, save and requeue the job on `requeue_signal`, as the callback `preemption` does; it is added
    #: where you do not list it. Ask for the signal in time: ``#SBATCH --signal=SIGUSR1@90``.
    auto_requeue: bool = True
    #: The signal of which `auto_requeue` is told; SLURM itself sends SIGTERM to jobs that it ends.
    requeue_signal: str = "SIGUSR1"

    def __attrs_post_init__(self) -> None:
        known = [name for name in _SIGNALS if hasattr(signal, name)]
        if self.requeue_signal not in known:
            raise ConfigError(
                f"environment.requeue_signal is {self.requeue_signal!r}", expected=f"one of {', '.join(known)}",
                do=nearest(self.requeue_signal, known),
            )  # fmt: skip
        if not self.auto_requeue and self.requeue_signal != "SIGUSR1":
            raise ConfigError(
                f"environment.requeue_signal is {self.requeue_signal!r} and environment.auto_requeue is False",
                expected="auto_requeue, or no requeue_signal",
                do="set the signals of the callback preemption that you list",
            )

    def detect(self) -> Evidence | None:
        variables = os.environ
        if not is_task(variables):
            if "SLURM_JOB_ID" not in variables:
                return None
            return Evidence(_why_no_task(variables), Confidence.IN_JOB)
        size = _first(variables, _NUM_TASKS)
        missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID") if name not in variables]
        names = ("SLURM_STEP_ID", "SLURM_PROCID", size)
        return evidence_in(variables, names, missing, rank="SLURM_PROCID", size=size)

    def processes_exist(self) -> bool:
        return _is_set_of_tasks(os.environ) or was_launched(os.environ)

    def local_processes(self) -> int | None:
        return read_step(os.environ).local_size if _is_set_of_tasks(os.environ) else None

    def num_nodes(self) -> int | None:
        return read_step(os.environ).num_nodes if _is_set_of_tasks(os.environ) else None

    def default_callbacks(self) -> list[Any]:
        wanted = self.auto_requeue and self.requeue_command() is not None
        return [{"name": "preemption", "signals": [self.requeue_signal]}] if wanted else []

    def job(self) -> str | None:
        return job_name(os.environ)

    def requeue_command(self) -> list[str] | None:
        return requeue_command(os.environ)

    @hookimpl
    def setup_environment(self, run: RunContext) -> World:
        restarts, may_restart = num_restarts(os.environ), self.requeue_command() is not None
        return evolve(self._world(run), generation=str(restarts), may_restart=may_restart)

    def _world(self, run: RunContext) -> World:
        if not _is_set_of_tasks(os.environ):
            check_present(self.detect(), "slurm", "SLURM started", os.environ)
            why = seen(os.environ, _NUM_TASKS) if is_task(os.environ) else _why_no_task(os.environ)
            how = f"start it with srun --nodes={run.settings.num_nodes} --ntasks-per-node={run.num_processes}"
            return own_processes(os.environ, run, f"srun did not start this program on several nodes: {why}", how)
        step = read_step(os.environ)
        check_run(
            run, step.local_size, step.num_nodes,
            (seen(os.environ, [step.tasks_per_node_name, "SLURM_NODEID"]) + f", {step.local_size} on this node",
             f"{step.num_nodes_name} is {step.num_nodes}"),
            do=f"start srun with --ntasks-per-node={run.num_processes}",
        )  # fmt: skip
        return step.world(os.environ)


# --- Where this process is ---------------------------------------------------------------------------------------


def is_task(variables: Mapping[str, str]) -> bool:
    """Whether srun started the program as a task: not a shell to which a person types, nor the script of sbatch."""
    return "SLURM_STEP_ID" in variables and not _in_shell_of_step(variables)


def _is_set_of_tasks(variables: Mapping[str, str]) -> bool:
    """Whether srun started several tasks: the only one of a step starts the other processes of its node."""
    return is_task(variables) and _num_tasks(variables) != 1


def _in_shell_of_step(variables: Mapping[str, str]) -> bool:
    """Whether a person started this process in the shell of ``srun --pty bash``, or of salloc with such a step.

    srun within that shell passes SLURM_PTY_PORT on to its tasks. So the process that srun started is looked at: an
    interactive shell is one without a script or a command.
    """
    if "SLURM_PTY_PORT" not in variables:
        return False
    task = maybe(variables, "SLURM_TASK_PID")
    if task == os.getpid():
        return False
    try:
        words = Path(f"/proc/{task}/cmdline").read_text().split("\0")[:-1]
    except OSError:  # it is in another container, or has ended
        return sys.stdin is not None and sys.stdin.isatty()
    is_shell = bool(words) and words[0].rpartition("/")[2].lstrip("-") in _SHELLS
    return is_shell and all(word.startswith("-") and "c" not in word.lstrip("-") for word in words[1:])


def _why_no_task(variables: Mapping[str, str]) -> str:
    job = f"SLURM_JOB_ID is {variables['SLURM_JOB_ID']!r}"
    if "SLURM_STEP_ID" in variables:
        return f"{job} and srun --pty started a shell, in which this program was started once"
    return f"{job} and SLURM_STEP_ID is not set, as in the script of sbatch or a shell of salloc"


# --- The step ----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Step:
    """A step of a job: the tasks that one srun started."""

    size: int
    num_nodes: int
    #: Tasks on this task's node.
    local_size: int
    #: The variables that say so, for messages.
    tasks_per_node_name: str
    num_nodes_name: str

    def world(self, variables: Mapping[str, str]) -> World:
        """Return the ranks of the task with `variables`.

        Raises:
            ConfigError: a variable is missing, or they contradict each other.
        """
        rank, local_rank, node_rank = (count(variables, f"SLURM_{n}") for n in ("PROCID", "LOCALID", "NODEID"))
        check_rank(rank, self.size, "SLURM_PROCID", _first(variables, _NUM_TASKS) or "SLURM_STEP_NUM_TASKS")
        check_rank(local_rank, self.local_size, "SLURM_LOCALID", "the number of tasks on this node")
        hosts = _first(variables, _HOSTS)
        if hosts is None:
            raise _missing(_HOSTS)
        job, step = variables.get("SLURM_JOB_ID", ""), maybe(variables, "SLURM_STEP_ID") or 0
        address = variables.get("MASTER_ADDR") or expand(variables[hosts], hosts)[0]
        return World(
            rank=rank, local_rank=local_rank, node_rank=node_rank, world_size=self.size,
            local_world_size=self.local_size, num_nodes=self.num_nodes,
            main_address=address, main_port=main_port(variables, port_of(job, step)),
        )  # fmt: skip


def read_step(variables: Mapping[str, str]) -> Step:
    """Read the tasks of the step, which may be distributed unevenly over its nodes.

    Raises:
        ConfigError: a variable is missing, or they contradict each other.
    """
    size = _num_tasks(variables)
    tasks = _first(variables, _TASKS_PER_NODE)
    if size is None or tasks is None:
        raise _missing(_NUM_TASKS if size is None else _TASKS_PER_NODE)
    per_node = expand_counts(variables[tasks], tasks)
    nodes = _first(variables, _NUM_NODES)
    num_nodes = len(per_node) if nodes is None else count(variables, nodes, least=1)
    if sum(per_node) != size or len(per_node) != num_nodes:
        _, *others = [f"{tasks} is {variables[tasks]!r}", seen(variables, [_first(variables, _NUM_TASKS) or ""])]
        components = variables.get("SLURM_HET_SIZE")
        raise ConfigError(
            f"{tasks} is {variables[tasks]!r}, {others[0]} and {seen(variables, [nodes or ''])}"
            + (f", in a heterogeneous job of {components} components" if components else ""),
            expected="tasks of each node that add up to all tasks",
            do="start one step over all nodes with srun, or export RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
            'MASTER_PORT in each task and set environment="local"',
        )
    node_rank = count(variables, "SLURM_NODEID")
    check_rank(node_rank, num_nodes, "SLURM_NODEID", nodes or tasks)
    return Step(
        size=size, num_nodes=num_nodes, local_size=per_node[node_rank], tasks_per_node_name=tasks,
        num_nodes_name=nodes or tasks,
    )  # fmt: skip


def _num_tasks(variables: Mapping[str, str]) -> int | None:
    name = _first(variables, _NUM_TASKS)
    return None if name is None else count(variables, name, least=1)


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that is set."""
    return next((name for name in names if name in variables), None)


def _missing(names: tuple[str, ...]) -> ConfigError:
    return ConfigError(
        f"SLURM_STEP_ID is set and {' and '.join(names)} are not", expected=f"{names[0]}, as srun sets it",
        do='start the program with srun, or set environment="local" to train in this process alone',
    )  # fmt: skip
