"""Several nodes with fixed ranks: the address of node 0, a port on it, and the rank of this node."""

from __future__ import annotations

from attrs import frozen

from stratagem.api.validators import at_least
from stratagem.errors import ConfigError
from stratagem_run.options import cli_option, flag

#: Of torchrun, too.
DEFAULT_PORT = 29500


def port_of(option: int | None) -> int:
    """Return the port that ``--main-port`` names, or the default one."""
    if option is not None and option > 65535:
        raise ConfigError(f"--main-port is {option}", expected="1 to 65535")
    return DEFAULT_PORT if option is None else option


@frozen(kw_only=True, slots=False)
class Static:
    """Options for nodes that are started one by one."""

    node_rank: int | None = cli_option("the rank of this machine, 0 to nodes - 1", "RANK", validator=at_least(0))
    main_address: str | None = cli_option("the name or address of node 0", "HOST")
    main_port: int | None = cli_option(f"a free port on node 0 (default {DEFAULT_PORT})", "PORT", validator=at_least(1))

    def addresses(self, nodes: int) -> tuple[int, str, int]:
        """Return the rank of this node, the address of node 0 and the port.

        Raises:
            ConfigError: one is missing or out of range.
        """
        missing = [flag(name) for name in ("node_rank", "main_address") if getattr(self, name) is None]
        if missing:
            raise ConfigError(
                f"--nodes is {nodes} and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                expected="both on every node", do=f"add {' and '.join(missing)}",
            )  # fmt: skip
        assert self.node_rank is not None
        assert self.main_address is not None
        if self.node_rank >= nodes:
            raise ConfigError(f"--node-rank is {self.node_rank} and --nodes is {nodes}", expected=f"0 to {nodes - 1}")
        return self.node_rank, self.main_address, port_of(self.main_port)

    def refuse_addresses(self, reason: str) -> None:
        """Refuse these options where they have no effect, because of `reason`."""
        for name in ("node_rank", "main_address", "main_port"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} is set and {reason}", do=f"leave {flag(name)} out")
