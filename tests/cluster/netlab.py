"""Hosts in network namespaces of this machine: own addresses, names and hosts files, and a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import define, field

PROGRAMS = ("ip", "nsenter", "unshare", "mount")

#: Not `ip netns exec`, which mounts another /sys, without control groups. `$1` is the name of the host.
_ENTER = 'hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount --bind "$2/resolv.conf" /etc/resolv.conf && shift 2 && exec "$@"'


def _ip(*words: Any) -> str:
    return subprocess.run(
        ["ip", *map(str, words)], check=True, capture_output=True, text=True, timeout=30
    ).stdout  # fmt: skip


@define
class Host:
    """A host of a `Lab`."""

    name: str
    address: str
    namespace: str
    folder: Path

    def popen(self, command: list[Any], **options: Any) -> subprocess.Popen[Any]:
        """Start `command` on this host."""
        enter = [
            "nsenter",
            f"--net=/run/netns/{self.namespace}",
            "unshare",
            "--uts",
            "--mount",
            "--propagation",
            "private",
        ]
        shell = ["bash", "-c", _ENTER, "-", self.name, str(self.folder)]
        return subprocess.Popen([*enter, *shell, *map(str, command)], start_new_session=True, **options)

    def pids(self) -> list[int]:
        """Return the processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@define
class Lab:
    """Hosts h1, h2 ... with the addresses 10.77.0.1, 10.77.0.2 ..., joined by a bridge in a namespace of its own."""

    prefix: str
    folder: Path
    hosts: list[Host] = field(factory=list)

    @property
    def hub(self) -> str:
        return f"{self.prefix}hub"

    def start(self, num_hosts: int) -> None:
        """Create the hosts and the bridge."""
        _ip("netns", "add", self.hub)
        _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.hub, "link", "set", "br0", "up")
        for number in range(1, num_hosts + 1):
            name = f"h{number}"
            host = Host(name, f"10.77.0.{number}", self.prefix + name, self.folder / name)
            _ip("netns", "add", host.namespace)
            self.hosts.append(host)
            inside = ("-n", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", self.hub)
            _ip("-n", self.hub, "link", "set", f"port{number}", "master", "br0", "up")
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "route", "add", "default", "dev", "eth0")
        for host in self.hosts:
            host.folder.mkdir()
            (host.folder / "resolv.conf").write_text("\n")
            self.name_hosts(host)

    def name_hosts(self, at: Host, own: str | None = None) -> None:
        """Write the hosts file of `at`; `own` is the address to which its own name resolves there, if not its address."""
        others = (f"{own if own and host is at else host.address} {host.name}\n" for host in self.hosts)
        (at.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(others))

    def cut(self, number: int) -> None:
        """Cut the link of host `number`, from 1."""
        _ip("-n", self.hub, "link", "set", f"port{number}", "down")

    def heal(self, number: int) -> None:
        _ip("-n", self.hub, "link", "set", f"port{number}", "up")

    def close(self) -> None:
        """Kill what runs on the hosts, and remove them."""
        for host in self.hosts:
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for name in [*(host.namespace for host in self.hosts), self.hub]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


@contextlib.contextmanager
def lab(num_hosts: int) -> Iterator[Lab]:
    """Make hosts for a block. Needs root."""
    with tempfile.TemporaryDirectory(prefix="netlab-") as folder:
        made = Lab(f"t{os.getpid()}x{time.monotonic_ns() % 10**6}", Path(folder))
        try:
            made.start(num_hosts)
            yield made
        finally:
            made.close()
