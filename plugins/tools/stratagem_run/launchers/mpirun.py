"""mpirun of Open MPI, MPICH or Intel MPI: their options differ, so the installed program is asked which one it is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping

from attrs import frozen

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_run.devices import check_devices, default_devices
from stratagem_run.launchers.base import Launcher, check_started_once
from stratagem_run.nodes import port_of
from stratagem_run.options import cli_option
from stratagem_run.program import Program, Start
from stratagem_run.resources import Extra, Nodes

_PROGRAMS = ("mpirun", "mpiexec.hydra", "mpiexec")


@frozen(kw_only=True, slots=False)
class Mpirun(Extra, Nodes, Launcher):
    """Starts all processes from one machine, through ssh or the scheduler whose allocation it finds."""

    title = "mpirun"

    hosts: str | None = cli_option("names of the machines, separated by commas", "HOST,HOST")
    cpus: int | None = cli_option("CPU cores for each process", validator=at_least(1))
    oversubscribe: bool = cli_option("start more processes than a node has cores", default=False)
    main_address: str | None = cli_option("the name or address of node 0", "HOST")
    main_port: int | None = cli_option("a free port on node 0", "PORT", validator=at_least(1))
    mpirun: str | None = cli_option("the program, if several are installed, such as mpirun.mpich", "PROGRAM")

    def start(self, program: Program, variables: Mapping[str, str]) -> Start:
        check_started_once(variables, "mpirun")
        devices = default_devices() if self.devices is None else self.devices
        if self._count() == 1 and self.hosts is None:
            check_devices(devices, {**variables, **program.variables})
        path = self._program()
        exported = {**self._address(), **program.variables}
        layout = Layout(self._count(), devices, self._hosts(), self.cpus, self.oversubscribe, exported)
        words = implementation_of(path)(layout)
        return Start([path, *words, *self.option, *program.words], exported)

    def _hosts(self) -> list[str]:
        return [host.strip() for host in (self.hosts or "").split(",") if host.strip()]

    def _count(self) -> int:
        hosts = len(self._hosts())
        if self.nodes is not None and hosts not in (0, self.nodes):
            raise ConfigError(
                f"--nodes is {self.nodes} and --hosts names {hosts}",
                expected="the same number",
                do="correct one of them",
            )
        return self.nodes or hosts or 1

    def _program(self) -> str:
        names = _PROGRAMS if self.mpirun is None else (self.mpirun,)
        found = next((name for name in names if shutil.which(name)), None)
        if found is None:
            raise ConfigError(
                f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed on this machine",
                expected="Open MPI, MPICH or Intel MPI", do="install one, or choose another --launcher",
            )  # fmt: skip
        return found

    def _address(self) -> dict[str, str]:
        """Return the address of rank 0 if it was given; otherwise the processes find it, on several nodes by MPI."""
        address = self.main_address or next(iter(self._hosts()), None)
        if address is None:
            if self.main_port is not None:
                raise ConfigError(
                    f"--main-port is {self.main_port} and --main-address is not set", expected="both", do="add it"
                )
            return {}
        return {"MASTER_ADDR": address, "MASTER_PORT": str(port_of(self.main_port))}


@frozen
class Layout:
    """How many processes run where."""

    nodes: int
    devices: int
    hosts: list[str]
    cpus: int | None
    oversubscribe: bool
    #: Variables that every process gets.
    exported: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices


def open_mpi(layout: Layout) -> list[str]:
    """Return the options of Open MPI (4 and 5).

    By default it binds each process to one core, where the threads of torch and of data loaders wait for each other.
    """
    cores = "" if layout.cpus is None else f":PE={layout.cpus}"
    return [
        "-np", str(layout.world_size),
        *(["--host", ",".join(f"{host}:{layout.devices}" for host in layout.hosts)] if layout.hosts else []),
        "--map-by", f"ppr:{layout.devices}:node{cores}",
        "--bind-to", "core" if cores else "none",
        *(["--oversubscribe"] if layout.oversubscribe else []),
        *[word for name in layout.exported for word in ("-x", name)],
    ]  # fmt: skip


def mpich(layout: Layout) -> list[str]:
    """Return the options of hydra, MPICH's mpirun; it passes the whole environment to every process."""
    return [*_of_hydra(layout, "MPICH"), *(["-bind-to", f"core:{layout.cpus}"] if layout.cpus is not None else [])]


def intel_mpi(layout: Layout) -> list[str]:
    """Return the options of Intel MPI. In an allocation of a scheduler it would ignore -ppn without the variable."""
    return [
        *_of_hydra(layout, "Intel MPI"),
        "-genv", "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "0",
        *(["-genv", "I_MPI_PIN", "0"] if layout.cpus is None else ["-genv", "I_MPI_PIN_DOMAIN", str(layout.cpus)]),
    ]  # fmt: skip


#: What ``mpirun --version`` prints, and the options of that implementation.
IMPLEMENTATIONS: dict[str, Callable[[Layout], list[str]]] = {
    r"Intel\(R\) MPI": intel_mpi, r"HYDRA|MPICH": mpich, r"Open ?MPI|OpenRTE|PRRTE": open_mpi,
}  # fmt: skip


def implementation_of(program: str) -> Callable[[Layout], list[str]]:
    """Return the function with the options of `program`.

    Raises:
        ConfigError: it is none of the known ones.
    """
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=False
    )
    text = done.stdout + done.stderr
    for pattern, options in IMPLEMENTATIONS.items():
        if re.search(pattern, text, re.IGNORECASE):
            return options
    first = next(iter(text.strip().splitlines()), "")
    raise ConfigError(
        f"`{program} --version` prints {first!r}", expected="Open MPI, MPICH or Intel MPI",
        do="name another program with --mpirun, or choose another --launcher",
    )  # fmt: skip


def _of_hydra(layout: Layout, name: str) -> list[str]:
    """Return the options that MPICH and Intel MPI share."""
    if layout.oversubscribe:
        raise ConfigError(
            f"--oversubscribe is set and mpirun is that of {name}, which always allows it", do="leave it out"
        )
    hosts = ["-hosts", ",".join(layout.hosts)] if layout.hosts else []
    return ["-np", str(layout.world_size), "-ppn", str(layout.devices), *hosts]
