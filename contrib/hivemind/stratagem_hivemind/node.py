"""The node of the distributed hash table that a peer starts, and the line with which others join."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from stratagem.errors import ConfigError
from stratagem_hivemind.checks import addresses_of_peers

if TYPE_CHECKING:
    from collections.abc import Callable


def start_node(
    run_id: str, initial_peers: list[str] | None, *, use_ipfs: bool, **options: Any
) -> tuple[Any, Callable[[], None]]:
    """Return a hivemind.DHT with these `options`, and the function that stops it.

    Raises:
        ConfigError: hivemind is not installed, or no peer answers at `initial_peers`.
    """
    try:
        import hivemind  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"strategy is 'hivemind', and hivemind cannot be imported here ({error})",
            expected="hivemind 1.1.12",
            do="pip install hivemind 'setuptools<81', or use strategy.local_sgd for processes that start together",
        ) from error
    from stratagem_hivemind.processes import stop
    from stratagem_hivemind.swarm import start_dht

    peers = [] if use_ipfs else addresses_of_peers(initial_peers)
    dht = start_dht(peers, 15.0, use_ipfs=use_ipfs, **options)
    if not peers and not use_ipfs:
        addresses = ",".join(map(str, dht.get_visible_maddrs()))
        print(
            f"hivemind: this is the first peer of {run_id!r}; others join with\n"
            f"    INITIAL_PEERS={addresses} python ...\n"
            "or the same text as strategy.hivemind.initial_peers.",
            flush=True,
        )
    return dht, functools.partial(stop, dht)
