"""Hosts on one machine (Linux network namespaces), connected by links with limited rate, delay or faults. Needs root.

    python hosts.py up 2 [--delay MS]     h1 and h2 at 10.77.0.1 and 10.77.0.2; MS milliseconds each way
    python hosts.py rate 100              every link carries 100 Mbit/s in each direction; "off" as much as it can
    python hosts.py exec 1 COMMAND...     run COMMAND on h1
    python hosts.py cut 2 | heal 2        take h2 off the network, put it back
    python hosts.py down

The links meet in a bridge, or with a delay in a switch that this program is itself, as not every kernel can delay
packets (sch_netem). Bridge and switch have a namespace of their own: nothing is added to the machine's own network.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SUBNET = "10.77.0"
#: Burst size of a link in bytes. The kernel sends packets of up to 64 KiB, which a smaller burst would never pass.
BURST = 128 * 1024
#: Packets that are queued longer than this are dropped, as by a router.
QUEUE_MS = 50


class NoHosts(RuntimeError):
    """This machine cannot create hosts; the text says why."""


class Hosts:
    """Running hosts; `name` distinguishes them from others on this machine."""

    def __init__(self, name: str = "slow") -> None:
        self.name, self.hub = name, f"{name}-hub"
        self.folder = Path(tempfile.gettempdir()) / f"hosts-{name}"

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @classmethod
    def up(cls, count: int = 2, delay_ms: float = 0.0, name: str = "slow") -> Hosts:
        """Make `count` hosts.

        Raises:
            NoHosts: not root, no iproute2, no namespaces, or they are up already.
        """
        hosts = cls(name)
        hosts._check()
        try:
            hosts._make(count, delay_ms)
        except BaseException:
            hosts.down()
            raise
        return hosts

    def down(self) -> None:
        """Remove the hosts, and end the processes that still run on them."""
        for namespace in (*self._namespaces(), self.hub):
            for pid in _quietly("ip", "netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _quietly("ip", "netns", "del", namespace)
        shutil.rmtree(self.folder, ignore_errors=True)

    def rate(self, mbit: float | None) -> None:
        """Limit every link to `mbit` Mbit/s in each direction; None means no limit."""
        for number, host in enumerate(self._namespaces(), start=1):
            for namespace, device in ((host, "eth0"), (self.hub, f"port{number}")):
                _quietly("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                exists = _quietly("ip", "-n", namespace, "link", "show", device)
                if mbit is not None and exists:  # with a delay the hub has no device to shape
                    limits = f"rate {mbit}mbit burst {BURST} latency {QUEUE_MS}ms"
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limits.split())

    def cut(self, number: int) -> None:
        """Disconnect a host from the network. Its own link stays up, as when a cable elsewhere is pulled."""
        _run("ip", "-n", self.hub, "link", "set", f"port{number}", "nomaster")

    def heal(self, number: int) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self.hub, "link", "set", f"port{number}", "master", "bridge0")

    def command(self, number: int, *command: str) -> list[str]:
        """Return the command that runs `command` on a host, with its name, its names of others and its /sys."""
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, "sh", f"h{number}", str(self.folder / "hosts"), *command]
        return ["ip", "netns", "exec", self._namespace(number), *inside]

    def _check(self) -> None:
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise NoHosts("only root on Linux can make network namespaces; run this as root")
        if missing := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
            raise NoHosts(f"{' and '.join(missing)} not found; install iproute2 and util-linux")
        if self._namespaces():
            raise NoHosts(f"hosts {self.name!r} are up already; take them down first")

    def _make(self, count: int, delay_ms: float) -> None:
        self.folder.mkdir()
        names = [f"{SUBNET}.{number} h{number}" for number in range(1, count + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        for namespace in (self.hub, *(self._namespace(number) for number in range(1, count + 1))):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        if delay_ms:
            self._start_switch(count, delay_ms)
        else:
            self._make_bridge(count)
        for number in range(1, count + 1):
            namespace = self._namespace(number)
            _run("ip", "-n", namespace, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            _run("ip", "-n", namespace, "link", "set", "eth0", "up")

    def _make_bridge(self, count: int) -> None:
        _run("ip", "-n", self.hub, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", self.hub, "link", "set", "bridge0", "up")
        for number in range(1, count + 1):
            there = ["peer", "name", "eth0", "netns", self._namespace(number)]
            _run("ip", "-n", self.hub, "link", "add", f"port{number}", "type", "veth", *there)
            _run("ip", "-n", self.hub, "link", "set", f"port{number}", "master", "bridge0", "up")

    def _start_switch(self, count: int, delay_ms: float) -> None:
        """Start this program in the hub, where it creates the devices of the hosts and forwards frames between them."""
        namespaces = [self._namespace(number) for number in range(1, count + 1)]
        words = [sys.executable, __file__, "switch", str(delay_ms), *namespaces]
        with (self.folder / "switch.log").open("w") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.hub, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        assert process.stdout is not None
        if not process.stdout.readline():
            raise NoHosts(f"the switch did not start ({(self.folder / 'switch.log').read_text().strip()})")

    def _namespace(self, number: int) -> str:
        return f"{self.name}-h{number}"

    def _namespaces(self) -> list[str]:
        listed = [line.split()[0] for line in _quietly("ip", "netns", "list").splitlines() if line]
        mine = [each for each in listed if each.startswith(f"{self.name}-h") and each != self.hub]
        return sorted(mine, key=lambda each: int(each.rpartition("h")[2]))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"{' '.join(command)} failed ({done.stderr.strip()})")


def _quietly(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


# --- The switch --------------------------------------------------------------------------------------------------

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
#: An Ethernet device without a preamble of its own, each frame behind a virtio header ...
_TAP, _NO_PREAMBLE, _VIRTIO = 0x0002, 0x1000, 0x4000
#: ... so that checksums and the cutting into packets are left undone: a frame then holds up to 64 KiB.
_CHECKSUM, _SEGMENTS = 0x01, 0x02
_VIRTIO_BYTES, _ADDRESS_BYTES = 10, 6
_LARGEST_FRAME = 1 << 17


def switch(delay_ms: float, namespaces: list[str]) -> None:
    """Create eth0 of every namespace, and forward its frames after `delay_ms`, until this process is ended."""
    devices = [_make_device(f"tap{number}", namespace) for number, namespace in enumerate(namespaces)]
    print("ready", flush=True)
    known: dict[bytes, int] = {}
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.epoll()
    for device in devices:
        poll.register(device, select.EPOLLIN)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
        for device, _ in poll.poll(wait_s):
            due = time.monotonic() + delay_ms / 1000
            for frame in _read(device):
                address = _VIRTIO_BYTES + _ADDRESS_BYTES
                known[frame[address : address + _ADDRESS_BYTES]] = device
                target = known.get(frame[_VIRTIO_BYTES:address])
                targets = [target] if target is not None else [each for each in devices if each != device]
                waiting.extend((due, each, frame) for each in targets)
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a full queue drops, as a switch does
                os.write(device, frame)


def _make_device(name: str, namespace: str) -> int:
    """Create a device in a namespace; return the descriptor of its other end."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PREAMBLE | _VIRTIO))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS)
    _run("ip", "link", "set", name, "netns", namespace, "name", "eth0")
    return device


def _read(device: int, at_most: int = 32) -> list[bytes]:
    frames = []
    with contextlib.suppress(BlockingIOError):
        while len(frames) < at_most:
            frames.append(os.read(device, _LARGEST_FRAME))
    return frames


# --- The command line --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="slow")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("count", type=int)
    up.add_argument("--delay", type=float, default=0.0)
    commands.add_parser("rate").add_argument("mbit")
    for command in ("cut", "heal"):
        commands.add_parser(command).add_argument("number", type=int)
    execute = commands.add_parser("exec")
    execute.add_argument("number", type=int)
    execute.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down")
    switching = commands.add_parser("switch")
    switching.add_argument("delay", type=float)
    switching.add_argument("namespaces", nargs="+")
    try:
        _obey(parser.parse_args())
    except NoHosts as error:
        raise SystemExit(f"hosts.py: {error}") from None


def _obey(asked: argparse.Namespace) -> None:
    hosts = Hosts(asked.name)
    match asked.command:
        case "up":
            Hosts.up(asked.count, asked.delay, asked.name)
        case "rate":
            hosts.rate(None if asked.mbit == "off" else float(asked.mbit))
        case "cut":
            hosts.cut(asked.number)
        case "heal":
            hosts.heal(asked.number)
        case "exec":
            command = hosts.command(asked.number, *asked.words)
            os.execvp(command[0], command)
        case "down":
            hosts.down()
        case "switch":
            switch(asked.delay, asked.namespaces)


if __name__ == "__main__":
    main()
