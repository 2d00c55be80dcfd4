"""Run horovodrun for one call of fit: it starts the processes of all hosts, here or over ssh."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attrs import define, field

from stratagem.api import Launcher, hookimpl
from stratagem.api.validators import at_least
from stratagem.distributed.launched import die_with
from stratagem.distributed.process_variables import PARENT_VARIABLE, REPORTS_VARIABLE
from stratagem.errors import ConfigError, LaunchError
from stratagem_launchers_local import read_result
from stratagem_launchers_local.reports import as_error, read_report
from stratagem_launchers_local.supervision import ending_on_sigterm

if TYPE_CHECKING:
    from stratagem.api import RunContext, World

#: Seconds in which horovodrun ends its processes after SIGTERM: it kills them after 5.
_END_S = 15.0
#: horovodrun begins each line of a process with its rank; other lines are its own.
_OF_A_PROCESS = re.compile(r"\[\d+\]<std(out|err)>:")


@define(eq=False, kw_only=True)
class HorovodLauncher(Launcher):
    """Starts all processes with horovodrun, on this machine or over ssh on several.

    The processes end with each call: a second fit starts new ones. Classes and functions of the script are sent with
    cloudpickle. Several hosts need this folder, the packages and this Python at the same paths.
    """

    parent_trains = False
    starts_all_nodes = True

    #: Hosts with the number of their processes, as for horovodrun -H: "host1:4,host2:4". None: this machine.
    hosts: str | None = None
    #: Interfaces over which the hosts reach each other, as for --network-interfaces. Empty: horovodrun looks for them.
    network_interfaces: list[str] = field(factory=list)
    #: Port of the hosts' ssh servers. None: as ssh is configured.
    ssh_port: int | None = field(default=None, validator=at_least(1))
    #: Private key for ssh. None: as ssh is configured.
    ssh_identity_file: str | None = None
    #: Seconds in which all hosts must have answered.
    start_timeout: int = field(default=30, validator=at_least(1))

    @hookimpl
    def launch(self, main: Callable[[], Any], run: RunContext) -> Any:
        assert run.world is not None, "a launcher starts the processes of a world"
        hosts = self._hosts(run.world)
        command = self._command(run.world, hosts)
        # horovodrun enters this folder on each host.
        folder = Path(tempfile.mkdtemp(prefix=".stratagem-horovod-", dir=None if self.hosts is None else "."))
        try:
            (folder / "main.pickle").write_bytes(_pack(main))
            (folder / "path.json").write_text(json.dumps(sys.path))  # modules beside the script are imported by name
            command += [sys.executable, "-m", "stratagem_horovod.worker", str(folder.resolve())]
            code, own = _run(command)
            if code != 0:
                raise _cause(folder, code, own)
            return read_result(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _hosts(self, world: World) -> str:
        if self.hosts is None:
            if world.num_nodes > 1:
                raise ConfigError(
                    f"num_nodes is {world.num_nodes} and launcher.horovod.hosts is None", expected="the hosts",
                    do=f'set launcher.horovod.hosts, such as "host1:{world.local_world_size},host2:..."',
                )  # fmt: skip
            return f"localhost:{world.local_world_size}"
        entries = [entry.strip().rpartition(":") for entry in self.hosts.split(",")]
        if not all(host and slots.isdecimal() for host, _, slots in entries):
            raise ConfigError(
                f"launcher.horovod.hosts is {self.hosts!r}", expected='hosts with their numbers of processes, such as '
                f'"host1:{world.local_world_size},host2:{world.local_world_size}"',
            )  # fmt: skip
        slots = {int(slots) for *_, slots in entries}
        if slots != {world.local_world_size} or len(entries) != world.num_nodes:
            raise ConfigError(
                f"launcher.horovod.hosts is {self.hosts!r}, devices makes {world.local_world_size} processes on each "
                f"node and num_nodes is {world.num_nodes}", expected="the same numbers",
                do=f"set devices={max(slots)} and num_nodes={len(entries)}",
            )  # fmt: skip
        return ",".join(f"{host}:{slots}" for host, _, slots in entries)

    def _command(self, world: World, hosts: str) -> list[str]:
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
        command += ["-np", str(world.world_size), "-H", hosts, "--start-timeout", str(self.start_timeout)]
        for option, value in (
            ("--network-interfaces", ",".join(self.network_interfaces)),
            ("--ssh-port", self.ssh_port),
            ("--ssh-identity-file", self.ssh_identity_file),
        ):
            command += [option, str(value)] if value else []
        return command


def _pack(main: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise ConfigError(
            f"launcher is 'horovod' and {error.name} cannot be imported", expected="Horovod and what it requires",
            do="run `python -m stratagem_horovod.build`",
        ) from error  # fmt: skip
    try:
        packed: bytes = cloudpickle.dumps(main)
    except Exception as error:
        raise ConfigError(
            f"the module, a callback or a loader cannot be sent to a process of horovodrun ({error})",
            expected="everything to pickle", do="open files, locks and connections in a hook such as setup()",
        ) from error  # fmt: skip
    return packed


def _run(command: list[str]) -> tuple[int, list[str]]:
    """Run horovodrun; return its exit code, and what it wrote to stderr besides the lines of its processes."""
    variables = {k: v for k, v in os.environ.items() if k not in (PARENT_VARIABLE, REPORTS_VARIABLE)}
    variables["PYTHONUNBUFFERED"] = "1"
    sys.stdout.flush()
    dies = functools.partial(die_with, os.getpid()) if sys.platform == "linux" else None
    own: list[str] = []
    process = subprocess.Popen(
        command, env=variables, stderr=subprocess.PIPE, text=True, errors="replace", preexec_fn=dies
    )
    reader = threading.Thread(target=_pass_on, args=(process.stderr, own), daemon=True, name="stratagem-horovodrun")
    reader.start()
    try:
        with ending_on_sigterm():
            code = process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.wait()
        raise
    finally:
        reader.join(_END_S)
    return code, own


def _pass_on(lines: IO[str], own: list[str]) -> None:
    for line in lines:
        if _OF_A_PROCESS.match(line):
            sys.stderr.write(line)
        else:
            own.append(line)


# --- Outcome -----------------------------------------------------------------------------------------------------


def _cause(folder: Path, code: int, own: list[str]) -> BaseException:
    """Return the error that ended the processes: not one that only followed from another's."""
    reports = [read_report(path) for path in folder.glob("[0-9]*.json")]
    exits = {report.message for report in reports if report.type == SystemExit.__name__}
    if len(exits) == 1 == len({report.type for report in reports}) and (stop := min(exits)).isdecimal():
        return SystemExit(int(stop))
    root = min(reports, key=lambda report: (report.is_echo, report.time, report.rank), default=None)
    if root is not None and not root.is_echo:
        return as_error(root)
    text = "".join(own)
    died = re.search(r"Process name: (\d+)\s+Exit code: (\d+)", text)
    reasons = [line.strip() for line in own if line.strip()]
    found = f"horovodrun ended with exit code {code}" + (f" ({reasons[-1][:200]})" if reasons else "")
    if died:
        number = int(died[2])
        how = f"was killed by {signal.Signals(number - 128).name}" if number > 128 else f"ended with exit code {number}"
        found = f"rank {died[1]} {how} and left no error report"
    error = LaunchError(found, do="check its output, and the kernel log of its machine for an out-of-memory kill")
    error.add_note(f"horovodrun wrote:\n{text.rstrip()}")
    return error
