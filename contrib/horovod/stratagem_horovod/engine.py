"""Start and end Horovod in the processes of a run, however these were started.

Horovod finds the other ranks through an HTTP server, whose address it reads from variables. Rank 0 runs that server
only until all ranks are connected, and tells the others its port over the run's collectives. So Horovod can be started
again in the same processes, which the server of horovodrun does not allow for.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stratagem.api.validators import check_equal_nodes
from stratagem.distributed.rendezvous import LOOPBACK
from stratagem.errors import ConfigError, LaunchError, StratagemError
from stratagem_horovod.variables import HOST, LOCAL_RANK, LOCAL_SIZE, NUM_HOSTS, RANK, SERVER, SERVER_PORT, SIZE

if TYPE_CHECKING:
    from stratagem.api import RunContext, World

_BUILD = "run `python -m stratagem_horovod.build`, which builds Horovod for the installed torch"
_INSTEAD = 'set strategy="ddp"'
_INTERFACE = "HOROVOD_GLOO_IFACE"
#: Seconds after which Horovod gives up a reduction that some rank does not join: without it the others wait forever.
_STALL, _STALL_S = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 1800


def load() -> Any:
    """Return the module ``horovod.torch``.

    Raises:
        ConfigError: Horovod is missing, or was built for another torch or without gloo.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):  # it prints why its library cannot be loaded, and goes on
            import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(
            f"strategy is 'horovod' and Horovod cannot be imported ({_first_line(str(error))})",
            expected="Horovod 0.28", do=f"{_BUILD}, or {_INSTEAD}",
        ) from error  # fmt: skip
    if not hasattr(hvd, "init"):
        raise ConfigError(
            f"strategy is 'horovod' and its library cannot be loaded ({_first_line(printed.getvalue())})",
            expected="one that was built for the installed torch", do=f"{_BUILD}, or {_INSTEAD}",
        )  # fmt: skip
    if not hvd.gloo_built():
        raise ConfigError(
            "strategy is 'horovod' and Horovod was built without gloo", expected="gloo, over which ranks connect",
            do=f"build it with HOROVOD_WITH_GLOO=1, or {_INSTEAD}",
        )  # fmt: skip
    return hvd


def start(run: RunContext, settings: dict[str, str]) -> bool:
    """Connect all ranks of `run` with Horovod; return False if the script had done so. Collective.

    Args:
        settings: variables that Horovod reads when it starts.
    """
    hvd: Any = None
    error: StratagemError | None = None
    try:
        hvd = load()
        started = hvd.is_initialized()
        if started:
            _check_same(hvd, run, settings)
        elif run.world is not None:
            check_equal_nodes(run.world, "strategy is 'horovod'", _INSTEAD)
    except ConfigError as found:
        error = found
    run.collectives.fail_together(error)
    assert hvd is not None
    assert run.world is not None, "the ranks are connected"
    if started:
        return False
    with _server(run) as (host, port), _variables(_of(run.world, host, port) | settings):
        try:
            hvd.init()
        except (ValueError, RuntimeError) as found:
            error = LaunchError(
                f"rank {run.rank} could not start Horovod ({_first_line(str(found))})",
                do=f"check {_INTERFACE}, or {_INSTEAD}",
            )
        run.collectives.fail_together(error)
    return True


def end() -> None:
    """End Horovod in this process; on the other ranks it ends, too."""
    import horovod.torch as hvd

    if hvd.is_initialized():
        hvd.shutdown()


def _check_same(hvd: Any, run: RunContext, settings: Mapping[str, str]) -> None:
    if (hvd.rank(), hvd.size()) != (run.rank, run.world_size):
        raise ConfigError(
            f"the script called hvd.init() as rank {hvd.rank()} of {hvd.size()}, and this is rank {run.rank} of "
            f"{run.world_size} of the run", expected="the same processes", do="remove hvd.init() from the script",
        )  # fmt: skip
    given = {name: value for name, value in settings.items() if os.environ.get(name) != value}
    if given:
        raise ConfigError(
            f"the script called hvd.init(), and options of strategy 'horovod' set {', '.join(sorted(given))}",
            expected="options that are set before Horovod starts",
            do="remove hvd.init() from the script, or set the variables before it",
        )


@contextlib.contextmanager
def _server(run: RunContext) -> Iterator[tuple[str, int]]:
    """Run a rendezvous server on rank 0 for the duration of the block; yield its address on all ranks. Collective."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    assert run.world is not None
    server, several = None, run.world.num_nodes > 1
    address = run.world.main_address if several else LOOPBACK
    if run.rank == 0:  # Horovod's own class listens on all addresses of the machine
        server = RendezvousHTTPServer(("" if several else LOOPBACK, 0), RendezvousHandler, 0)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="stratagem-horovod").start()
    try:
        yield address, run.collectives.broadcast_object(server.server_address[1] if server else 0)
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()


def _of(world: World, host: str, port: int) -> dict[str, str]:
    """Return the variables that tell Horovod the place of this process."""
    values = {
        RANK: world.rank, SIZE: world.world_size, LOCAL_RANK: world.local_rank, LOCAL_SIZE: world.local_world_size,
        HOST: world.node_rank, NUM_HOSTS: world.num_nodes, SERVER: host, SERVER_PORT: port,
        "HOROVOD_HOSTNAME": f"node{world.node_rank}", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        _STALL: os.environ.get(_STALL, _STALL_S),
    }  # fmt: skip
    # The run has chosen an interface for its own group that the other ranks can reach.
    interface = os.environ.get(_INTERFACE) or os.environ.get("GLOO_SOCKET_IFNAME")
    if world.num_nodes == 1 and _INTERFACE not in os.environ:
        interface = interface or "lo"
    return {name: str(value) for name, value in values.items()} | ({_INTERFACE: interface} if interface else {})


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the duration of the block: afterwards they would look like those of a horovodrun."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
