"""Connect a replica with the others: the address of the lighthouse, and torchft's manager."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from attrs import frozen

from stratagem.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from stratagem.api import RunContext

#: torchft's variable with the lighthouse's address.
VARIABLE = "TORCHFT_LIGHTHOUSE"


@frozen(kw_only=True)
class Lighthouse:
    """The address of a lighthouse, and where it was set."""

    host: str
    port: int
    #: What the user wrote, with the option or variable.
    found: str

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def check(self, timeout: timedelta) -> None:
        """Refuse an address where nothing listens, or another server.

        Raises:
            ConfigError: with the reason.
        """
        limit_s = timeout.total_seconds()
        try:
            socket.create_connection((self.host, self.port), limit_s).close()
        except OSError as error:
            raise self.error(f"nothing listens there ({error.strerror or error})") from error
        connection = HTTPConnection(self.host, self.port, timeout=limit_s)
        try:
            connection.request("GET", "/status")  # what a lighthouse shows to people
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            raise self.error(f"no lighthouse answers there ({str(error) or type(error).__name__})") from error
        finally:
            connection.close()
        if status != HTTPStatus.OK:
            raise self.error(f"no lighthouse answers there (HTTP status {status})")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.found}, and {reason}",
            expected="the address of a lighthouse",
            do="start one with `torchft_lighthouse --min_replicas 1 --bind [::]:29510`, or correct the address; "
            "without other replicas use ddp",
        )


def find(option: str | None, path: str) -> Lighthouse:
    """Return the lighthouse that the `option` or the variable names.

    Raises:
        ConfigError: neither does, or it is not an address.
    """
    given = option or os.environ.get(VARIABLE)
    if not given:
        raise ConfigError(
            f"{path}.lighthouse is not set and neither is {VARIABLE}",
            expected='the address of a lighthouse, such as "host:29510"',
            do="start one with `torchft_lighthouse --min_replicas 1 --bind [::]:29510`; without other replicas use ddp",
        )
    found = f"{path}.lighthouse is {option!r}" if option else f"{VARIABLE} is {given!r}"
    try:
        parts = urlsplit(given if "//" in given else f"http://{given}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme not in ("http", "https"):
        raise ConfigError(found, expected='an address with a port, such as "host:29510"')
    return Lighthouse(host=host, port=port, found=found)


@frozen(kw_only=True)
class ManagerOptions:
    """What a manager is made with."""

    lighthouse: Lighthouse
    replica_id: int
    min_replica_size: int
    timeout: timedelta
    quorum_timeout: timedelta
    connect_timeout: timedelta
    quorum_retries: int
    max_retries: int | None
    spares: bool
    hostname: str


def make_manager(options: ManagerOptions, run: RunContext, store: Any) -> Any:
    """Return a manager of this rank of the replica; `store` is the replica's, on its rank 0.

    Collective over the ranks of the replica.

    Raises:
        ConfigError: on all ranks, if no lighthouse answers rank 0.
    """
    address = run.collectives.broadcast_object((options.hostname, store.port) if run.rank == 0 else None)
    manager, error = None, None
    if run.rank == 0:
        try:
            manager = _make_manager(options, run, address)
        except Exception as caught:  # noqa: BLE001 - torchft raises RuntimeError and others for a refused connection
            error = options.lighthouse.error(f"no lighthouse answers there ({str(caught).splitlines()[0]})")
            error.__cause__ = caught
    run.collectives.fail_together(error)
    return manager if run.rank == 0 else _make_manager(options, run, address)


def _make_manager(options: ManagerOptions, run: RunContext, address: tuple[str, int]) -> Any:
    from torchft.manager import Manager, WorldSizeMode

    return Manager(
        pg=process_group(run.device, options.timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=options.min_replica_size,
        use_async_quorum=False,  # a replica is healed before its forward, so that no batch is computed for nothing
        timeout=options.timeout,
        quorum_timeout=options.quorum_timeout,
        connect_timeout=options.connect_timeout,
        rank=run.rank,
        world_size=run.world_size,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if options.spares else WorldSizeMode.DYNAMIC,
        store_addr=address[0],
        store_port=address[1],
        lighthouse_addr=options.lighthouse.url,
        replica_id=f"stratagem_{options.replica_id}",
        hostname=options.hostname,
        checkpoint_transport=_transport(options),
        init_sync=False,  # it is done before the first step
        max_retries=options.max_retries,
        quorum_retries=options.quorum_retries,
    )


def process_group(device: torch.device, timeout: timedelta) -> Any:
    """Return torchft's process group for tensors on `device`, which is configured again for each quorum."""
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    return (ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo)(timeout=timeout)


def _transport(options: ManagerOptions) -> Any:
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc]  # torchft has no types here
        """Under the name of this machine that the user chose; torchft's own takes the system's."""

        def address(self) -> str:
            return f"http://{options.hostname}:{self._server.socket.getsockname()[1]}/checkpoint/"

    return Transport(timeout=options.timeout, num_chunks=0)
