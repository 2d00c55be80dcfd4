"""A real SLURM on this machine: munged, slurmctld, and one slurmd for each node, on the loopback address."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "unshare")
#: Seconds between SIGTERM and SIGKILL for a job that ends.
KILL_WAIT_S = 5
#: Seconds for a client that only asks.
ASK_S = 90
#: Seconds for the daemons to start, and to stop.
START_S, STOP_S = 180, 45

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={port}
FirstJobId={first_job}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
JobRequeue=1
KillWait={kill_wait}
MinJobAge=600
InactiveLimit=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""


class Slurm:
    """Two nodes, ``n1`` and ``n2``, with four CPUs each whatever the machine has; their names resolve within tasks.

    Each slurmd has a mount namespace with its own /etc/hosts. The tasks of a node are in it too, so they can be found.
    """

    nodes = ("n1", "n2")

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sl"))  # short: the path of munge's socket has a limit
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = [free_port() for _ in range(1 + len(self.nodes))]

    # --- Daemons -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything; return once all nodes are idle."""
        self.folder.chmod(0o755)
        for name in ("munge", "state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(mode=0o755)
        self._write_configuration()
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        munge = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "seed", "log")]
        self._run("munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge/socket", *munge)
        self._run("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
        for node in self.nodes:
            self.power_on(node)

    def power_on(self, node: str) -> None:
        """Start the slurmd of `node`; return once it is idle."""
        hosts = f"mount --bind '{self.folder}/hosts' /etc/hosts"
        slurmd = f"exec {_path('slurmd')} -D -N {node} -f '{self.folder}/slurm.conf'"
        self._run(f"slurmd-{node}", "unshare", "-m", "--propagation", "private", "bash", "-c", f"{hosts} && {slurmd}")
        self._await(START_S, f"node {node} is not idle", lambda: "IDLE" in self.node(node)["State"].split("+")[0])

    def power_off(self, node: str) -> None:
        """Kill all processes of `node`, its slurmd first, as a power failure does; the controller does not know yet."""
        self._kill_all_of(node)
        self._daemons.pop(f"slurmd-{node}").wait(STOP_S)

    def power_cycle(self, node: str) -> None:
        """Switch `node` on, whatever a test has done to it."""
        if f"slurmd-{node}" not in self._daemons:
            self.power_on(node)

    def kill_tasks(self, node: str) -> None:
        """Send SIGKILL to the tasks that srun started on `node`."""
        for each in self._processes_of(node):
            with contextlib.suppress(OSError):
                if b"\0SLURM_STEP_ID=" in Path(f"/proc/{each}/environ").read_bytes():
                    os.kill(each, signal.SIGKILL)

    def mark_down(self, node: str) -> None:
        """Let the controller notice that `node` failed, without waiting for SlurmdTimeout."""
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def stop(self) -> None:
        """Cancel all jobs and stop everything that was started here; safe to call at any time."""
        with contextlib.suppress(Exception):
            self.cancel_all()
        for node in self.nodes:
            with contextlib.suppress(Exception):
                self._kill_all_of(node)
        for process in reversed(self._daemons.values()):
            process.terminate()
        for process in self._daemons.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [_path(program), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, preexec_fn=_end_with_parent, env=_clean_variables(),
            )  # fmt: skip

    def _kill_all_of(self, node: str) -> None:
        processes = self._processes_of(node)  # its slurmd is the first
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)

    def _processes_of(self, node: str) -> list[int]:
        """Return the processes in the mount namespace of `node`, its slurmd first; none if that does not run."""
        daemon = self._daemons.get(f"slurmd-{node}")
        if daemon is None or daemon.poll() is not None:
            return []
        namespace = _mount_namespace(daemon.pid)
        if namespace in (None, _mount_namespace(os.getpid())):
            return []  # it has not entered its own yet
        found = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
        others = [pid for pid in found if pid != daemon.pid and _mount_namespace(pid) == namespace]
        return [daemon.pid, *others]

    def _write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        # Ports of a run come from the job's number: those of another SLURM are a hundred jobs away.
        facts = {"port": self._ports[0], "first_job": self._ports[0] * 100, "kill_wait": KILL_WAIT_S}
        lines = [_CONFIGURATION.format(host=host, folder=self.folder, **facts)]
        for node, port in zip(self.nodes, self._ports[1:], strict=True):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName={node} {place} CPUs=4 RealMemory=4000 State=UNKNOWN\n")
        lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        names = "".join(f"127.0.0.1 {node}\n" for node in self.nodes)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text().rstrip("\n") + "\n" + names)

    # --- Jobs --------------------------------------------------------------------------------------------------------

    def variables(self, **changes: str) -> dict[str, str]:
        """Return the environment for a client of this cluster."""
        return {**_clean_variables(), "SLURM_CONF": str(self.folder / "slurm.conf"), **changes}

    def srun(
        self, *command: str, cwd: Path, timeout: float = 540, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``srun *command`` and return its result, with stderr in stdout; kill it after `timeout` seconds."""
        process = subprocess.Popen(
            ["srun", *command], cwd=cwd, env=self.variables(**variables), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.cancel_all()
            process.kill()
            output, _ = process.communicate()
            raise AssertionError(f"srun did not end in {timeout} s\n{output}\n{self.state()}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def sbatch(self, script: Path, *options: str, cwd: Path, **variables: str) -> str:
        """Submit `script`; return the job's number."""
        answer = self.ask("sbatch", "--parsable", *options, str(script), cwd=cwd, **variables)
        return answer.strip().partition(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """Return what SLURM knows of a job: "JobState", "Restarts", "Reason", "ExitCode" ..."""
        return _fields(self.ask("scontrol", "show", "job", "-o", number))

    def node(self, name: str) -> dict[str, str]:
        try:
            return _fields(self.ask("scontrol", "show", "node", "-o", name))
        except AssertionError:
            return {"State": "UNKNOWN"}  # the controller is starting

    def await_state(self, number: str, *states: str, timeout: float = 360, restarts: int | None = None) -> None:
        """Return once the job is in one of `states`, and was restarted `restarts` times."""

        def reached() -> bool:
            job = self.job(number)
            return job["JobState"] in states and restarts in (None, int(job["Restarts"]))

        self._await(timeout, f"job {number} is not {' or '.join(states)} (restarts: {restarts})", reached, number)

    def restart_now(self, number: str, timeout: float = 180) -> None:
        """Wait until the job is requeued, and start it without the two minutes that SLURM holds it."""
        asked = False

        def running() -> bool:
            nonlocal asked
            job = self.job(number)
            if job["JobState"] == "PENDING" and not asked:
                with contextlib.suppress(AssertionError):  # it may be running by now
                    # SLURM revokes what lets a job start on a node for the second in which the job was ended there.
                    self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+2")
                    asked = True
            # Between the two it is COMPLETING, and NODE_FAIL after a node has failed.
            return int(job["Restarts"]) > 0 and job["JobState"] in ("RUNNING", "COMPLETED", "FAILED")

        self._await(timeout, f"job {number} does not start again", running, number)

    def signal(self, number: str, name: str) -> None:
        """Send a signal to all tasks of a job that srun started, as ``#SBATCH --signal`` does."""
        self.ask("scancel", f"--signal={name}", number)

    def cancel_all(self) -> None:
        """Cancel all jobs; return once their processes are gone."""
        self.ask("scancel", "--user=root")
        deadline = time.monotonic() + STOP_S + KILL_WAIT_S
        while self.ask("squeue", "-h", "-t", "R,CG").strip() and time.monotonic() < deadline:
            time.sleep(0.1)

    def ask(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Run a client that ends at once; return what it prints."""
        done = subprocess.run(
            command, cwd=cwd, env=self.variables(**variables), text=True, timeout=ASK_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{self.state()}"
        return done.stdout

    def state(self) -> str:
        """Return which daemons run, and the ends of their logs, for a failure."""
        parts = []
        for name, process in self._daemons.items():
            code = process.poll()
            parts.append(f"--- {name}: {'runs' if code is None else f'ended with code {code}'}")
            for path in (self.folder / f"{name}.out", self.folder / f"{name}.log"):
                if path.exists():
                    parts += path.read_text(errors="replace").splitlines()[-15:]
        return "\n".join(parts)

    def _output_of(self, number: str) -> str:
        """Return what is known of a job, and the end of what it printed."""
        job = self.job(number)
        with contextlib.suppress(OSError):
            return f"{job}\n--- {job['StdOut']}\n{Path(job['StdOut']).read_text(errors='replace')[-6000:]}"
        return str(job)

    def _await(self, timeout: float, otherwise: str, reached, number: str | None = None) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            broken = [name for name, process in self._daemons.items() if process.poll() is not None]
            if time.monotonic() > deadline or broken:
                about = f"\n{self._output_of(number)}" if number else ""
                raise AssertionError(f"{otherwise} after {timeout} s; ended: {broken}{about}\n{self.state()}")
            time.sleep(0.1)


def _path(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    assert found is not None, f"{program} is not installed"
    return found


def _clean_variables() -> dict[str, str]:
    """Return this process's environment without variables of a scheduler that it may run under."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}


def _end_with_parent() -> None:
    """Let the kernel end this process if pytest is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _mount_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return None


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)
