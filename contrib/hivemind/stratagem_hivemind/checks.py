"""The options of the strategy `hivemind`, and those of the guides that cannot take effect."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stratagem.errors import ConfigError, shown

#: Variables that hold the addresses of other peers, separated by commas.
VARIABLES = ("INITIAL_PEERS", "PL_INITIAL_PEERS")

#: Arguments of hivemind.DecentralizedAverager that `averager_opts` may set.
AVERAGER_OPTIONS = (
    "allreduce_timeout", "compression", "declare_state_period", "min_vector_size", "next_chunk_timeout",
    "part_size_bytes", "reducer_timeout", "request_timeout", "sender_timeout", "shutdown_timeout", "state_compression",
)  # fmt: skip


def unsupported(reason: str, do: str) -> Callable[[Any, Any, Any], None]:
    """Return a validator that accepts None and False, and explains why anything else would have no effect."""

    def validate(_: Any, attribute: Any, value: Any) -> None:
        if value is not None and value is not False:
            raise ConfigError(
                f"strategy.hivemind.{attribute.name} is {shown(value)}, and {reason}",
                expected="it to be left out",
                do=do,
            )

    return validate


def check_name(_: Any, __: Any, value: Any) -> None:
    """Accept names of which hivemind can make keys."""
    if not isinstance(value, str) or not value or "." in value:
        raise ConfigError(f"strategy.hivemind.run_id is {shown(value)}", expected='text without "."')


def check_averager_options(_: Any, __: Any, value: Any) -> None:
    """Accept arguments of hivemind's averager that the strategy does not set itself."""
    for name in value or ():
        if name not in AVERAGER_OPTIONS:
            raise ConfigError(
                f"strategy.hivemind.averager_opts has {name!r}", expected=f"some of {', '.join(AVERAGER_OPTIONS)}"
            )


def as_list(value: Any) -> Any:
    """Return addresses as a list: text is divided at commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return None if value is None else list(value)


def addresses_of_peers(option: list[str] | None) -> list[str]:
    """Return the addresses of other peers: the option, or else the first of `VARIABLES` that is set.

    Raises:
        ConfigError: one is not an address of a peer.
    """
    from hivemind.utils.multiaddr import Multiaddr

    where, found = "strategy.hivemind.initial_peers", option
    if found is None:
        where = next((name for name in VARIABLES if os.environ.get(name)), where)
        found = as_list(os.environ.get(where, "")) or []
    for address in found:
        try:
            Multiaddr(address)["p2p"]
        except Exception as error:
            raise ConfigError(
                f"{where} has {shown(address)}, which is not the address of a peer",
                expected="an address such as /ip4/10.0.0.1/tcp/40000/p2p/12D3KooW..., as the first peer prints it",
            ) from error
    return list(found)
