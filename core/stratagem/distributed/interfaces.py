"""Say how gloo connects: its network interface, which ranks, and the limit of open files for its connections."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stratagem.api.world import World


#: Files that a process may need besides the connections of its groups.
_OTHER_FILES = 512


def allow_connections(world_size: int) -> None:
    """Raise the limit of open files, if the system permits, to what gloo needs: a connection to each rank and group."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 5 * world_size + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --- Variables that gloo reads -----------------------------------------------------------------------------------

_GLOO_INTERFACE, _GLOO_LAZY = "GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"
#: Which of these this process set.
_set_here: set[str] = set()


def choose_interface(world: World) -> bool:
    """Set gloo's network interface to one that the other ranks can reach; return whether it was set.

    On one machine it is the loopback interface; on several, the interface of the route to the main address. The
    variable stays set until the group is destroyed, for groups that an engine creates later.
    """
    if _GLOO_INTERFACE in os.environ or not hasattr(socket, "if_nameindex"):
        return False
    found = _loopback() if world.num_nodes == 1 else _interface_towards(world)
    if found is not None:
        _set(_GLOO_INTERFACE, found)
    return found is not None


def connect_when_needed() -> None:
    """Have gloo connect ranks that send to each other, and not each rank to all: it has little to send beside NCCL."""
    if _GLOO_LAZY not in os.environ:
        _set(_GLOO_LAZY, "1")


def _set(variable: str, value: str) -> None:
    os.environ[variable] = value
    _set_here.add(variable)


def unset_variables() -> None:
    """Unset what this process set for the group."""
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


#: An address that no machine has (RFC 5737): packets to it would take the default route.
_ELSEWHERE = "192.0.2.1"


def _interface_towards(world: World) -> str | None:
    """Return the interface through which this node reaches the other nodes; None if it is unknown."""
    for host in (world.main_address, _ELSEWHERE):
        try:
            address = address_towards(host, world.main_port or 1)[1]
        except OSError:  # no route to it
            continue
        # On node 0 its own name often resolves to the loopback address: use the default route then.
        if not (address.startswith("127.") or address == "::1"):
            return interface_of(address)
    return None


def address_towards(host: str, port: int) -> tuple[int, str]:
    """Return the address family and this machine's source address for packets to `host`; sends none."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as towards:
        towards.connect(place)
        return family, towards.getsockname()[0]


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has `address`; None if the system does not provide it."""
    if ":" in address:
        with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
            wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
            return next((line.split()[5] for line in file if line.startswith(wanted)), None)
        return None
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
